"""Whole or split logits: what a sharded model returns, changed after it was sharded.

By itself a model returns split logits where gradients are computed, for a loss takes them as they are, and whole ones
elsewhere: `generate()`, evaluation and search take a vocabulary for granted.
"""

from __future__ import annotations

from types import TracebackType

from torch import nn

from autoplan.common.errors import AutoplanError
from autoplan.common.options import check_argument
from autoplan.execute.hooks.running import Running
from autoplan.execute.tensor_parallel import applied

__all__ = ["gather_logits"]


class gather_logits:  # noqa: N801 - called as a function, as torch.no_grad is
    """Return logits whole (True), split (False), or split where gradients are computed and whole elsewhere (None).

    Holds from the call on, and only inside the block in a `with` statement. `model` may be wrapped or compiled.

        with torch.no_grad(), autoplan.gather_logits(model, False):
            logprobs = autoplan.vocab_parallel_logprobs(model(ids).logits, ids)
    """

    def __init__(self, model: nn.Module, gather: bool | None = True) -> None:
        if gather not in (None, True, False):
            raise AutoplanError(f"gather={gather!r}", hint="choose True, False or None")
        check_argument("model", model, nn.Module, "give the model itself, an nn.Module")
        records = [known for module in model.modules() if (known := applied(module)) is not None]
        if not records:
            raise AutoplanError(f"{type(model).__name__} was not sharded", hint="call autoplan.parallelize first")
        self._before: list[tuple[Running, bool | None]] = []
        for record in records:
            if record.running is not None:  # else nothing is split, and logits are whole
                self._before.append((record.running, record.running.gather_logits))
                record.running.gather_logits = gather

    def __enter__(self) -> gather_logits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for running, before in self._before:
            running.gather_logits = before

"""What a checkpointed block keeps op by op, where it is not run again whole.

In: ops as they are called. Out: keep the result, or compute it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, _VersionWrapper, create_selective_checkpoint_contexts

from autoplan.common.nested import flatten_tensors
from autoplan.ops import op_record
from autoplan.ops.records.answers import Drawn

__all__ = ["all_but_drawn", "intact_contexts", "selective_contexts"]

_GATHERED = ("all_gather", "_allgather", "allgather")


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of one call that keep every other matmul, attention and sums over ranks; the rest is computed again.

    Gathers are not kept: those of sequence parallelism have whole sequences as results, which it splits to save memory.
    """
    first, again = create_selective_checkpoint_contexts(_Policy())
    return first, again


def intact_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """`selective_contexts` of a call that is not compiled, where an op may change in place what is kept."""
    first, again = create_selective_checkpoint_contexts(_Policy())
    return _keeping_intact(first), again


def all_but_drawn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of one compiled call on a CPU that compute all again but what takes random numbers (attention may).

    torch's partitioner keeps a state of the generator for each of those, and on a CPU puts it behind the meshes that
    gradients of DTensors need: each is then taken for the other, and the forward fails. On a GPU it passes generators
    another way.
    """
    first, again = create_selective_checkpoint_contexts(_keep_drawn)
    return first, again


def _keep_drawn(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    draws = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
    return CheckpointPolicy.MUST_SAVE if draws else CheckpointPolicy.PREFER_RECOMPUTE


class _Policy:
    """Counts matmuls in forward and in recomputation apart, so that both runs keep the same ones."""

    def __init__(self) -> None:
        self.matmuls = {False: 0, True: 0}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op._opname if hasattr(op, "_opname") else str(op)
        if getattr(op, "namespace", "") in ("_c10d_functional", "c10d"):
            again = name.startswith(_GATHERED) or name == "wait_tensor"
            return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
        drawn = op_record(name).drawn
        if drawn is Drawn.ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if drawn is Drawn.CONTRACTION:
            self.matmuls[context.is_recompute] += 1
            odd = self.matmuls[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if odd else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _keeping_intact(first: Any) -> Iterator[None]:
    with _CopyBeforeChange(first.storage), first:
        yield


class _CopyBeforeChange(TorchDispatchMode):
    """Before an op changes in place what torch keeps (`(x @ w).add_(bias)`), a copy of it is kept instead.

    torch keeps an alias, and refuses it in backward when it was changed. The second run makes the change again.
    """

    supports_higher_order_operators = True

    def __init__(self, kept: Mapping[Any, Any]) -> None:
        super().__init__()
        self.kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            given = dict(zip((one.name for one in schema.arguments), args, strict=False)) | (kwargs or {})
            written = [given.get(one.name) for one in schema.arguments if one.is_write]
            changed = {_memory(one) for _, one in flatten_tensors(written)}
            for kept in _wrapped(list(self.kept.values())):
                if isinstance(kept.val, torch.Tensor) and _memory(kept.val) in changed:
                    kept.val = kept.val.clone()
                    kept.version = kept.val._version
        return func(*args, **(kwargs or {}))


def _wrapped(kept: Any) -> Iterator[_VersionWrapper]:
    if isinstance(kept, _VersionWrapper):
        yield kept
    elif isinstance(kept, (dict, list, tuple)):
        for one in kept.values() if isinstance(kept, dict) else kept:
            yield from _wrapped(one)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata

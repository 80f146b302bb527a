"""If one rank fails, all of them know: ranks exchange their status before they wait for each other.

The problem: a rank that refuses a plan, a folder or a disk leaves the others in a collective that it never joins; they
end after the group's timeout, minutes later, with a network error. And ranks that hold different models or plans would
cut different rows, or one would wait in a collective that no other rank joins.

So collective work stands in a `fail_together` block, and its parts that communicate begin with `meet`. At the end of
the block and at each `meet`, ranks exchange one row of a few bytes along each mesh dim: whether they failed, and
digests of what must be equal. All these exchanges look the same, so a rank that failed early can answer whichever one
the others have reached. Only after a failure does a second exchange say which rank failed and why, and all ranks raise.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoplan.common import errors
from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.options import TensorParallel
from autoplan.common.torch_internals import detect_fake_mode
from autoplan.execute.collectives import RankGroup, all_gather_rows, mesh_device
from autoplan.values import Plan
from autoplan.values.plan import digest

APPLIED = "_autoplan_applied"  # on a sharded model: what `tensor_parallel.py` recorded
_TOLD = "_autoplan_told"  # on an error that all ranks know about
_BYTES = 8192  # the size of a message, which is sent only after a failure
_LETTERS = (1500, 500)  # of a message and its hint: at most four bytes each
_open = threading.local()  # simulated ranks are threads: each has its own blocks


@dataclass(frozen=True)
class Voters:
    """The ranks that act together, by the groups along which they reach each other."""

    groups: tuple[RankGroup, ...]
    device: torch.device

    @staticmethod
    def of(*meshes: DeviceMesh | None) -> Voters:
        """Return all ranks along the dims of the given meshes."""
        present = [mesh for mesh in meshes if mesh is not None]
        groups = dict.fromkeys(RankGroup.of(mesh.get_group(dim)) for mesh in present for dim in range(mesh.ndim))
        device = mesh_device(present[0]) if present else torch.device("cpu")
        return Voters(tuple(group for group in groups if group.size > 1), device)

    @staticmethod
    def everyone(like: object = None) -> Voters:
        """Return all ranks of the process group; their collectives use the device of `like`'s parameters."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return Voters((), torch.device("cpu"))
        parameters = like.parameters() if isinstance(like, nn.Module) else iter(())
        device = next((parameter.device for parameter in parameters), None)
        on_cpu = device is None or dist.get_backend() == "gloo"
        return Voters((RankGroup.of(dist.group.WORLD),), torch.device("cpu") if on_cpu else device)

    @property
    def talk(self) -> bool:
        """Return whether anything is sent; it is not where tensors have no values."""
        return bool(self.groups) and self.device.type != "meta" and detect_fake_mode() is None


@dataclass(frozen=True)
class Alike:
    """A value that must be equal on all ranks, with the error that a rank raises if its own differs."""

    value: str
    message: str
    hint: str

    @property
    def digest(self) -> int:
        return int.from_bytes(hashlib.sha256(self.value.encode()).digest()[:7])


class fail_together:  # noqa: N801 - used as a function
    """Raise on all ranks if the block raises on some.

    If every rank failed, each raises its own error. Otherwise all raise the same AutoplanError, which names a rank that
    failed. KeyboardInterrupt and SystemExit are raised unchanged on the rank that had them. A block nested in another
    one of the same ranks reports its failure first, and the outer block does not report it again.
    """

    def __init__(self, voters: Voters, doing: str) -> None:
        self.voters, self.doing = voters, doing

    def __enter__(self) -> fail_together:
        if not hasattr(_open, "blocks"):
            _open.blocks = []
        _open.blocks.append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self in _open.blocks:
            del _open.blocks[_open.blocks.index(self) :]
        try:
            if not getattr(error, _TOLD, False):
                self.ask(error)
        finally:
            if error is not None and not _open.blocks:  # the same error may be raised again, elsewhere
                vars(error).pop(_TOLD, None)

    def ask(self, error: BaseException | None = None, alike: Iterable[Alike] = ()) -> None:
        """Exchange every rank's status and raise if some rank failed. Return where all is well, or where `error` is to
        be raised unchanged."""
        if not self.voters.talk:
            return
        try:
            failed = self._exchange(error, tuple(alike))
        except (RuntimeError, OSError) as gone:
            if error is None:
                reason = (str(gone).strip() or type(gone).__name__).splitlines()[0]
                raise _marked(
                    AutoplanError(
                        f"{self.doing}: another rank ended without reporting an error ({reason})",
                        hint="see the last output of that rank; was it killed for running out of memory?",
                    )
                ) from gone
            return
        if failed is None or not (error is None or isinstance(error, Exception)):
            if error is not None:
                _marked(error)
            return
        kind = getattr(errors, failed.kind, AutoplanError)  # the same class, if it is one of ours
        kind = kind if isinstance(kind, type) and issubclass(kind, AutoplanError) else AutoplanError
        raise _marked(kind(failed.message, hint=failed.hint)) from error

    def _exchange(self, error: BaseException | None, alike: tuple[Alike, ...]) -> _Failure | None:
        """Return the first failure on any rank; None if there is none, or if every rank has its own."""
        failure = None if error is None else _Failure.of(error, self.doing)
        everywhere = error is not None
        digests = [value.digest for value in alike] + [0] * (2 - len(alike))
        for group in self.voters.groups:
            mine = torch.tensor([[failure is not None, everywhere, *digests]], dtype=torch.int64)
            rows = self._gathered(mine, group).tolist()
            everywhere = all(row[1] for row in rows)
            if not any(row[0] for row in rows):
                if all(row == rows[0] for row in rows):
                    continue
                # A rank whose digests differ from those of the majority has failed.
                of_ranks = [tuple(row[2:]) for row in rows]
                majority = max(of_ranks, key=of_ranks.count)  # the first of them on a tie
                if of_ranks[group.rank] != majority:
                    odd = next(value for value, other in zip(alike, majority, strict=False) if value.digest != other)
                    failure = _Failure.of(PlanMismatchError(odd.message, hint=odd.hint), self.doing)
            own = b"" if failure is None else json.dumps(vars(failure), ensure_ascii=False).encode(errors="replace")
            message = torch.frombuffer(bytearray(own[:_BYTES].ljust(_BYTES, b"\0")), dtype=torch.uint8)[None]
            texts = [bytes(row.tolist()).rstrip(b"\0") for row in self._gathered(message, group)]
            failure = next((_Failure(**json.loads(text)) for text in texts if text), failure)
        return None if everywhere else failure

    def _gathered(self, row: torch.Tensor, group: RankGroup) -> torch.Tensor:
        return all_gather_rows(row.to(self.voters.device), group, 0, [1] * group.size).cpu()


def voters_of(model: nn.Module) -> Voters:
    """Return the ranks on which a model, or a sharded model inside it, lies; none for an unsharded model."""
    records = (applied for module in model.modules() if (applied := vars(module).get(APPLIED)) is not None)
    return next((record.voters for record in records), Voters((), torch.device("cpu")))


def voters_here() -> Voters:
    """Return the ranks of the innermost open block."""
    blocks = getattr(_open, "blocks", None)
    return blocks[-1].voters if blocks else Voters((), torch.device("cpu"))


def meet(*alike: Alike) -> None:
    """Raise unless all ranks of the innermost open block reach this point, none failed and `alike` are equal."""
    blocks = getattr(_open, "blocks", None)
    if blocks:
        blocks[-1].ask(None, alike)


@dataclass(frozen=True)
class _Failure:
    """The description of a failure that one rank sends to the others."""

    kind: str
    message: str
    hint: str

    @staticmethod
    def of(error: BaseException, doing: str) -> _Failure:
        ours = isinstance(error, AutoplanError)
        text = error.message if ours else f"{type(error).__name__}: {error}"  # type: ignore[attr-defined]
        hint = error.hint if ours else ""  # type: ignore[attr-defined]
        where = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        return _Failure(type(error).__name__, f"{doing} failed on {where}: {text[: _LETTERS[0]]}", hint[: _LETTERS[1]])


def _marked(error: Any) -> Any:
    vars(error)[_TOLD] = True
    return error


def same_model(model: nn.Module, tensors: Mapping[str, Any] | None = None) -> Alike:
    """Return the names, shapes and dtypes of a model's tensors (or of `tensors`), to be compared across ranks."""
    if tensors is None:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = [(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items() if isinstance(t, torch.Tensor)]
    return Alike(
        str(shapes),
        f"the ranks hold different models: {_this_rank()} has a {type(model).__name__} of {len(shapes)} "
        "tensors whose names, shapes or dtypes differ from those on other ranks",
        "build the same model from the same config on every rank",
    )


def same_plan(plan: Plan, options: TensorParallel | None = None) -> Alike:
    """Return the digest of a plan and its options, to be compared across ranks."""
    return Alike(
        f"{digest(plan)} {options}",
        f"the ranks hold different plans or options: {_this_rank()} has a plan for {plan.model} at {plan.over} "
        f"with hash {digest(plan)}, made with {plan.made_for.libraries}",
        "make the plan once and load the same file on every rank: plan.save(path), autoplan.load_plan(path)",
    )


def _this_rank() -> str:
    return f"rank {dist.get_rank()}" if dist.is_initialized() else "this rank"

"""One rank fails, all of them know: ranks ask each other before they wait for each other.

The problem: a rank that refuses a plan, a folder or a disk leaves the others in a collective that it never joins; they
end after the group's timeout, minutes later, with an error of the network. And ranks that hold different models or
plans would cut different rows, or one would wait in a collective that no other rank joins.

So what ranks do together stands in a `fail_together` block, and its parts that talk begin with `meet`. At the end of
the block and at each `meet` ranks exchange one row of a few bytes along each mesh dim: did I fail, and digests of what
must be alike. All these exchanges look the same, so a rank that failed early answers whichever the others have come to.
Only if somebody failed a second exchange says which rank, and why, and all of them raise.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh

from autoplan.common import errors
from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.options import TensorParallel
from autoplan.execute.collectives import RankGroup, all_gather_rows, mesh_device
from autoplan.values import Plan
from autoplan.values.plan import digest

APPLIED = "_autoplan_applied"  # on a sharded model: what `tensor_parallel.py` recorded
_TOLD = "_autoplan_told"  # on an error that all ranks know of
_BYTES = 8192  # of a message; they travel only after a failure
_LETTERS = (1500, 500)  # of a message and its hint: at most four bytes each
_open = threading.local()  # simulated ranks are threads: each has its own blocks


@dataclass(frozen=True)
class Voters:
    """The ranks that do something together, by the groups along which they reach each other."""

    groups: tuple[RankGroup, ...]
    device: torch.device

    @staticmethod
    def of(*meshes: DeviceMesh | None) -> Voters:
        """All ranks along the dims of some meshes."""
        given = [mesh for mesh in meshes if mesh is not None]
        groups = dict.fromkeys(RankGroup.of(mesh.get_group(dim)) for mesh in given for dim in range(mesh.ndim))
        return Voters(
            tuple(group for group in groups if group.size > 1), mesh_device(given[0]) if given else torch.device("cpu")
        )

    @staticmethod
    def everyone(like: object = None) -> Voters:
        """All ranks of the process group; a collective of theirs wants tensors where `like` has its own."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return Voters((), torch.device("cpu"))
        parameters = like.parameters() if isinstance(like, nn.Module) else iter(())
        device = next((parameter.device for parameter in parameters), None)
        on_cpu = device is None or dist.get_backend() == "gloo"
        return Voters((RankGroup.of(dist.group.WORLD),), torch.device("cpu") if on_cpu else device)

    @property
    def talk(self) -> bool:
        """Is anything sent? Not where tensors have no values."""
        return bool(self.groups) and self.device.type != "meta" and detect_fake_mode() is None


@dataclass(frozen=True)
class Alike:
    """Something that all ranks must have alike, and what a rank says of its own when it has something else."""

    value: str
    message: str
    hint: str

    @property
    def digest(self) -> int:
        return int.from_bytes(hashlib.sha256(self.value.encode()).digest()[:7])


class fail_together:  # noqa: N801 - used as a function
    """Raise on all ranks if the block raises on some.

    A rank that failed raises its own error; where others did not, it is an AutoplanError that names the rank. The
    others raise the same. KeyboardInterrupt and SystemExit stay what they are on the rank that had them. A block in
    another one of the same ranks tells what it knows first, and the outer one does not tell it again.
    """

    def __init__(self, voters: Voters, doing: str) -> None:
        self.voters, self.doing = voters, doing

    def __enter__(self) -> fail_together:
        if not hasattr(_open, "blocks"):
            _open.blocks = []
        _open.blocks.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in _open.blocks:
            del _open.blocks[_open.blocks.index(self) :]
        try:
            if not getattr(error, _TOLD, False):
                self.ask(error)
        finally:
            if error is not None and not _open.blocks:  # it may be raised again, elsewhere
                vars(error).pop(_TOLD, None)

    def ask(self, error: BaseException | None = None, alike: Iterable[Alike] = ()) -> None:
        """Exchange what every rank says; raise what some of them had. Returns where all is well, or `error` is to be
        raised as it is."""
        if not self.voters.talk:
            return
        try:
            failed = self._exchange(error, tuple(alike))
        except (RuntimeError, OSError) as gone:
            if error is None:
                raise _marked(
                    AutoplanError(
                        f"{self.doing}: another rank ended without a word ({_first_line(gone)})",
                        hint="look at what that rank printed last; was it killed for want of memory?",
                    )
                ) from gone
            return
        if failed is None or not (error is None or isinstance(error, Exception)):
            if error is not None:
                _marked(error)
            return
        raise _marked(failed.as_error()) from error

    def _exchange(self, error: BaseException | None, alike: tuple[Alike, ...]) -> _Failure | None:
        """The first failure that anybody knows of; None if there is none, or all ranks have one of their own."""
        told = None if error is None else _Failure.of(error, self.doing)
        everywhere = error is not None
        digests = [one.digest for one in alike] + [0] * (2 - len(alike))
        for group in self.voters.groups:
            mine = torch.tensor([[told is not None, everywhere, *digests]], dtype=torch.int64)
            rows = self._gathered(mine, group).tolist()
            everywhere = all(row[1] for row in rows)
            if not any(row[0] for row in rows):
                if all(row == rows[0] for row in rows):
                    continue
                told = self._differing(alike, rows, group)
            texts = self._gathered(_as_row(told), group)
            told = next((found for row in texts if (found := _of_row(row)) is not None), told)
        return None if everywhere else told

    def _differing(self, alike: tuple[Alike, ...], rows: list[list[int]], group: RankGroup) -> _Failure | None:
        """What this rank says if it is one of the fewer that have something else."""
        said = [tuple(row[2:]) for row in rows]
        most = max(said, key=said.count)  # of as many, the first
        if said[group.rank] == most:
            return None
        odd = next(one for one, theirs in zip(alike, most, strict=False) if one.digest != theirs)
        return _Failure.of(PlanMismatchError(odd.message, hint=odd.hint), self.doing)

    def _gathered(self, row: torch.Tensor, group: RankGroup) -> torch.Tensor:
        return all_gather_rows(row.to(self.voters.device), group, 0, [1] * group.size).cpu()


def voters_of(model: nn.Module) -> Voters:
    """The ranks on which a model lies, or a sharded one inside it; none for a model that is whole."""
    records = (known for module in model.modules() if (known := vars(module).get(APPLIED)) is not None)
    return next((record.voters for record in records), Voters((), torch.device("cpu")))


def voters_here() -> Voters:
    """Those of the innermost open block."""
    blocks = getattr(_open, "blocks", None)
    return blocks[-1].voters if blocks else Voters((), torch.device("cpu"))


def meet(*alike: Alike) -> None:
    """All ranks of the innermost open block are here, none failed, and they have these things alike; else all raise."""
    blocks = getattr(_open, "blocks", None)
    if blocks:
        blocks[-1].ask(None, alike)


@dataclass(frozen=True)
class _Failure:
    """What one rank says to the others."""

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

    def as_error(self) -> AutoplanError:
        """The same kind of error, if it is one of ours."""
        kind = getattr(errors, self.kind, AutoplanError)
        kind = kind if isinstance(kind, type) and issubclass(kind, AutoplanError) else AutoplanError
        return kind(self.message, hint=self.hint)


def _as_row(failure: _Failure | None) -> torch.Tensor:
    data = b"" if failure is None else json.dumps(vars(failure), ensure_ascii=False).encode(errors="replace")[:_BYTES]
    return torch.frombuffer(bytearray(data.ljust(_BYTES, b"\0")), dtype=torch.uint8)[None]


def _of_row(row: torch.Tensor) -> _Failure | None:
    data = bytes(row.tolist()).rstrip(b"\0")
    return _Failure(**json.loads(data)) if data else None


def _marked(error: Any) -> Any:
    vars(error)[_TOLD] = True
    return error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def same_model(model: nn.Module, tensors: Mapping[str, Any] | None = None) -> Alike:
    """Names, shapes and dtypes of a model's tensors, or of those given."""
    if tensors is None:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = [
        (name, tuple(one.shape), str(one.dtype)) for name, one in tensors.items() if isinstance(one, torch.Tensor)
    ]
    return Alike(
        str(shapes),
        f"the ranks hold different models: {_this_rank()} has a {type(model).__name__} of {len(shapes)} tensors, not "
        "with the names, shapes and dtypes that other ranks have",
        "build the same model from the same config on every rank",
    )


def refuse_differing_plans(model: nn.Module, plan: Plan, options: TensorParallel) -> None:
    """Raise on all ranks of the open block where they hold different models, plans or options."""
    meet(same_model(model), same_plan(plan, options))


def same_plan(plan: Plan, options: TensorParallel | None = None) -> Alike:
    """A plan, and how it is carried out."""
    versions = (
        ", ".join(f"{version.library} {version.version}" for version in plan.made_for.versions) or "unknown versions"
    )
    return Alike(
        f"{digest(plan)} {options}",
        f"the ranks hold different plans or options: {_this_rank()} has a plan for {plan.model} at {plan.over} "
        f"of the hash {digest(plan)}, made with {versions}",
        "make the plan once and load the same file on every rank: plan.save(path), autoplan.load_plan(path)",
    )


def _this_rank() -> str:
    return f"rank {dist.get_rank()}" if dist.is_initialized() else "this rank"

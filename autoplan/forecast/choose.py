"""Which mesh to take: every legal way to lay a model over so many GPUs, estimated, and put in order.

    choose ── candidates (sizes that divide) ── estimate_with (few recordings, many walks) ── rows in order ── Choice

A recording is made once for each split and each way of checkpointing; data parallelism, micro-batches and resharding
are arithmetic on it. What does not fit with one sequence and all blocks checkpointed is not looked at further.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoplan.api import parallelize
from autoplan.check.prove import proven_plan
from autoplan.common.errors import AutoplanError, IndivisibleError, PlanMismatchError
from autoplan.common.options import Wish, check_argument, check_count
from autoplan.forecast.devices import Device, load_device
from autoplan.forecast.estimate import Asked, estimate_with
from autoplan.forecast.script import script_text
from autoplan.forecast.step import Steps
from autoplan.hf.source import Model, Source, resolve
from autoplan.values import Plan
from autoplan.values.conveniences import done_above
from autoplan.values.estimate import Estimate, MemoryParts, Row

__all__ = ["Choice", "choose", "parse_memory"]

_CHECKPOINTING: tuple[bool | str, ...] = (False, "selective", True)
_MOST_GPUS = 1 << 16
_PARTS = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer states", "kept": "activations kept",
          "temporary": "values of the moment", "unsharded": "units that are gathered", "communication": "messages",
          "cache": "keys and values", "overhead": "context and communicators"}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """The rows in order, those that fit first and the fastest before others. `enough`: the smallest number of GPUs
    that would do, where none fits."""

    source: Source = field(repr=False)
    rows: tuple[Row, ...]
    gpus: int
    memory: int
    device: Device
    dropped: tuple[str, ...] = ()
    enough: int | None = None
    steps: Steps | None = field(default=None, repr=False, compare=False)

    @property
    def fits(self) -> bool:
        return bool(self.rows) and self.rows[0].fits

    @property
    def best(self) -> Row:
        if not self.fits:
            more = f"{self.enough} GPUs would do" if self.enough else "no number of such GPUs does"
            raise AutoplanError(
                f"{self.source.name} does not fit {self.gpus} GPUs of {self.memory / 1e9:.0f} GB: "
                f"{self.rows[0].binds if self.rows else 'no size divides'}",
                hint=more,
            )
        return self.rows[0]

    @property
    def nearest(self) -> Row | None:
        """The fastest row that does not fit."""
        return next((row for row in self.rows if not row.fits), None)

    @property
    def plan(self) -> Plan:
        """The plan of the best row, proven."""
        mesh, best = self.best.mesh, self.best
        wish = Wish(mesh.get("tp", 1), mesh.get("ep", 1), best.sequence_parallel)
        return proven_plan(self.source, wish)

    def mesh(self, device_type: str = "cuda") -> DeviceMesh:
        """The best row's mesh over the ranks of this job."""
        sizes = self.best.mesh
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
        """Shard `model` as the best row says."""
        return parallelize(model, self.mesh() if mesh is None else mesh, self.plan, **self.options())

    def options(self) -> dict[str, Any]:
        """The keywords of `parallelize` for the best row."""
        best = self.best
        options: dict[str, Any] = {}
        if best.checkpointing and best.estimate.train != "inference":
            options["activation_checkpointing"] = best.checkpointing
        if "dp_shard" in best.mesh and best.reshard is not None:
            options["reshard_after_forward"] = best.reshard
        return options

    def script(self) -> str:
        """A program for torchrun that trains so."""
        return script_text(self.source, self.best, self.options(), self.device.per_node)

    def __str__(self) -> str:
        return str(done_above("Choice.__str__", self))

    def report(self, path: str | PathLike[str]) -> None:
        """Write a page to look at: every way with its memory, and the plan of the best one, proven."""
        done_above("Choice.report", self, path)

    def _repr_html_(self) -> str:
        """In a notebook."""
        return str(done_above("Choice._repr_html_", self))


def parse_memory(text: str | int) -> int:
    """Bytes of "80GB", "79GiB" or a number."""
    if isinstance(text, int) and text > 0 and not isinstance(text, bool):
        return text
    check_argument("memory", text, str, "write it like 80GB or 79GiB")
    text = str(text)
    for ending, unit in (("GiB", 2**30), ("GB", 10**9), ("TB", 10**12), ("G", 10**9), ("", 1)):
        if text.endswith(ending) and text.removesuffix(ending).replace(".", "", 1).isdigit():
            return int(float(text.removesuffix(ending)) * unit)
    raise AutoplanError(f"memory {text!r} is no size", hint="write it like 80GB or 79GiB")


def choose(
    model: Model,
    *,
    gpus: int,
    memory: str | int | None = None,
    gpu: str | Device = "h100",
    per_node: int | None = None,
    sequence: int = 2048,
    global_batch: int = 0,
    train: str = "full",
    optimizer: str = "adamw",
    mp_policy: Any = None,
    inputs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Choice:
    """How to run `model` on `gpus` devices of `memory` each: every legal mesh and way, estimated and ranked.

    `global_batch`: sequences a step of all ranks (by default one for each GPU); for "inference", those held at once.
    The device is one of rules/devices, or a file of one's own.
    """
    check_count("gpus", gpus)
    device = gpu if isinstance(gpu, Device) else load_device(gpu)
    if gpus < 1 or global_batch < 0:
        raise AutoplanError(f"{gpus} GPUs, global batch {global_batch}", hint="give numbers from 1 on")
    source = resolve(model, trust_remote_code=trust_remote_code, inputs=inputs)
    steps = Steps(source, None, inputs)
    size = parse_memory(memory) if memory is not None else device.memory
    sweep = _Sweep(steps, device, size, per_node or device.per_node, sequence, train, optimizer, mp_policy)
    rows = sweep.rows(gpus, global_batch or gpus)
    if not rows and global_batch:
        raise _no_batch(sweep, gpus, global_batch)
    rows = sweep.settled(rows)
    enough = None if rows and rows[0].fits else sweep.enough(gpus)
    return Choice(source, tuple(rows), gpus, size, device, tuple(sweep.dropped), enough, steps)


def _no_batch(sweep: _Sweep, gpus: int, batch: int) -> AutoplanError:
    copies = sorted({gpus // tp for tp in sweep.tensor_sizes(gpus)})
    near = min(((max(1, round(batch / n)) * n) for n in copies), key=lambda n: abs(n - batch))
    return IndivisibleError(
        f"a global batch of {batch} cannot be dealt to {' or '.join(map(str, copies))} copies of the model "
        f"on {gpus} GPUs",
        hint=f"the nearest that can: {near}",
    )


@dataclass
class _Sweep:
    """All that is asked of one model on one kind of device."""

    steps: Steps
    device: Device
    memory: int
    per_node: int
    sequence: int
    train: str
    optimizer: str
    mp_policy: Any
    dropped: list[str] = field(default_factory=list)
    asked: dict[int, Asked] = field(default_factory=dict)  # by the id of the estimate that it led to

    def tensor_sizes(self, gpus: int) -> list[int]:
        """Legal sizes of tp that divide the GPUs and stay in a node."""
        legal = self.steps.plan(1).legal_tp
        return [tp for tp in legal if gpus % tp == 0 and tp <= min(gpus, self.per_node)]

    def rows(self, gpus: int, batch: int) -> list[Row]:
        found: list[Row] = []
        for tp in self.tensor_sizes(gpus):
            for along in (
                (False, True) if tp > 1 and self.sequence % tp == 0 and self.train != "inference" else (False,)
            ):
                if along and not self._cut_along(tp):
                    continue
                found += self._of_split(gpus, batch, tp, along)
        return found

    def _cut_along(self, tp: int) -> bool:
        try:
            return self.steps.split(tp, 1, True).sequence_parallel
        except IndivisibleError:
            return False

    def _of_split(self, gpus: int, batch: int, tp: int, along: bool) -> Iterator[Row] | list[Row]:
        copies = gpus // tp
        if batch % copies:
            self.dropped.append(f"tp {tp}: a global batch of {batch} does not divide by {copies}")
            return []
        each = batch // copies
        if self.train == "inference":
            try:
                return [self._row(Asked((("dp_shard", copies), ("tp", tp)), each, self.sequence, train=self.train))]
            except PlanMismatchError as error:  # decoding runs another branch than the one that was planned
                self.dropped.append(f"tp {tp}: {error.message}")
                return []
        try:
            smallest = self._row(self._asked(self._meshes(copies, tp)[0], 1, True, along, None, each))
        except IndivisibleError as error:  # of a prompt with several sequences, one may not divide
            self.dropped.append(f"tp {tp}, sequence parallel: {error.message}")
            return []
        if not smallest.fits:
            return [smallest]
        return list(self._ways(copies, tp, along, each))

    def _ways(self, copies: int, tp: int, along: bool, each: int) -> Iterator[Row]:
        for checkpointing in _CHECKPOINTING:
            fitted = True
            for micro in (n for n in range(1, each + 1) if each % n == 0 and n & (n - 1) == 0):
                if not fitted:
                    break
                fitted = False
                for mesh in self._meshes(copies, tp):
                    for reshard in (None, False) if copies > 1 else (None,):
                        row = self._row(self._asked(mesh, micro, checkpointing, along, reshard, each))
                        fitted = fitted or row.fits
                        yield row

    def _meshes(self, copies: int, tp: int) -> list[tuple[tuple[str, int], ...]]:
        """FSDP2 over all copies of the split, and over those of a node or of a few, with replicas between (HSDP)."""
        near = max(1, self.per_node // tp)
        shards = sorted({copies, *(n for n in (near, near * 4) if 1 < n < copies and copies % n == 0)}, reverse=True)
        return [(("dp_replicate", copies // n), ("dp_shard", n), ("tp", tp)) for n in shards]

    def _asked(self, mesh: tuple[tuple[str, int], ...], micro: int, checkpointing: bool | str, along: bool,
               reshard: bool | None, each: int) -> Asked:  # fmt: skip
        return Asked(
            mesh, micro, self.sequence, checkpointing, self.mp_policy, self.optimizer, self.train, reshard, along,
            max(1, each // micro), exact=False,
        )  # fmt: skip

    def _row(self, asked: Asked) -> Row:
        found = estimate_with(self.steps, asked, self.device)
        self.asked[id(found)] = asked
        missing = max(0, found.peak - self.memory)
        binds = _biggest(found.parts) if missing else _slowest(found)
        said: Any = asked.activation_checkpointing
        return Row(found, said, asked.sequence_parallel, asked.reshard_after_forward, asked.accumulate, not missing,
                   binds, missing)  # fmt: skip

    def settled(self, rows: list[Row]) -> list[Row]:
        """In order. The batch of the first row is recorded itself, until one that was stays first."""
        exact: set[int] = set()
        while True:
            rows = sorted(rows, key=lambda row: (not row.fits, row.missing, -row.estimate.tokens_per_second))
            if not rows or not rows[0].fits or id(rows[0]) in exact or rows[0].estimate.batch <= 2:
                return rows
            asked = self.asked[id(rows[0].estimate)]
            rows[0] = self._row(replace(asked, exact=True))
            exact.add(id(rows[0]))

    def enough(self, gpus: int) -> int | None:
        """The smallest power of two times `gpus` on which one sequence a rank fits, all blocks checkpointed."""
        count = gpus * 2
        while count <= _MOST_GPUS:
            for tp in self.tensor_sizes(count):
                if self.train == "inference":
                    asked = Asked((("dp_shard", count // tp), ("tp", tp)), 1, self.sequence, train=self.train)
                else:
                    asked = self._asked(self._meshes(count // tp, tp)[0], 1, True, False, None, 1)
                if self._row(asked).fits:
                    return count
            count *= 2
        return None


def _biggest(parts: MemoryParts) -> str:
    name = max(_PARTS, key=lambda part: getattr(parts, part))
    return f"memory: {_PARTS[name]} take {getattr(parts, name) / 2**30:.1f} GiB"


def _slowest(found: Estimate) -> str:
    assert found.time is not None
    times = {"operations": found.time.compute, "bandwidth of memory": found.time.memory}
    times |= {f"messages over {dim}": seconds for dim, seconds in found.time.exposed}
    name = max(times, key=lambda one: times[one])
    return f"{name}: {times[name] / max(found.time.total, 1e-12):.0%} of the step"

"""Memory of one rank through a step: the recording at full depth, with FSDP2 laid over it.

FSDP2 gathers a unit into one flat buffer and copies it out, frees it after the forward, gathers the next unit while
one's backward runs, and sums gradients from a flat buffer that lives until the next one's. (torch 2.13,
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.)
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce

from autoplan.forecast.recording.tape import LeftOut, Program, Stretch, UnitEvent, expanded
from autoplan.forecast.sharded import Held, UnitSize
from autoplan.values.estimate import MemoryParts, Sent

_KINDS_OF_PART = {"kept": "kept", "temporary": "temporary", "gradient": "gradients", "communication": "communication"}
# Its loops over gradients were moved into a function of their own, which lets go of the last ones when it returns.
_LOOPS_HOLD_GRADIENTS = "prepare_reduce_scatter_inputs" not in inspect.signature(foreach_reduce).parameters


@dataclass(frozen=True)
class DataRanks:
    """The sharding of parameters over data-parallel ranks. `compute`, `reduce`: bytes of an element when gathered and
    when gradients are summed; None: as stored. `reshard`: None frees all units but the last of each stack. `casts`: of
    what the model returns; the last gather's buffer is held until then. `offload`: shards of parameters, gradients and
    states lie in the host's memory. `exchange`: so many of the ranks hold whole experts, and exchange tokens for them;
    only those that hold the same ones gather them."""

    shard: int = 1
    replicate: int = 1
    on: bool = False
    compute: int | None = None
    reduce: int | None = None
    reshard: bool | None = None
    casts: bool = False
    offload: bool = False
    exchange: int = 1

    def gathered(self, unit: UnitSize) -> int:
        return sum(
            int(p.padded(self.shard) * (p.packed or self.compute or p.size) * self.part(p)) for p in unit.parameters
        )

    def turned(self, unit: UnitSize) -> int:
        """Return the gathered bytes that FSDP2 copies again, since they are not sharded along the first dim."""
        inside = (p for p in unit.parameters if p.cut_inside(self.shard))
        return sum(int(p.elements * (p.packed or self.compute or p.size) * self.part(p)) for p in inside)

    def reduced(self, unit: UnitSize) -> int:
        sizes = ((p, self.reduce or self.compute or p.size) for p in unit.parameters if p.trained)
        return sum(int(p.padded(self.shard) * size * self.part(p)) for p, size in sizes)

    def gradients(self, unit: UnitSize) -> int:
        return sum(self.gradient(p) for p in unit.parameters if p.trained)

    def gradient(self, held: Held) -> int:
        return int(held.elements * (self.compute or held.size) * self.part(held))

    def part(self, held: Held) -> float:
        """Return the part of a parameter that a rank has when it is gathered."""
        return 1 / self.exchange if held.stack else 1.0

    def stored(self, held: Held) -> int:
        """Bytes of this rank's piece on the device."""
        if self.offload:
            return 0
        return int((held.padded(self.shard) // self.shard if self.on else held.elements) * (held.packed or held.size))

    def frees(self, unit: UnitSize) -> bool:
        if unit.name == "":
            return False
        return not unit.last if self.reshard is None else self.reshard


def alike(units: tuple[UnitSize, ...]) -> Iterator[tuple[UnitSize, int]]:
    """One unit of each kind, and how many there are: blocks that were left out share the parameters of another."""
    numbers = Counter(id(unit.parameters) for unit in units)
    kinds = {id(unit.parameters): unit for unit in units}
    return ((kinds[key], number) for key, number in numbers.items())


def held_bytes(units: tuple[UnitSize, ...], data: DataRanks, *, trained: bool = False) -> int:
    return sum(n * sum(data.stored(p) for p in u.parameters if p.trained or not trained) for u, n in alike(units))


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a unit, in bytes: see `DataRanks`. `last`: of the last trained parameter; `inside`: of the last one that
    is sharded inside, which may be the `same`; both are held by loops of FSDP2 before torch 2.15, and 0 since. `piece`:
    of its trained parameters on a rank."""

    gathered: int
    turned: int
    reduced: int
    gradients: int
    piece: int
    last: int
    inside: int
    same: bool

    @classmethod
    @lru_cache(maxsize=1024)  # a sweep asks for the same units with each micro-batch
    def of(cls, unit: UnitSize, data: DataRanks) -> _Sizes:
        trained = [p for p in unit.parameters if p.trained]
        held = trained if _LOOPS_HOLD_GRADIENTS else []
        inside = [p for p in held if p.cut_inside(data.shard)]
        return cls(
            data.gathered(unit), data.turned(unit), data.reduced(unit), data.gradients(unit),
            sum(map(data.stored, trained)), data.gradient(held[-1]) if held else 0,
            data.gradient(inside[-1]) if inside else 0, bool(inside) and inside[-1] is held[-1],
        )  # fmt: skip


@dataclass
class Peak:
    """The highest moment so far."""

    total: int = -1
    parts: dict[str, int] = field(default_factory=dict)
    where: str = ""
    phase: str = ""


class Walk:
    """One walk through a micro-batch. `standing`: what is there before; where gradients are among it, those of this
    micro-batch are added to them."""

    def __init__(
        self, program: Program, left_out: LeftOut, units: tuple[UnitSize, ...], data: DataRanks, standing: MemoryParts
    ) -> None:
        self.program, self.left_out, self.data = program, left_out, data
        self.units = {unit.name: unit for unit in units}
        self.live = {"weights": standing.weights, "optimizer": standing.optimizer, "gradients": standing.gradients,
                     "kept": 0, "temporary": 0, "communication": 0, "unsharded": 0}  # fmt: skip
        self.adding = standing.gradients > 0
        self.peak = Peak()
        self.sizes: dict[int, _Sizes] = {}  # by the parameters
        self.gathered: set[str] = set()
        self.prefetched: set[str] = set()
        self.pending = 0  # the last forward gather's buffer
        self.held = 0  # the last reduction's buffer
        self.summed = 0  # sums over replicas that FSDP2 keeps
        self.order: list[str] = []
        self.done: set[str] = set()
        self.phase = "forward"
        self.sent: dict[tuple[str, str, str], list[int]] = {}  # by phase, dim and kind
        self.flops: dict[str, int] = {}
        self.ahead = 0  # the forward's operations
        self.moved = 0
        self.fused = 0  # bytes that are moved if elementwise work is compiled
        self.layers: dict[str, int] = {}  # operations of products in blocks
        self.expert_flops = 0  # of the forward
        self.waiting = 0  # what blocks keep for backward
        self.lasts = 0  # what a cache holds for later tokens
        self.ours = {unit.name: _ours(unit, data) for unit in units} if data.exchange > 1 else {}
        self.moments: dict[tuple[str, str], int] = {}  # the highest moment in each module

    def run(self) -> Peak:
        self._check("the model", "forward")
        for phase, steps, block in expanded(self.program, self.left_out):
            if phase != self.phase:
                self._let_go()
            self.phase = phase
            for step in steps:
                if isinstance(step, UnitEvent):
                    self._event(step, block, phase)
                elif isinstance(step, Stretch):
                    self._stretch(step, block, phase)
        return self.peak

    def _stretch(self, step: Stretch, block: str, phase: str) -> None:
        ours = self.ours.get(block, 1.0)
        if step.at:
            at = {kind: size * (ours if kind == "gradient" else 1) for kind, size in step.at.items()}
            total = sum(self.live.values()) + sum(at.values())
            moment = phase, _place(block, step.module)
            self.moments[moment] = max(int(total), self.moments.get(moment, 0))
            if total > self.peak.total:
                parts = dict(self.live)
                for kind, size in at.items():
                    parts[_KINDS_OF_PART[kind]] += int(size)
                self.peak = Peak(int(total), parts, _place(block, step.module), phase)
        for kind, size in step.net.items():
            if kind == "gradient" and self.adding and not self.data.on:
                continue  # added to what is there
            self.live[_KINDS_OF_PART[kind]] += int(size * (ours if kind == "gradient" else 1))
        if block and phase == "forward":
            self.waiting = max(self.waiting, self.live["kept"])
            self.expert_flops += int(step.layers.get("experts", 0))
        for layer, flops in step.layers.items() if block else ():
            self.layers[layer] = self.layers.get(layer, 0) + int(flops)
        for (dim, kind), (number, size) in step.sent.items():
            self._add(dim, kind, number, int(size))
        for dtype, flops in step.flops.items():
            self.flops[dtype] = self.flops.get(dtype, 0) + int(flops)
            self.ahead += int(flops) if phase == "forward" else 0
        self.moved += int(step.moved)
        self.fused += int(step.fused)
        self.lasts += int(step.lasts)

    def _check(self, where: str, phase: str) -> None:
        total = sum(self.live.values())
        if total > self.peak.total:
            self.peak = Peak(total, dict(self.live), where, phase)

    # ---------------------------------------------------------------------------------------- data parallelism

    def _event(self, event: UnitEvent, block: str, phase: str) -> None:
        if not self.data.on:
            return
        unit = self.units.get(_renamed(event.unit, block))
        if unit is None or not unit.parameters and unit.name:
            return
        if event.phase == "forward":
            (self._before_forward if event.when == "before" else self._after_forward)(unit)
        elif event.when == "before":
            if unit.name not in self.gathered:
                self._prefetch(unit)
                size = self._sizes(unit).gathered + self._sizes(unit).turned
                self._give("unsharded", size)
                self._check(f"gathering {unit.name}", "backward")
                self._give("unsharded", -size)
                self.gathered.add(unit.name)
                self.prefetched.discard(unit.name)
            if unit.name in self.order and (place := self.order.index(unit.name)):
                self._prefetch(self.units[self.order[place - 1]])
        elif unit.name:
            self._after_backward(unit)
        else:
            for rest in self.units.values():
                self._after_backward(rest)
            self._give("unsharded", -self.held - self.summed)
            self.held = self.summed = 0

    def _before_forward(self, unit: UnitSize) -> None:
        if unit.name in self.gathered:
            return
        size, turned = self._sizes(unit).gathered, self._sizes(unit).turned
        self._give("unsharded", size)
        self._check(f"gathering {unit.name or 'the model'}", "forward")
        self._give("unsharded", size + turned)  # copied out while the last gather's buffer is held: they overlap
        self._check(f"gathering {unit.name or 'the model'}", "forward")
        self._give("unsharded", -self.pending - turned)
        self.pending = size
        self.gathered.add(unit.name)
        self._count("all-gather", size)

    def _after_forward(self, unit: UnitSize) -> None:
        self.order.append(unit.name)
        if self.data.frees(unit):
            self._free(unit)
        if not unit.name and not self.data.casts:
            self._let_go()

    def _let_go(self) -> None:
        """Free the last gather's buffer."""
        self._give("unsharded", -self.pending)
        self.pending = 0

    def _prefetch(self, unit: UnitSize) -> None:
        if unit.name not in self.gathered and unit.name not in self.prefetched:
            self._give("unsharded", self._sizes(unit).gathered)
            self.prefetched.add(unit.name)
            self._count("all-gather", self._sizes(unit).gathered)

    def _after_backward(self, unit: UnitSize) -> None:
        if unit.name in self.done:
            return
        self.done.add(unit.name)
        if unit.name in self.gathered:
            self._free(unit)
        sizes = self._sizes(unit)
        whole, size = sizes.gradients, sizes.reduced
        if not size:
            return
        turned_last = sizes.inside  # held by the loop that turns gradients; the one that copies them in holds the last
        self._give("unsharded", size - self.held + turned_last)
        self._check(f"reducing gradients of {unit.name or 'the model'}", "backward")
        self.held = size
        turned = 0 if sizes.same else turned_last
        output = size // self.data.shard
        self._give("gradients", sizes.last - whole)
        self._give("unsharded", turned - turned_last)
        piece = sizes.piece
        cast = piece if piece != output else 0  # the sum and, in the dtype of the parameters, its copy
        self._give("unsharded", output + cast)
        self._check(f"reducing gradients of {unit.name or 'the model'}", "backward")
        keeps = output if cast and self.data.replicate > 1 else 0  # of each sum over replicas, until backward ends
        self._give("unsharded", keeps - output - cast - turned)
        self.summed += keeps
        self._give("gradients", whole - sizes.last)
        self._give("gradients", (0 if self.adding else piece) - whole)
        self._count("reduce-scatter", size)
        if self.data.replicate > 1:
            self._count("all-reduce", size // self.data.shard, "dp_replicate")

    def _sizes(self, unit: UnitSize) -> _Sizes:
        key = id(unit.parameters)
        if key not in self.sizes:
            self.sizes[key] = _Sizes.of(unit, self.data)
        return self.sizes[key]

    def _free(self, unit: UnitSize) -> None:
        self._give("unsharded", -self._sizes(unit).gathered)
        self.gathered.discard(unit.name)

    def _give(self, part: str, size: int) -> None:
        self.live[part] += size

    def _count(self, kind: str, size: int, dim: str = "dp_shard") -> None:
        if dim != "dp_shard" or self.data.shard > 1:
            self._add(dim, kind, 1, size)

    def _add(self, dim: str, kind: str, number: int, size: int) -> None:
        total = self.sent.setdefault((self.phase, dim, kind), [0, 0])
        total[0] += number
        total[1] += size

    def messages(self, phase: str = "") -> tuple[Sent, ...]:
        """Return the messages of the step, or of one phase of it."""
        totals: dict[tuple[str, str], list[int]] = {}
        for (when, dim, kind), (number, size) in self.sent.items():
            if phase in ("", when):
                total = totals.setdefault((dim, kind), [0, 0])
                total[0], total[1] = total[0] + number, total[1] + size
        return tuple(Sent(dim, kind, number, size) for (dim, kind), (number, size) in totals.items())


def _ours(unit: UnitSize, data: DataRanks) -> float:
    """Return the gradients of a rank's own experts and of all else, as a share of those without exchanges."""
    alone = replace(data, exchange=1).gradients(unit)
    return data.gradients(unit) / alone if alone else 1.0


def _renamed(name: str, block: str) -> str:
    """The unit of the block that a stretch is said of: in the recording it has the name of the block that stands."""
    container = block.rpartition(".")[0]
    if not block or not name.startswith(f"{container}."):
        return name
    _, _, rest = name[len(container) + 1 :].partition(".")
    return f"{block}.{rest}" if rest else block


def _place(block: str, module: str) -> str:
    return _renamed(module, block) if module else block or "the model"

"""Every legal way to lay a model over so many GPUs, estimated: the rows that `choose` puts in order.

    splits (tp, experts apart, cp) ── along the sequence ── checkpointing ── micro-batch ── FSDP2 or HSDP ── resharding

Each split and way of checkpointing is recorded once; all else is arithmetic. What a bound says cannot fit, or is larger
and slower than another split, is not recorded (docs/estimate.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from math import lcm
from typing import Any

from autoplan.common.errors import AutoplanError, IndivisibleError, PlanMismatchError
from autoplan.common.stages import stage
from autoplan.decide.rulebook.read import rule_named
from autoplan.emit.tables.estimate_table import PARTS, size_text
from autoplan.forecast.asked import Asked
from autoplan.forecast.devices import Device
from autoplan.forecast.estimate import estimate_with
from autoplan.forecast.step import Steps
from autoplan.values import LocalExperts
from autoplan.values.estimate import MemoryParts, Row

_CHECKPOINTING: tuple[bool | str, ...] = (False, "selective", True)
_MOST_GPUS = 1 << 16
_DOUBLED = (1, 2, 4, 8, 16, 32, 64)  # stages of a pipeline, ranks that exchange tokens
LONG = 1 << 15  # tokens of a sequence from which it is cut over ranks of cp, too
_MUCH_SLOWER = 0.9  # than the fastest with fewer replicas: more replicas are not looked at


@dataclass(frozen=True)
class Split:
    """Over `tp` ranks, with experts placed whole on `ep` (of tp, or others); the sequence over `cp`."""

    tp: int
    ep: int = 1
    cp: int = 1

    @property
    def ranks(self) -> int:
        return max(self.tp, self.ep) * self.cp

    @property
    def shared(self) -> bool:
        """Return whether experts are placed on the tp ranks."""
        return self.tp == self.ep > 1

    @property
    def dims(self) -> tuple[tuple[str, int], ...]:
        split = ("ep", self.ep) if self.tp == 1 < self.ep else ("tp", self.tp)
        return (("cp", self.cp), *([split] if self.tp > 1 else [])) if self.cp > 1 else (split,)

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self.dims) + (", experts apart" if self.shared else "")


@dataclass
class Sweep:
    """All that is asked of one model on one kind of device. `common`: what all rows share; its `concurrency` is that of
    all copies of the model."""

    steps: Steps
    device: Device
    memory: int
    common: Asked
    virtual_stages: int = 1  # on each rank of pp, of what others run
    dropped: list[str] = field(default_factory=list)
    asked: dict[int, Asked] = field(default_factory=dict)  # by the id of the estimate that it led to
    held: dict[int, list[int]] = field(default_factory=dict)  # bytes of the smallest steps over ever fewer cp, by tp
    beaten: set[tuple[int, bool]] = field(default_factory=set)  # kinds of split that another one beats: see `_kind`
    ways: dict[tuple[int, bool | str, int], Row] = field(default_factory=dict)  # over cp and the fewest ranks of tp
    priced: set[tuple[Split, bool]] = field(default_factory=set)  # by `enough`, cut along the sequence or not
    failed: set[tuple[int, bool | str, int]] = field(default_factory=set)  # tp, checkpointing, micro-batch; over cp

    @cached_property
    def again(self) -> tuple[bool | str, ...]:
        """Ways of checkpointing, from none to all blocks; a model without repeated blocks has none."""
        return _CHECKPOINTING if self.steps.plan(1).layers else (False,)

    def splits(self, gpus: int) -> Iterator[Split]:
        """Sizes of tp with experts cut inside, of cp for long sequences, of tp with whole experts, experts alone."""
        # Training stays in a node; weights to be served may need several.
        most = gpus if self.common.train == "inference" else min(gpus, self.device.per_node)
        sizes = [tp for tp in self.steps.plan(1).legal_tp if gpus % tp == 0 and tp <= most]
        # Over how many ranks of cp long sequences are cut
        short = self.common.sequence < LONG or self.common.train == "inference" or self.common.chunked_loss
        legal = () if short else self.steps.plan(1).legal_tp
        contexts = [cp for cp in legal if cp > 1 and cp & (cp - 1) == 0 and gpus % cp == 0]
        yield from (Split(tp) for tp in sizes if tp > 1 or not contexts)
        for tp, cp in product(sizes, reversed((1, *contexts) if contexts else ())):
            if gpus % (tp * cp) == 0 and tp * cp in self.steps.plan(1).legal_tp and (cp > 1 or tp == 1):
                yield Split(tp, cp=cp)
        if not self.has_experts or self.common.exchange_experts > 1:
            return
        alone = [Split(1, ep) for ep in (2**n for n in range(1, most.bit_length())) if gpus % ep == 0 and ep <= most]
        for split in (*(Split(tp, tp) for tp in sizes if tp > 1), *alone):
            if self._apart(split):
                yield split

    @cached_property
    def has_experts(self) -> bool:
        rules = (rule_named(entry.rule) for entry in self.steps.plan(1).entries)
        return any(rule is not None and rule.holds_experts for rule in rules)

    def _apart(self, split: Split) -> bool:
        try:
            return bool(self.steps.plan(split.tp, split.ep).runtime.of(LocalExperts))
        except IndivisibleError:
            return False

    def rows(self, gpus: int, batch: int) -> list[Row]:
        rows: list[Row] = []
        self.held, self.ways, self.failed, self.beaten = {}, {}, set(), set()  # those of other numbers of GPUs differ
        for split in self.splits(gpus):
            copies = gpus // split.ranks
            if batch % copies:
                self.dropped.append(f"{split}: a global batch of {batch} is not divisible by {copies}")
                continue
            # A lower bound for its smallest step: from 2n to n ranks of cp it grows twice as much as from 4n
            more, twice = (0, 0, *self.held.get(0 if split.cp == 1 < split.tp else split.tp, ()))[-2:]
            least = 3 * twice - 2 * more if more else twice
            if split.cp > 1 and _kind(split) in self.beaten or least > self.memory:
                continue
            rows += self._of_split(copies, split, batch // copies)
        return rows

    def _along(self, split: Split) -> tuple[bool, ...]:
        """Return the options: sharded along the sequence, if possible, and not."""
        cut = split.tp > 1 == split.cp and self.common.sequence % split.tp == 0 and self.common.train != "inference"
        try:
            return (True, False) if cut and self.steps.plan(split.tp, split.ep, True).sequence_parallel else (False,)
        except IndivisibleError:
            return (False,)

    def _of_split(self, copies: int, split: Split, each: int) -> list[Row]:
        rows: list[Row] = []
        cut: Row | None = None
        for along in self._along(split):
            if cut is not None and _kind(split) in self.beaten:
                break
            stage(f"{split}{', sequence parallel' if along else ''}")
            try:
                smallest = self._smallest(copies, split, along, each)
            # Of a prompt with several sequences one may not divide; decoding may run a branch that was not planned
            except (IndivisibleError, PlanMismatchError) as error:
                self.dropped.append(f"{split}{', sequence parallel' if along else ''}: {error.message}")
                continue
            alone = self.common.train == "inference" or not (smallest.fits or _may_fit_at_once(smallest))
            if cut is not None and _beats(cut, smallest):
                self.beaten.add(_kind(split))
                alone = True
            if alone:
                rows.append(smallest)
            else:
                rows += self._ways(copies, split, along, each)
            cut = smallest if along else None
            if along and alone:
                break  # not cut along the sequence it holds more
            if split.cp > 1:
                parts = smallest.estimate.parts
                self.held.setdefault(split.tp, []).append(parts.total - parts.overhead - parts.gradients)
        return rows

    def _smallest(self, copies: int, split: Split, along: bool, each: int) -> Row:
        """One sequence at a time with all blocks checkpointed; for inference, all that are held at once."""
        if self.common.train == "inference":
            mesh = (("dp_replicate", copies), *split.dims)
            return self._row(self._asked(mesh, each, False, False, None, each, split))
        return self._row(self._asked(self._meshes(copies, split)[0], 1, self.again[-1], along, None, each, split))

    def _ways(self, copies: int, split: Split, along: bool, each: int) -> Iterator[Row]:
        least: Row | None = None  # with one sequence and the next more of checkpointing
        for checkpointing in reversed(self.again):
            parts = MemoryParts() if least is None else least.estimate.parts
            if parts.weights + parts.optimizer + parts.kept + parts.overhead > self.memory:
                return  # less checkpointing holds at least this
            least, fitted, at_once = None, True, False
            for micro in (n for n in range(1, each + 1) if each % n == 0):
                if not fitted and not (at_once and micro == each):
                    continue
                tried = split.tp, checkpointing, micro
                if split.cp > 1 and tried in self.failed:  # with half of the tokens on a rank
                    break
                reshards = (None, False) if copies * split.cp > 1 and not self.common.shard_optimizer else (None,)
                ways = (self._replicated(copies, split, micro, checkpointing, along, kept, each) for kept in reshards)
                rows = [row for way in ways for row in way]
                yield from rows
                least, fitted = least or rows[0], any(row.fits for row in rows)
                at_once = at_once or any(map(_may_fit_at_once, rows))
                if split.cp == 1:
                    continue
                if not fitted and not at_once:
                    self.failed.add(tried)
                rival = self.ways.setdefault((split.ranks, checkpointing, micro), rows[0])
                if rival is not rows[0] and _beats(rival, rows[0]):
                    self.beaten.add(_kind(split))
                    return

    def _replicated(
        self, copies: int, split: Split, micro: int, checkpointing: bool | str, along: bool, reshard: bool | None,
        each: int,
    ) -> Iterator[Row]:  # fmt: skip
        """Yield rows with more and more replicas, while it fits and the next is not much slower than the last."""
        fastest = 0.0
        for mesh in self._meshes(copies, split):
            row = self._row(self._asked(mesh, micro, checkpointing, along, reshard, each, split))
            yield row
            speed = row.estimate.tokens_per_second
            if not row.fits or speed < _MUCH_SLOWER * fastest:
                return
            fastest = max(fastest, speed)

    def _meshes(self, copies: int, split: Split) -> list[tuple[tuple[str, int], ...]]:
        """FSDP2 over all copies of the split, and over ever fewer with replicas between (HSDP): halves, and a node."""
        exchanging = self.common.exchange_experts
        if copies * split.cp % exchanging or self.common.shard_optimizer and copies == 1:
            raise IndivisibleError(f"states or experts cannot be spread over {copies} copies")
        near = max(1, self.device.per_node // split.ranks)
        halves = (copies >> place for place in range(copies.bit_length()) if copies % (1 << place) == 0)
        valid = (n for n in (*halves, near) if 1 < n <= copies and copies % n == 0 == n * split.cp % exchanging)
        shards = [1] if self.common.shard_optimizer else sorted(set(valid) or {copies}, reverse=True)
        return [(("dp_replicate", copies // n), ("dp_shard", n), *split.dims) for n in shards]

    def _asked(self, mesh: tuple[tuple[str, int], ...], micro: int, checkpointing: bool | str, along: bool,
               reshard: bool | None, each: int, split: Split) -> Asked:  # fmt: skip
        question = replace(
            self.common, mesh=mesh, batch=micro, activation_checkpointing=checkpointing, sequence_parallel=along,
            reshard_after_forward=reshard, accumulate=max(1, each // micro), exact=False, experts=split.shared,
        )  # fmt: skip
        return replace(question, concurrency=-(-question.concurrency // question.copies),
                       virtual_stages=self.virtual_stages if question.stages > 1 else 1)  # fmt: skip

    def _row(self, question: Asked) -> Row:
        priced = estimate_with(self.steps, question, self.device)
        self.asked[id(priced)] = question
        missing = max(0, priced.peak - self.memory)
        biggest = max(PARTS, key=lambda part: getattr(priced.parts, part))
        assert priced.time is not None
        times, whole = priced.time.parts, max(priced.time.total, 1e-12)
        slowest = max(times, key=times.__getitem__)
        binds = f"{slowest}: {times[slowest] / whole:.0%} of the step"
        if missing:
            binds = f"memory: {size_text(getattr(priced.parts, biggest), 1)} of {PARTS[biggest]}"
        again: Any = question.activation_checkpointing
        return Row(priced, again, question.sequence_parallel, question.reshard_after_forward, question.accumulate,
                   not missing, binds, missing, question.experts)  # fmt: skip

    def of_mesh(self, mesh: tuple[tuple[str, int], ...], gpus: int, batch: int) -> Row:
        """The best row of a mesh that has none: others run it, or it is never looked at."""
        question = replace(self.common, mesh=mesh)
        if question.ranks != gpus or batch % question.copies:
            raise AutoplanError(
                f"no row has the mesh {dict(mesh)}: {question.ranks} ranks, of which every "
                f"{question.ranks // question.copies} hold a copy of the model, for {gpus} GPUs and a batch of {batch}",
                hint="pass a mesh of all GPUs, with a number of copies that divides the batch",
            )
        split = Split(question.size("tp"), question.size("ep"), question.cp)
        each = batch // question.copies
        again = self.again if self.common.train != "inference" else (False,)
        sizes = [n for n in range(1, each + 1) if each % n == 0] if self.common.train != "inference" else [each]
        along = (True, False) if split.tp > 1 == split.cp and self.common.train != "inference" else (False,)
        rows: list[Row] = []
        problem: AutoplanError | None = None
        for checkpointing, cut in product(again, along):
            for micro in sizes:
                try:
                    rows.append(self._row(self._asked(mesh, micro, checkpointing, cut, None, each, split)))
                except AutoplanError as error:
                    problem = error
                    break
                if not rows[-1].fits:
                    break
        if not rows:
            assert problem is not None, "there is one way at least"
            raise problem
        return min(rows, key=_in_order)

    def elsewhere(self, gpus: int, batch: int, most: int = 3) -> list[Row]:
        """The fastest that fit of pipelines and exchanged experts, which others run; their prices come from known
        recordings."""
        rows: list[Row] = []
        recorded = [s for s in self.steps.known if s.ep == s.cp == 1 and s.training]
        ways: dict[tuple[int, bool, Any], set[int]] = {}
        for s in recorded:
            ways.setdefault((s.tp, s.sequence_parallel, s.checkpointing), set()).add(s.batch)
        units = self.steps.known[recorded[0]].units if recorded else ()
        experts = {parameter.shape[0] for unit in units for parameter in unit.parameters if parameter.stack}
        asked = self.common.exchange_experts
        tried = (asked,) if asked > 1 else _DOUBLED
        exchanging = [n for n in tried if n == 1 or experts and not any(size % n for size in experts)]
        for (tp, along, checkpointing), stages, ranks in product(ways, _DOUBLED, exchanging):
            copies = gpus // (tp * stages)
            if (stages, ranks) == (1, asked) or gpus % (tp * stages) or batch % copies or copies % ranks:
                continue
            mesh = (("pp", stages), ("dp_shard", copies), ("tp", tp))
            each = batch // copies
            sizes = (1, 2, 4) if ways[tp, along, checkpointing] >= {1, 2} else (1,)
            for micro in (n for n in sizes if each % n == 0 and each // n >= stages):
                try:
                    question = self._asked(mesh, micro, checkpointing, along, None, each, Split(tp))
                    rows.append(self._row(replace(question, exchange_experts=ranks)))
                except AutoplanError:  # more stages than blocks, or experts that are not divisible
                    break
        return sorted((row for row in rows if row.fits), key=lambda row: -row.estimate.tokens_per_second)[:most]

    def settled(self, rows: list[Row]) -> list[Row]:
        """Return the rows in order. The first is recorded itself, until one that was stays first."""
        exact: set[int] = set()
        while True:
            rows = sorted(rows, key=_in_order)
            if not rows or not rows[0].fits or id(rows[0]) in exact:
                return rows
            rows[0] = self._row(replace(self.asked[id(rows[0].estimate)], exact=True))
            exact.add(id(rows[0]))

    def enough(self, gpus: int, batch: int = 0) -> int | None:
        """The smallest number of GPUs above `gpus`, in whole nodes, for which `rows` has one that fits. `batch`: of a
        step; 0: as many as GPUs. More copies need less of a rank until padding counts, so it is looked for by
        doubling, then refined."""
        sizes = (tp for tp in self.steps.plan(1).legal_tp if tp <= self.device.per_node)
        best: int | None = None
        node = self.device.per_node
        for split in self.splits(lcm(1 << self.device.per_node.bit_length(), *sizes)):
            for along in self._along(split):
                below = (_MOST_GPUS if best is None else best - 1) // split.ranks
                totals = {n: n * split.ranks for n in range(gpus // split.ranks + 1, below + 1)}
                whole = (n for n, total in totals.items() if total <= node or total % node == 0)
                copies = [n for n in whole if (batch or totals[n]) % n == 0]
                first = _first_of(copies, partial(self._fits, split, along, batch))
                best = best if first is None else split.ranks * first
                if along and (split, along) in self.priced:
                    break  # not cut along the sequence it holds more
        return best

    def _fits(self, split: Split, along: bool, batch: int, copies: int) -> bool:
        each = batch // copies if batch else split.ranks
        try:
            row = self._smallest(copies, split, along, each)
            self.priced.add((split, along))
            if _may_fit_at_once(row):
                mesh = self._meshes(copies, split)[0]
                row = self._row(self._asked(mesh, each, self.again[-1], along, None, each, split))
        except (IndivisibleError, PlanMismatchError):
            return False
        return row.fits


def _kind(split: Split) -> tuple[int, bool]:
    """Return what one comparison settles: experts cut inside or apart; over cp, so many ranks."""
    return (split.ranks if split.cp > 1 else 0), split.shared


def _beats(one: Row, other: Row) -> bool:
    faster = one.estimate.tokens_per_second >= other.estimate.tokens_per_second
    return one.estimate.peak <= other.estimate.peak and faster


def _in_order(row: Row) -> tuple[bool, int, float]:
    return not row.fits, row.missing, -row.estimate.tokens_per_second


def _first_of(numbers: list[int], fits: Callable[[int], bool]) -> int | None:
    """The first that fits, of numbers that do so from one on, if not to the very last."""
    tried, at = -1, 0
    while at < len(numbers) and not fits(numbers[at]):
        tried, at = at, 2 * at + 1
    if at >= len(numbers):
        at = len(numbers) - 1
        if tried == at or not numbers or not fits(numbers[at]):
            return None
    return numbers[bisect_left(numbers, True, lo=tried + 1, hi=at, key=fits)]


def _may_fit_at_once(row: Row) -> bool:
    """Return whether the extra memory of a step of several micro-batches is at most the gradients that wait."""
    return 0 < row.missing <= row.estimate.parts.gradients and row.accumulate > 1

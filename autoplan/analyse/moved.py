"""The communication volume of each block under the plan, compared with the minimum that its split needs.

Bytes are those of the full (unsharded) value that is reduced or gathered, for each token of the block's stream; an
all-reduce counts twice, since it is a reduce-scatter and an all-gather. So tensor and sequence parallelism compare.
Gradients of replicated parameters are all-reduced once a step, however many tokens there are, and are counted
separately.

Where a block moves more than the minimum, `excess` says which sums are not shared, and why none could be avoided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from autoplan.analyse.infer import Shards
from autoplan.analyse.placement.call_instructions import call_instruction, lengths_in
from autoplan.analyse.placement.callflow import CallFlow
from autoplan.analyse.placement.minimum_cut import LEAVES_PARTS, Payment, least_sums
from autoplan.analyse.sequence.exchange import MAY_MOVE
from autoplan.common.layout import Layout
from autoplan.common.patterns import grouped
from autoplan.ops.records.answers import Reduction
from autoplan.values import (
    Amount,
    AttendAcross,
    Boundary,
    CallRewrite,
    Collective,
    Exchange,
    ModuleVisit,
    Move,
    Runtime,
    Traffic,
)
from autoplan.values.estimate import JOINED

_BOTH_WAYS = Collective.ALL_REDUCE  # costs twice as much as an all-gather or a reduce-scatter
_NEAR = 200  # how many values to search for the one that is reduced


@dataclass(frozen=True)
class _Moved:
    """One collective of one run of a module: where, of which kind, and on which value."""

    calls: tuple[int, int]
    module: str
    backward: bool
    kind: Collective
    elements: int
    tensor: int

    @property
    def weight(self) -> int:
        return self.elements * (2 if self.kind == _BOTH_WAYS else 1)


@dataclass(frozen=True)
class Excess:
    """A block that moves more than the minimum in one direction, and why."""

    block: str
    reason: str


class _Blocks:
    """The runs of each block in the first run of the model that has any, and the number of tokens in each."""

    def __init__(self, shards: Shards, names: Iterable[str]) -> None:
        self.trace = shards.trace
        wanted = set(names)
        self.visits: dict[str, list[ModuleVisit]] = {}
        for root in (visit for visit in self.trace.visits if visit.parent is None):
            runs: dict[str, list[ModuleVisit]] = {}
            for visit in self.trace.visits:
                inside = root.calls[0] <= visit.calls[0] < visit.calls[1] <= root.calls[1]
                if visit.module in wanted and inside:
                    runs.setdefault(visit.module, []).append(visit)
            self.visits = {**runs, **self.visits}

    def tokens(self, visit: ModuleVisit) -> int:
        """Return the number of elements of the stream's first value, without its last dim."""
        infos = (self.trace.tensors[t] for _, t in visit.inputs)
        return next((prod(info.shape[:-1]) for info in infos if info.differentiable and len(info.shape) > 1), 1)


def block_traffic(
    shards: Shards,
    runtime: Runtime,
    reductions: dict[int, Reduction],
    blocks: Iterable[str],
    *,
    pieces: int = 1,
    context: int = 0,
    within: Shards | None = None,
) -> tuple[tuple[Traffic, ...], tuple[Excess, ...]]:
    """Return the traffic of each traced block, and what exceeds the minimum. `pieces`: into how many shards other ranks
    divide each value; `context`: number of ranks that exchange, if not all; `within`: the shards that a rank has of a
    value to begin with."""
    flow = CallFlow(shards.trace)
    names = set(blocks)
    moves = tuple(_moves(shards, flow, runtime, names, context or shards.tp, within))
    payments = (*least_sums(shards, flow, reductions), *_paid_in_calls(shards, flow, reductions))
    runs = _Blocks(shards, names)
    # Ranks whose own queries attend to all positions need all keys and values
    sites = {
        (attention.pattern, attention.site.function, attention.site.place) for attention in runtime.of(AttendAcross)
    }
    calls = enumerate(shards.trace.calls)
    attending = {(index, index + 1) for index, call in calls if (call.module, call.name, call.place) in sites}
    traffic, excess = [], []
    for name, visits in runs.visits.items():
        spans = [visit.calls for visit in visits]
        inside = [m for m in moves if _in_spans(spans, m.calls[0], m.calls[1] - 1) and _within(m.module, name)]
        needed = [payment for payment in payments if _is_due(payment, spans)]
        needed += [Payment(m.backward, frozenset(range(*m.calls)), m.weight) for m in inside if m.calls in attending]
        tokens = pieces * runs.tokens(visits[0])
        moved = _traffic(name, inside, needed, tokens, _summed_once(shards, runtime, name), shards)
        traffic.append(moved)
        excess += [Excess(name, reason) for reason in _reasons(moved, inside, needed, flow, reductions)]
    return tuple(traffic), tuple(excess)


def _in_spans(spans: list[tuple[int, int]], *calls: int) -> bool:
    return any(all(first <= call < last for call in calls) for first, last in spans)


def _is_due(payment: Payment, spans: list[tuple[int, int]]) -> bool:
    """Return whether these runs of a block need the sum: they have the last call that adds a part, or the first with a
    partial gradient. The gradient of a value that several blocks read (an encoder's output) counts for none of them."""
    call = min(payment.calls) if payment.backward else max(payment.calls)
    inside = {_in_spans(spans, reader) for reader in payment.readers}
    return _in_spans(spans, call) and len(inside) < 2


def _within(module: str, block: str) -> bool:
    return module == block or module.startswith(f"{block}.")


# The collectives that the plan issues


def _moves(
    shards: Shards, flow: CallFlow, runtime: Runtime, blocks: Collection[str], context: int, within: Shards | None
) -> Iterator[_Moved]:
    """Yield every collective of the plan, except those that begin and end a sharded stream: they belong to no block."""
    trace, reached = shards.trace, flow.with_gradients()
    visits = grouped((visit.module, visit) for visit in trace.visits)
    for instruction in runtime.instructions:
        if isinstance(instruction, CallRewrite):
            yield from _at_call(instruction, shards, flow, reached)
        elif not (
            isinstance(instruction, Boundary)
            and instruction.side == instruction.stream_end
            and instruction.pattern in blocks
        ):
            for visit in visits.get(instruction.pattern, []) if instruction.moves else ():
                at = instruction if isinstance(instruction, Boundary) else None  # else the module's outputs
                values = visit.inputs if at is not None and at.side == "input" else visit.outputs
                tensor = dict(values).get(() if at is None else at.path)
                if tensor is not None:
                    shape = trace.tensors[tensor].shape
                    elements = prod(shape)
                    if isinstance(instruction, Exchange):
                        elements = _exchanged(instruction, shape, context)
                    elif within is not None and within.is_split(tensor) and not shards.is_split(tensor):
                        elements //= within.tp
                    yield from _each(instruction.moves, visit.calls, visit.module, elements, tensor, reached)


def _exchanged(exchange: Exchange, shape: tuple[int, ...], ranks: int) -> int:
    """Return how many elements a rank sends: its positions of the features that each rank holds, to that rank."""
    layout = Layout.parse(exchange.layout)
    local_sizes = sum(len(layout.rows(rank, ranks)) if layout.is_split else layout.size for rank in range(ranks))
    return prod(shape) // shape[exchange.feature] * local_sizes // ranks


def _each(
    moves: Iterable[Move], span: tuple[int, int], module: str, elements: int, tensor: int, reached: Collection[int]
) -> Iterator[_Moved]:
    """Yield the collectives of these moves; those of the backward only where a gradient flows back."""
    for move in moves:
        if not move.backward or tensor in reached:
            many = 0 if move.of is Amount.OF_NEIGHBOUR else elements * move.times  # however long the sequence
            yield _Moved(span, module, move.backward, move.collective, many, tensor)


def _at_call(planned: CallRewrite, shards: Shards, flow: CallFlow, reached: Collection[int]) -> Iterator[_Moved]:
    trace, site = shards.trace, planned.site
    rounds: Counter[int] = Counter()
    for index, call in enumerate(trace.calls):
        if (call.module, call.name, call.place) != (planned.pattern, site.function, site.place):
            continue
        rounds[call.visit] += 1
        if site.time is not None and site.time != rounds[call.visit]:
            continue
        output, span = flow.outputs[index][0], (index, index + 1)
        for move in planned.moves:
            if move.of is Amount.ARGUMENT:
                for tensor in flow.inputs[index]:
                    if move.path in flow.path_of(index, tensor) and (output in reached or not move.backward):
                        elements = prod(trace.tensors[tensor].shape)
                        yield _Moved(span, call.module, move.backward, move.collective, elements, tensor)
            else:
                elements = _elements(move.of, index, output, shards)
                yield from _each((move,), span, call.module, elements, output, reached)


def _paid_in_calls(shards: Shards, flow: CallFlow, reductions: Mapping[int, Reduction]) -> Iterator[Payment]:
    """Yield what calls need besides sums that can be delayed: statistics of a norm, gathered products."""
    reached = flow.with_gradients()
    for index, kind in reductions.items():
        if kind in LEAVES_PARTS:
            continue
        output = flow.outputs[index][0]
        for move in call_instruction(shards.trace.calls[index], kind, None, False, shards).moves:
            if not move.backward or output in reached:
                weight = _elements(move.of, index, output, shards) * move.times
                weight *= 2 if move.collective is _BOTH_WAYS else 1
                yield Payment(move.backward, frozenset({index}), weight)


def _elements(of: Amount, index: int, output: int, shards: Shards) -> int:
    """Return how many elements one collective of a call moves."""
    trace = shards.trace
    shape = trace.tensors[output].shape
    if of is Amount.ROWS:
        return prod(shape) // shape[-1]
    if of is Amount.LENGTHS:
        return lengths_in(trace.calls[index], shards)
    if of is Amount.MEAN_AND_VARIANCE:
        return prod(shape) * 2 * shards.tp
    return prod(shape)


def _summed_once(shards: Shards, runtime: Runtime, block: str) -> int:
    """Return the bytes of a block's parameters whose gradients are all-reduced; over ranks of cp, those of the tp
    shard."""
    total, by_name = 0, shards.trace.by_name
    for rule in {rule.pattern: rule for rule in runtime.parameters if _within(rule.pattern, block)}.values():
        if rule.pattern in by_name:
            info = shards.trace.tensors[by_name[rule.pattern]]
            size = 2 * prod(info.shape) * info.item_size
            total += size if rule.gradient != "local" else 0
            if rule.read is not None and rule.read.gradient != "local":
                total += size if rule.dim is None else size // shards.tp
    return total


def both_traffics(split: Traffic, cut: Traffic, both: Traffic) -> Traffic:
    """Combine a block's traffic over the ranks that shard its weights, over those of the sequence, and over both."""

    def joined(direction: str) -> dict[str, tuple[int, int]]:
        sides = {"tp": split, "cp": cut, f"cp{JOINED}tp": both}
        return {
            f"{kind} over {dim}": n for dim, traffic in sides.items() for kind, n in getattr(traffic, direction).items()
        }

    def least(direction: str) -> tuple[int, int]:
        (number, size), (more, other) = getattr(split, direction), getattr(cut, direction)
        return number + more, size + other

    least_both = least("least_forward"), least("least_backward")
    return Traffic(split.block, joined("forward"), joined("backward"), *least_both, split.once)


# Comparison with the minimum


def _traffic(name: str, moves: list[_Moved], needed: list[Payment], tokens: int, once: int, shards: Shards) -> Traffic:
    size = shards.trace.tensors[0].item_size if shards.trace.tensors else 1
    sizes = [info.item_size for info in shards.trace.tensors if info.kind == "parameter" and info.differentiable]
    size = max(sizes, default=size)

    def counted(backward: bool) -> dict[str, tuple[int, int]]:
        kinds = dict.fromkeys(move.kind for move in moves if move.backward == backward)
        volumes = {kind: [m.weight for m in moves if m.backward == backward and m.kind == kind] for kind in kinds}
        return {str(kind): (len(weights), sum(weights) * size // tokens) for kind, weights in volumes.items()}

    def least(backward: bool) -> tuple[int, int]:
        mine = [payment.weight for payment in needed if payment.backward == backward]
        exchanged = [m.weight for m in moves if m.backward == backward]
        if any(m.kind is Collective.ALL_TO_ALL for m in moves):  # positions, instead of what these sums need
            mine = min(mine, exchanged, key=sum)
        return len(mine), sum(mine) * size // tokens

    return Traffic(name, counted(False), counted(True), least(False), least(True), once)


def _reasons(
    traffic: Traffic, moves: list[_Moved], needed: list[Payment], flow: CallFlow, reductions: Mapping[int, str]
) -> Iterator[str]:
    """Yield why a block moves more than the minimum, one line for each direction in which it does."""
    for backward in (False, True):
        have = sum(size for _, size in (traffic.backward if backward else traffic.forward).values())
        need = (traffic.least_backward if backward else traffic.least_forward)[1]
        mine = [move for move in moves if move.backward == backward]
        exchanged = any(move.kind is Collective.ALL_TO_ALL for move in mine)
        if have > need * (MAY_MOVE if exchanged else 1):
            apart = [
                ", ".join(places)
                for payment in needed
                if payment.backward == backward
                and len(places := _places(payment, mine, flow, reductions, traffic.block)) > 1
            ]
            excess = f"{'backward' if backward else 'forward'}: {have} bytes per token, the minimum is {need}"
            yield f"{excess}: {_why(backward, apart, mine, traffic.block)}"


def _places(
    payment: Payment, moves: list[_Moved], flow: CallFlow, reductions: Mapping[int, str], block: str
) -> list[str]:
    """Return where the plan issues the sums that one could replace: the reduced values nearest to each of the calls."""
    paid = {move.tensor: move.module for move in moves}
    places: dict[str, None] = {}
    for call in sorted(payment.calls):
        seen: set[int] = set()
        waiting = list(flow.inputs[call] if payment.backward else flow.outputs[call])
        while waiting and len(seen) < _NEAR:
            tensor = waiting.pop(0)
            if tensor in seen:
                continue
            seen.add(tensor)
            if tensor in paid:
                places[_short(paid[tensor], block)] = None
                break
            if payment.backward:
                maker = flow.producer.get(tensor)
                waiting += flow.inputs[maker] if maker is not None and maker not in reductions else []
            else:
                waiting += [output for use in flow.uses[tensor] for output in flow.outputs[use]]
    return list(places)


def _why(backward: bool, apart: list[str], moves: list[_Moved], block: str) -> str:
    apart = list(dict.fromkeys(apart))  # several values may be summed at the same places
    if any(move.kind is Collective.ALL_TO_ALL and move.elements for move in moves):
        places = dict.fromkeys(
            _short(move.module, block) for move in moves if move.kind is Collective.ALL_TO_ALL and move.elements
        )
        return f"positions are exchanged for heads at {', '.join(places)}, so no rank holds the full stream"
    if apart and backward:
        text = "the gradients at {} are all-reduced separately, since they join a gradient that is already full"
        return "; ".join(map(text.format, apart))
    if apart:
        text = "{} are all-reduced separately, since the block uses them other than by adding them together"
        return "; ".join(map(text.format, apart))
    whole = dict.fromkeys(_short(move.module, block) for move in moves if move.kind != _BOTH_WAYS)
    if whole and any(move.kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) for move in moves):
        return f"the sequence is gathered or sharded again for an op that needs all of it: at {', '.join(whole)}"
    return f"one all-reduce per value at {', '.join(dict.fromkeys(_short(move.module, block) for move in moves))}"


def _short(module: str, block: str) -> str:
    return module.removeprefix(block).removeprefix(".") or "the block itself"

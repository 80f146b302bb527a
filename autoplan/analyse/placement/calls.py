"""Collect the work for the function mode: literals that no stored integer explains, sums inside a module's own Python.

A scoped call is identified by its module, the torch function, and its place in the code: other calls may come and go,
and loops may have more or fewer rounds (masks are made in some runs only, experts without tokens are skipped). All
calls at that place must need the same work, in every round and in every run of the module, or it is refused.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from autoplan.analyse.infer import Shards
from autoplan.analyse.placement.call_instructions import call_instruction
from autoplan.analyse.placement.callflow import CallFlow, Placement
from autoplan.analyse.splits.integer_edits import Edits
from autoplan.analyse.splits.literal_sizes import made_in_shards, made_whole, pieces_given
from autoplan.axes.terms import find, leaves
from autoplan.ops import call_record, op_record
from autoplan.ops.records.answers import Shows
from autoplan.ops.records.on_shards import RepeatEach
from autoplan.values import (
    Call,
    CallOverPositions,
    CallRewrite,
    CallSite,
    Cut,
    LengthArgument,
    LiteralArgument,
    ReduceScatterCall,
    Ref,
    RewriteCall,
    SequenceName,
    Trace,
    refs_with_paths,
)
from autoplan.values.reasons import NotPlaced

_Place = tuple[str, str, str]  # module, function, place in the code


_Mark = dict[str, Any]  # fields of a call's site that tell it from others at its place


@dataclass
class Scope:
    """Scoped calls with the tensors that made them necessary, modules with random draws, and refusals."""

    calls: tuple[CallRewrite, ...] = ()
    tensors: tuple[tuple[int, ...], ...] = ()
    random: tuple[str, ...] = ()
    random_whole: tuple[str, ...] = ()
    refusals: list[tuple[NotPlaced, tuple[int, ...]]] = field(default_factory=list)


def scope(shards: Shards, flow: CallFlow, placement: Placement, edits: Edits) -> Scope:
    """Collect the work that is left for the function mode."""
    result = Scope()
    wanted = _wanted(shards, flow, placement, edits, result)
    for indices, built in _by_place(flow, wanted, shards):
        blame = tuple(t for index in indices if index in wanted for t in _blame_of(index, flow, shards))
        if built is None:
            call = shards.trace.calls[indices[0]]
            result.refusals.append((NotPlaced("differs-between-runs", call.name, call.module), blame))
        else:
            result.calls += (built,)
            result.tensors += (blame,)
    # Modules that draw on sharded values only; and those that draw on replicated ones: the model itself, so that its
    # ranks draw the same numbers, and modules inside the first kind. Draws that were not recorded are assumed to be on
    # replicated values: equal numbers do no harm to shards, different ones do to replicated values.
    calls = _random_calls(shards, flow)
    split = tuple(sorted(m for m, kinds in calls.items() if kinds[True] and not kinds[False]))
    whole = [m for m, kinds in calls.items() if kinds[False]]
    inside = {m for m in whole if not calls[m][True] and any(m.startswith(f"{s}.") for s in split)}
    result.random, result.random_whole = (
        split,
        tuple(sorted(inside | ({""} if whole or shards.trace.draws_unseen else set()))),
    )
    for module, left, right, _ in edits.broken_comparisons:
        blame = tuple(_sizes_in(left) | _sizes_in(right))
        result.refusals.append((NotPlaced("sizes-compared", module=module), blame))
    return result


@dataclass
class SequenceWork:
    """Work of calls in code that sees shards of a sequence, by call: numbers that they are passed, the dim and the
    sequence of sums of which a rank keeps its own positions, and those of sums over positions (of a mean?)."""

    lengths: dict[int, tuple[LengthArgument, ...]] = field(default_factory=dict)
    kept: dict[int, tuple[int, SequenceName]] = field(default_factory=dict)
    summed: dict[int, tuple[int, SequenceName, bool]] = field(default_factory=dict)

    def named(self, name: str) -> SequenceWork:
        """Return the same work, about this sequence."""
        sequence = SequenceName(name)
        lengths = {
            i: tuple(replace(each, sequence=sequence) for each in each_lengths)
            for i, each_lengths in self.lengths.items()
        }
        sequence_dims = {index: (dim, sequence) for index, (dim, _) in self.kept.items()}
        summed = {i: (dim, replace(each, name=name), mean) for i, (dim, each, mean) in self.summed.items()}
        return SequenceWork(lengths, sequence_dims, summed)

    def joined(self, calls: tuple[CallRewrite, ...], trace: Trace) -> Iterator[CallRewrite]:
        """Yield the work of calls together with this."""
        lengths = {trace.calls[index].source: given for index, given in self.lengths.items()}
        sequence_dims = {trace.calls[index].source: how for index, how in self.kept.items()}
        summed = {trace.calls[index].source: how for index, how in self.summed.items()}
        names, unmarked = ("arguments", "copies", "cuts", "sometimes"), set[_Place]()
        for call in calls:
            place = (call.pattern, call.site.function, call.site.place)
            unmarked |= {place} if call.site == CallSite(*place[1:]) else set()
            needs = {name: getattr(call, name) for name in names} | {"lengths": lengths.get(place, ())}
            if place in sequence_dims:
                yield ReduceScatterCall(call.pattern, call.site, *sequence_dims[place], **needs)
            elif place in summed:
                yield CallOverPositions(call.pattern, call.site, *summed[place], **needs)
            else:
                yield replace(call, lengths=needs["lengths"])
        runs = Counter(visit.module for visit in trace.visits)
        for place in sorted((lengths | summed).keys() - unmarked):
            site, given = CallSite(*place[1:]), lengths.get(place, ())
            if place in summed:  # code may leave it out (without gradients); other ways are the path guard's
                yield CallOverPositions(place[0], site, *summed[place], lengths=given, sometimes=True)
            else:
                visits = {call.visit for call in trace.calls if call.source == place}
                yield RewriteCall(place[0], site, lengths=given, sometimes=len(visits) < runs[place[0]])


def _by_place(
    flow: CallFlow, wanted: dict[int, CallRewrite], shards: Shards
) -> Iterator[tuple[list[int], CallRewrite | None]]:
    """Yield the calls at one place, with the work that all of them need; None where they need different work.

    If not all need the same, they are distinguished by the round of a loop, by the number of dims of their value (one
    dropout may serve attention weights and the stream), or by its width (an MLP's inner width and the stream).
    """
    trace = flow.trace
    runs = Counter(visit.module for visit in trace.visits)
    for rounds in _rounds(trace, {trace.calls[index].source for index in wanted}):
        for mark, indices in _told_apart(rounds, wanted, flow, shards):
            built = _most(indices, wanted)
            if not _agree(indices, wanted, flow):
                yield indices, None
            elif built is not None:
                skipped = len({trace.calls[index].visit for index in indices}) < runs[built.pattern]
                skipped = skipped or not {"dims", "width"}.isdisjoint(mark)
                sometimes = skipped or built.pattern in flow.branching
                yield indices, replace(built, site=replace(built.site, **mark), sometimes=sometimes)


def _told_apart(
    rounds: list[list[int]], wanted: dict[int, CallRewrite], flow: CallFlow, shards: Shards
) -> Iterable[tuple[_Mark, list[int]]]:
    """Group the calls of one place so that each group agrees, if possible, each with the mark that identifies it."""
    together = [index for indices in rounds for index in indices]
    grouped: dict[int, list[int]] = defaultdict(list)
    for index in together:
        # How many dims a call's first argument has; -1 where it is no tensor
        first = next(iter(flow.trace.calls[index].args), None)
        grouped[len(flow.trace.tensors[first.id].shape) if isinstance(first, Ref) else -1].append(index)
    by_dims: list[tuple[_Mark, list[int]]] = [({"dims": dims}, indices) for dims, indices in grouped.items()]
    by_round: list[tuple[_Mark, list[int]]] = [({"time": time}, indices) for time, indices in enumerate(rounds, 1)]
    as_one: list[tuple[_Mark, list[int]]] = [({}, together)]
    for way in (as_one, by_round, by_dims):
        if all(_agree(indices, wanted, flow) for _, indices in way):
            return way
    by_width = _by_width(together, wanted, shards)
    return by_width if all(_agree(indices, wanted, flow) for _, indices in by_width) else by_round


def _by_width(together: list[int], wanted: dict[int, CallRewrite], shards: Shards) -> list[tuple[_Mark, list[int]]]:
    """Separate calls with work from those without, if the values of the latter have one width, fixed by the weights,
    which no rank's shard of the others has."""
    with_work = [index for index in together if index in wanted]
    without = [index for index in together if index not in wanted]
    widths = {_width(index, shards, 0) for index in without}
    pieces = {_width(index, shards, rank) for index in with_work for rank in range(shards.tp)}
    if len(widths) != 1 or None in widths | pieces or widths & pieces:
        return [({}, together)]
    return [({"width": widths.pop()}, with_work), ({}, without)]


def _width(index: int, shards: Shards, rank: int) -> int | None:
    """Return the width of a rank's shard of a call's first argument; None where it depends on the model's inputs."""
    first = next(iter(shards.trace.calls[index].args), None)
    terms = shards.axes.of(first.id) if isinstance(first, Ref) else ()
    weights = (number for number, info in enumerate(shards.trace.tensors) if info.kind == "parameter")
    of_weights = {find(leaf) for number in weights for term in shards.axes.of(number) for leaf in leaves(term)}
    if not terms or not {find(leaf) for leaf in leaves(terms[-1])} <= of_weights:
        return None
    return shards.local_size(terms[-1], rank)


def _agree(indices: list[int], wanted: dict[int, CallRewrite], flow: CallFlow) -> bool:
    """Return whether these calls need the same work. Reducing a gradient is no work where none flows back, or where an
    optional argument (a mask) is None."""
    most = _most(indices, wanted)
    if most is None:
        return True
    nothing = RewriteCall(most.pattern, most.site)

    def fits(index: int, copies: tuple[tuple[Any, ...], ...]) -> bool:
        needed = replace(most, copies=copies)
        return wanted.get(index) == (None if needed == nothing else needed)

    def given(index: int) -> tuple[tuple[Any, ...], ...]:
        call = flow.trace.calls[index]
        present = {(side, *path) for side in ("args", "kwargs") for path, _ in refs_with_paths(getattr(call, side))}
        return tuple(path for path in most.copies if path in present)

    return all(fits(i, given(i)) or not flow.passes_gradients(i) and fits(i, ()) for i in indices)


def _most(indices: list[int], wanted: dict[int, CallRewrite]) -> CallRewrite | None:
    """Return the work of the call that needs most."""
    rewrites = [wanted[index] for index in indices if index in wanted]
    return max(rewrites, key=lambda call: len(call.copies), default=None)


def _rounds(trace: Trace, places: set[_Place]) -> Iterable[list[list[int]]]:
    """Return, for each place, its calls grouped by how often their run of the module had been there before."""
    rounds_of: dict[_Place, list[list[int]]] = {}
    before: Counter[tuple[_Place, int]] = Counter()
    for index, call in enumerate(trace.calls):
        if (place := call.source) in places:
            rounds, number = rounds_of.setdefault(place, []), before[place, call.visit]
            before[place, call.visit] += 1
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(index)
    return rounds_of.values()


def _split_in(index: int, flow: CallFlow, shards: Shards) -> tuple[int, ...]:
    return tuple(t for t in (*flow.inputs[index], *flow.outputs[index]) if shards.is_split(t))


def _blame_of(index: int, flow: CallFlow, shards: Shards) -> tuple[int, ...]:
    """Return the split tensors that made a call need work: its own, or those of the calls that read its outputs."""
    return _split_in(index, flow, shards) or tuple(
        t for output in flow.outputs[index] for use in flow.uses[output] for t in _split_in(use, flow, shards)
    )


def _wanted(
    shards: Shards, flow: CallFlow, placement: Placement, edits: Edits, result: Scope
) -> dict[int, CallRewrite]:
    arguments: dict[int, list[LiteralArgument]] = defaultdict(list)
    for requirement in edits.left:
        literal = LiteralArgument(requirement.path, requirement.seen, requirement.want)
        arguments[requirement.call].append(literal)
    cuts = _cuts(shards, flow, result)
    draws = _mixed_draws(shards, flow) | {index for index in cuts if _is_filled_at_random(shards.trace.calls[index])}
    pieces = {
        index: lengths
        for index, call in enumerate(shards.trace.calls)
        if (lengths := pieces_given(call, shards)) is not None
    }
    indices = (
        set(arguments)
        | set(placement.inside_reductions)
        | set(placement.inside_copies)
        | set(cuts)
        | draws
        | set(pieces)
    )
    rewrites = {}
    for index in sorted(indices):
        call = shards.trace.calls[index]
        copies = tuple(path for t in sorted(placement.inside_copies.get(index, ())) for path in flow.path_of(index, t))
        rewrites[index] = call_instruction(
            call, placement.inside_reductions.get(index), pieces.get(index), index in draws, shards,
            arguments=tuple(arguments.get(index, ())), copies=copies, cuts=cuts.get(index, ()),
        )  # fmt: skip
        if placement.inside_reductions.get(index) in ("sum", "mean") and len(flow.outputs[index]) != 1:
            result.refusals.append(
                (NotPlaced("several-values", call.name, call.module), _split_in(index, flow, shards))
            )
    return rewrites


def _cuts(shards: Shards, flow: CallFlow, result: Scope) -> dict[int, tuple[Cut, ...]]:
    """Return the values created at full size in forward along a split axis: they are run as written, then sliced."""
    cuts: dict[int, tuple[Cut, ...]] = {}
    for index, call in enumerate(shards.trace.calls):
        if any(shards.is_split(t) for t in flow.inputs[index]):
            for tensor in flow.inputs[index]:
                info = shards.trace.tensors[tensor]
                if info.kind in ("constant", "input") and shards.is_split(tensor):
                    result.refusals.append((NotPlaced("ready-made", call.name, call.module), (tensor,)))
            continue
        if made_in_shards(call, shards):
            continue
        slices = [
            Cut(position, dim, str(layout))
            for position, tensor in enumerate(flow.outputs[index])
            for dim, layout in enumerate(shards.layouts(tensor))
            if layout is not None and tensor not in flow.inputs[index]
        ]
        if slices and made_whole(call, shards) or slices and not _repeats(call):
            cuts[index] = tuple(slices)
    return cuts


def _repeats(call: Call) -> bool:
    """Return whether the call only repeats its arguments: given a shard's size, it makes a shard."""
    record = call_record(call.name)
    return record.alike or record.shows is Shows.REPEATED or isinstance(record.sizes, RepeatEach)


def draws(call: Call, trace: Trace) -> bool:
    """Return whether a call draws random numbers in any mode: by its name, or by one of its ops."""
    ops = trace.ops[slice(*call.ops)]
    may_draw = any(op_record(op.name).random.may_draw(op.args, op.kwargs) for op in ops)
    return call_record(call.name).random.when == "always" or may_draw


def _is_filled_at_random(call: Call) -> bool:
    """Return whether a call creates a value of independent random numbers, of a size that it is given."""
    random = call_record(call.name).random
    return random.when == "always" and not random.jointly


def _random_calls(shards: Shards, flow: CallFlow) -> dict[str, dict[bool, list[int]]]:
    """Return the random calls by module, separated by whether they act on split values."""
    calls: dict[str, dict[bool, list[int]]] = defaultdict(lambda: {True: [], False: []})
    for index, call in enumerate(shards.trace.calls):
        if call_record(call.name).random or draws(call, shards.trace):
            calls[call.module][_draws_on_shards(index, flow, shards)].append(index)
    return calls


def _draws_on_shards(index: int, flow: CallFlow, shards: Shards) -> bool:
    """Return whether a random call draws numbers for the shard of each rank."""
    random = call_record(shards.trace.calls[index].name).random
    return any(
        layout is not None and random.draws_along(dim, len(shards.layouts(t)))
        for t in flow.inputs[index]
        for dim, layout in enumerate(shards.layouts(t))
    )


def _mixed_draws(shards: Shards, flow: CallFlow) -> set[int]:
    """Return draws on split values in modules that also draw on replicated ones, or from the model's own generator:
    each needs a random stream of its own."""
    return {
        index
        for kinds in _random_calls(shards, flow).values()
        for index in kinds[True]
        if kinds[False] or shards.trace.calls[index].kwargs.get("generator") is not None
    }


def _sizes_in(value: Any) -> set[int]:
    origin = getattr(value, "origin", None)
    sizes: set[int] = set()
    todo = [origin] if origin else []
    while todo:
        part = todo.pop()
        if part[0] == "size":
            sizes.add(part[1])
        todo += [p for p in part[1:] if isinstance(p, tuple)]
    return sizes

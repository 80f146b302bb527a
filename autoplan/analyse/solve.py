"""From a trace to everything that a plan needs: axes, splits, call sites, integer edits.

The loop is short: choose axis classes, place every sum, solve every integer. A step that fails refuses the classes that
caused the failure, and the choice is made again without them. So nothing in the result is refused, and every entry of a
plan can be relied on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod

from autoplan.analyse.infer import Axes, Shards, infer_axes
from autoplan.analyse.placement.callflow import CallFlow, Placement
from autoplan.analyse.placement.calls import Scope, draws, scope
from autoplan.analyse.placement.sums import place
from autoplan.analyse.seen import given, idle, of_arguments, of_constants, returned, unsummed
from autoplan.analyse.sequence.parallel import SequencePlacement, mixed_leaves, place_sequence, sequence_boundaries
from autoplan.analyse.splits.choose import SplitMarks, Tried, choose, legal_sizes, occurrences
from autoplan.analyse.splits.integer_edits import Edits, solve_edits
from autoplan.analyse.splits.model_ends import (
    gathered_leaves,
    head_sites,
    looked_up_in,
    output_shapes,
    products_to_gather,
    refuse_unplaced_logits,
    vocabularies,
)
from autoplan.analyse.splits.packed import NO_DEMANDS, Demands, parted_blocks, unevenly
from autoplan.analyse.splits.special import Recurrent, recurrent, returns_less, without_own_loss
from autoplan.axes.terms import Term, find, leaves
from autoplan.ops.records.answers import Reduction
from autoplan.values import (
    ClassFact,
    Constant,
    Finding,
    HookKind,
    IntegerEdit,
    ParallelBlock,
    ParameterFact,
    ParameterRule,
    Runtime,
    Trace,
)
from autoplan.values.not_placed import WholeSequence
from autoplan.values.reasons import (
    AxisWhole,
    Exchanged,
    InsideQuantisedBlock,
    MixedWhole,
    MixesNothing,
    NeedsRewriting,
    NothingToSplit,
    OfDim,
    Reason,
    SingleNumber,
    TableByColumns,
    Unused,
)

_ROUNDS = 24


@dataclass(frozen=True)
class Solution:
    """The facts and decisions of the analysis of one trace at one size."""

    trace: Trace
    axes: Axes
    tp_size: int
    parameters: tuple[ParameterFact, ...]
    classes: tuple[ClassFact, ...]
    runtime: Runtime
    reductions: dict[int, Reduction]
    legal_tp: tuple[int, ...]
    refusals: tuple[AxisWhole, ...] = ()
    sequence_parallel: bool = False
    whole_sequence: tuple[WholeSequence, ...] = ()
    pairs: tuple[Finding, ...] = ()  # under context parallelism
    notes: tuple[str, ...] = ()  # on a written plan, if there is one
    parted: tuple[ClassFact, ...] = ()  # classes that would be split inside a block of a quantised weight
    experts_inside: tuple[tuple[str, Reason], ...] = ()  # modules whose experts could not be distributed, and why
    shards: Shards | None = field(default=None, compare=False, repr=False)
    over_all: Solution | None = field(default=None, compare=False, repr=False)  # over all ranks, if tp and cp combine


@dataclass
class _Round:
    axes: Axes
    choice: SplitMarks
    shards: Shards
    placement: Placement
    edits: Edits
    scope: Scope
    tried: Tried = Tried()
    constants: tuple[Constant, ...] = ()


def solve(
    trace: Trace,
    tp: int,
    *,
    scoped: bool = True,
    demands: Demands = NO_DEMANDS,
    sequence_stacks: tuple[tuple[str, ...], ...] | None = None,
    context: bool = False,
    gathered: Collection[HookKind] | None = None,
    own_loss: bool = False,
) -> Solution:
    """Analyse a trace and decide its splits at `tp`. `scoped=False` refuses what hooks and integer edits cannot do.

    With `sequence_stacks` (the blocks of every stack) the stream between split regions is sharded along the sequence.
    `demands` are what a handwritten plan leaves to decide. `context`: split only the axes that calls which mix
    positions treat independently (heads). `gathered`: see Capabilities. `own_loss`: see `without_own_loss`.
    """
    recorded, own_demands, trace = trace, demands, without_own_loss(trace, context, own_loss)
    flow = CallFlow(trace, blocks=chain.from_iterable(sequence_stacks or ()))
    axes, refusals = infer_axes(trace), list[AxisWhole]()
    if context:
        demands = demands.and_also(_whole_but_mixed(trace, flow, axes, tp, scoped, demands, sequence_stacks or ()))
    done = _settle(trace, flow, axes, tp, refusals, scoped, demands)
    legal = _legal_sizes(trace, flow, axes, tp, done, scoped, demands)
    parts = {leaf: number for number, leaf in enumerate(done.tried.why)}
    parted = tuple(_class_facts(trace, axes, parts, done.tried.why))
    wanted = products_to_gather(trace, axes, done.shards, tp, done.choice.indivisible, demands)
    if wanted:
        axes = infer_axes(trace, frozenset(wanted))
        refusals.clear()
        done = _settle(trace, flow, axes, tp, refusals, scoped, demands)
    sequence, rewritten = None, {call.pattern for call in done.scope.calls}
    if sequence_stacks is not None:
        cut = done.shards, flow, done.placement, sequence_stacks
        sequence = place_sequence(*cut, context=context, rewritten=rewritten, gathered=gathered)
        if context and sequence.refused and returns_less(trace):
            return solve(recorded, tp, scoped=scoped, demands=own_demands, sequence_stacks=sequence_stacks,
                         context=True, gathered=gathered, own_loss=True)  # fmt: skip
    return replace(_solution(trace, flow, done, tp, refusals, sequence, legal, demands), parted=parted)


def _whole_but_mixed(
    trace: Trace, flow: CallFlow, axes: Axes, tp: int, scoped: bool, demands: Demands, stacks: Iterable[tuple[str, ...]]
) -> Demands:  # fmt: skip
    """Return demands that replicate all weights but those with an axis that position-mixing calls keep apart."""
    done, places = _settle(trace, flow, axes, tp, [], scoped, demands), occurrences(trace, axes)
    mixed, own = mixed_leaves(done.shards, flow, stacks)
    apart = {tensor for leaf in mixed for tensor in places.get(leaf, ())}
    others = [t for t, info in enumerate(trace.tensors) if info.kind == "parameter" and t not in apart]
    whole = NO_DEMANDS
    if done.choice.indivisible:  # axes that would be split at one rank but are not divisible here
        alone = _settle(trace, flow, axes, 1, [], scoped, demands).shards
        (mixed, _), (still, _) = (mixed_leaves(alone, flow, stacks, without) for without in ((), own))
        for leaf in sorted(mixed & done.choice.indivisible.keys(), key=str):
            why = MixedWhole(leaf.size, tp, own_queries=leaf not in still)
            whole = whole.with_whole(trace, set(others) & set(places.get(leaf, ())), why)
    return whole.with_whole(trace, others, MixesNothing())


def _legal_sizes(
    trace: Trace, flow: CallFlow, axes: Axes, tp: int, done: _Round, scoped: bool, demands: Demands
) -> tuple[int, ...]:
    """Return the valid tp sizes. If `tp` is not one, other axes are split at it, so solve for one rank."""
    legal = legal_sizes(trace, axes, done.choice, done.tried, demands.packed)
    if tp in legal:
        return legal
    alone = _settle(trace, flow, axes, 1, [], scoped, demands)
    others = legal_sizes(trace, axes, alone.choice, alone.tried, demands.packed)
    return tuple(size for size in others if size != tp)


def _settle(
    trace: Trace, flow: CallFlow, axes: Axes, tp: int, refusals: list[AxisWhole], scoped: bool, demands: Demands
) -> _Round:
    """Choose, place and solve; refuse what fails and start over, until nothing is refused."""
    refused = demands.refused(trace, axes)
    blocked: dict[Term, Term | None] = {}
    inside: dict[Term, InsideQuantisedBlock] = {}
    order: tuple[Term, ...] = ()
    uneven = unevenly(trace, axes, demands.packed, tp) if demands.uneven else {}
    for _ in range(_ROUNDS):
        special = vocabularies(trace, axes) | gathered_leaves(trace, axes)
        choice = choose(trace, axes, tp, refused=refused, vocabularies=special, uneven=uneven)
        order = order or choice.order
        shards = Shards(trace, axes, choice.marks, tp)
        parted = parted_blocks(shards, demands.packed)
        if parted:
            refused.update(parted)
            inside |= parted
            refusals += [AxisWhole(leaf.size, why) for leaf, why in parted.items()]
            blocked |= {leaf: choice.partners.get(leaf) for leaf in parted}
            continue
        placement = place(shards, flow, axes.gathered)
        refuse_unplaced_logits(trace, flow, shards, placement, choice.vocabularies)
        constants, summed = of_constants(trace, shards, axes, placement, flow)
        for call, tensors in summed.items():
            placement.inside_copies[call] |= tensors
        edits = solve_edits(shards)
        reach = scope(shards, flow, placement, edits)
        blamed = _blame(shards, flow, placement, reach, scoped)
        if not blamed:
            refused_constants = {replace(constant, sums=True) for constant in constants}
            fed = of_arguments(trace, shards, axes, placement, flow)
            constants += tuple(constant for constant in fed if replace(constant, sums=True) not in refused_constants)
            return _Round(axes, choice, shards, placement, edits, reach, Tried(order, blocked, inside), constants)
        for leaf, why in blamed.items():
            refused[leaf] = why
            refusals.append(AxisWhole(leaf.size, why))
    shards = Shards(trace, axes, {}, tp)
    return _Round(axes, SplitMarks(), shards, Placement(), Edits(), Scope(), Tried(order, blocked, inside))


def _blame(shards: Shards, flow: CallFlow, placement: Placement, scope: Scope, scoped: bool) -> dict[Term, Reason]:
    """Return the classes to give up: for each refusal, the split leaf in or near its tensors with fewest elements."""
    refusals: list[tuple[Reason, tuple[int, ...]]] = [(r.why, r.tensors) for r in placement.refusals]
    refusals += scope.refusals
    if not scoped:
        refusals += [
            (NeedsRewriting(c.site.function, c.pattern), t) for c, t in zip(scope.calls, scope.tensors, strict=True)
        ]
    blamed: dict[Term, Reason] = {}
    sizes = _held(shards)
    for why, tensors in refusals:
        involved = _involved(set(tensors), shards, flow)
        if involved and not involved & blamed.keys():
            blamed[min(involved, key=lambda leaf: (sizes.get(leaf, 0), leaf.size))] = why
    return blamed


def _involved(tensors: set[int], shards: Shards, flow: CallFlow) -> set[Term]:
    """Return the split leaves of these tensors or of the nearest that have any: a refusal must have an effect."""
    while True:
        involved = {leaf for tensor in tensors for leaf in shards.split_leaves(tensor)}
        more = flow.near(tensors)
        if involved or not more:
            return involved or set(shards.marks)
        tensors = tensors | more


def _held(shards: Shards) -> dict[Term, int]:
    trace = shards.trace
    return {
        leaf: sum(prod(trace.tensors[t].shape) for t in places)
        for leaf, places in occurrences(trace, shards.axes).items()
    }


# Writing the result down


def _solution(
    trace: Trace, flow: CallFlow, done: _Round, tp: int, refusals: list[AxisWhole], sequence: SequencePlacement | None,
    legal: tuple[int, ...], demands: Demands,
) -> Solution:  # fmt: skip
    cut = sequence if sequence is not None and sequence.applies else None
    constants = done.constants if cut is None else tuple(replace(constant, sums=False) for constant in done.constants)
    ids = _class_ids(trace, done)
    recurrences = recurrent(done.shards, flow, done.scope.calls, demands) if tp > 1 else Recurrent()
    facts = tuple(_parameter_facts(trace, done, ids, cut, recurrences))
    heads, gathers = head_sites(trace, flow, done.shards, done.placement, done.choice.vocabularies)
    boundaries = dict.fromkeys((*done.placement.outputs.values(), *done.placement.inputs.values()))  # of any runs
    runtime = Runtime(
        parameters=tuple(_rules(facts)),
        instructions=(
            *_with_old(done.edits, trace, cut.whole_modules if cut else ()),
            *(boundaries if cut is None else sequence_boundaries(done.placement, cut)),
            *(ParallelBlock(block) for block in sorted(done.placement.blocks)),
            *gathers,
            *heads,
            *(done.scope.calls if cut is None else cut.work.joined(done.scope.calls, trace)),
            *recurrences.calls,
        ),
        random=tuple(sorted({*done.scope.random, *(cut.random if cut else ())})),
        random_whole=done.scope.random_whole,
        draws=any(draws(call, trace) for call in trace.calls),
        outputs=returned(trace),
        shapes=output_shapes(trace, done.axes),
        given=given(trace),
        unsummed=unsummed(trace, done.shards, done.axes, done.placement, constants) if tp > 1 else (),
        constants=constants,
        idle=idle(trace),
    )
    return Solution(
        trace=trace,
        axes=done.axes,
        tp_size=tp,
        parameters=facts,
        classes=tuple(_class_facts(trace, done.axes, ids, done.choice.reasons, done.choice.marks)),
        runtime=runtime,
        reductions=dict(done.placement.reductions),
        legal_tp=legal,
        refusals=tuple(dict.fromkeys(refusals)),
        sequence_parallel=cut is not None,
        whole_sequence=() if sequence is None else tuple(dict.fromkeys(cut.whole)) if cut else sequence.refused,
        pairs=cut.pairs if cut else (),
        shards=done.shards,
    )


def _rules(facts: tuple[ParameterFact, ...]) -> Iterator[ParameterRule]:
    """Yield what execution must know about sharded or specially reduced parameters and buffers, under each name."""
    for fact in facts:
        if fact.dim is not None or fact.gradient != "local" or fact.divide:
            for name in fact.names:
                yield ParameterRule(name, fact.dim, fact.layout, fact.gradient, fact.divide)


def _with_old(edits: Edits, trace: Trace, whole: Collection[str]) -> Iterator[IntegerEdit]:
    for edit in edits.as_edits():
        if any(edit.pattern == name or edit.pattern.startswith(f"{name}.") for name in whole):
            continue
        stored = trace.attributes[edit.pattern][edit.name]
        yield replace(edit, old=stored if edit.index is None else stored[edit.index])


def _class_ids(trace: Trace, done: _Round) -> dict[Term, int]:
    """Return stable numbers, ordered by first parameter, then dim, then position within the dim."""
    ids: dict[Term, int] = {}
    for tensor in range(len(trace.tensors)):
        if done.axes.is_stored_weight(tensor):
            for term in done.axes.of(tensor):
                for leaf in leaves(term):
                    ids.setdefault(find(leaf), len(ids))
    return ids


def _class_facts(
    trace: Trace, axes: Axes, ids: Mapping[Term, int], reasons: Mapping[Term, Reason], cut: Collection[Term] = ()
) -> Iterator[ClassFact]:
    uses = occurrences(trace, axes)
    for leaf, number in ids.items():
        places = tuple((trace.tensors[t].names[0], d) for t, dims in uses.get(leaf, {}).items() for d in sorted(dims))
        split = leaf in cut
        reason = None if split else reasons.get(leaf)
        yield ClassFact(number, leaf.size, frozenset(map(str, leaf.events)), places, split, reason)


def _parameter_facts(
    trace: Trace, done: _Round, ids: dict[Term, int], cut: SequencePlacement | None, recurrences: Recurrent
) -> Iterator[ParameterFact]:
    placement, shards = done.placement, done.shards
    gathered = (looked_up_in(trace.ops[index], done.axes) for index in done.axes.gathered)
    tables = {table: TableByColumns() for table in gathered if table is not None and shards.is_split(table)}
    for tensor, info in enumerate(trace.tensors):
        if info.kind not in ("parameter", "buffer") or not info.names:
            continue
        exchanged = cut is not None and tensor in cut.whole_parameters
        layouts = shards.layouts(tensor) if not exchanged else ()
        dim = next((d for d, layout in enumerate(layouts) if layout is not None), None)
        # Groups of ranks share each row, so that every holder of a row has a part of its gradient.
        twice = any(layout is not None and layout.all_carried() and layout.shared_rows(shards.tp) for layout in layouts)
        gradient = (
            "sum" if exchanged or tensor in placement.summed_parameters or (cut and tensor in cut.summed_parameters)
            else "shared" if tensor in placement.shared_parameters or twice
            else "local"
        )  # fmt: skip
        split = sorted(shards.split_leaves(tensor), key=lambda leaf: -leaf.size)
        rows, how = recurrences.rows.get(tensor), recurrences.how.get(tensor) or tables.get(tensor)
        layout = rows if dim is None else str(layouts[dim])
        dim = 0 if rows is not None else dim
        yield ParameterFact(
            names=info.names,
            shape=info.shape,
            bytes=prod(info.shape) * info.item_size,
            buffer=info.kind == "buffer",
            dim=dim,
            layout=layout,
            gradient=gradient,  # type: ignore[arg-type]
            divide=tensor in placement.divided_biases and not exchanged,
            axis=ids.get(split[0]) if split else None,
            axes=tuple(sorted(ids[leaf] for leaf in split if leaf in ids)),
            why=(Exchanged(),) if exchanged else () if dim is not None else _why_whole(tensor, done),
            how=how,
        )


def _why_whole(tensor: int, done: _Round) -> tuple[Reason, ...]:
    """Return why none of a parameter's dims is split: the reasons of the classes that could have been."""
    reasons: list[Reason] = []
    shape = done.shards.trace.tensors[tensor].shape
    for dim, term in enumerate(done.axes.of(tensor)):
        for leaf in leaves(term):
            reason = done.choice.reasons.get(find(leaf))
            if reason is not None:
                reasons.append(OfDim(dim, leaf.size, reason, 0 if leaf.size == shape[dim] else shape[dim]))
    if not reasons:
        if prod(shape) == 1:
            return (SingleNumber(),)
        return (NothingToSplit(),) if _used(tensor, done) else (Unused(),)
    return tuple(dict.fromkeys(reasons))


def _used(tensor: int, done: _Round) -> bool:
    return any(leaf.events for term in done.axes.of(tensor) for leaf in leaves(term)) or not done.axes.of(tensor)

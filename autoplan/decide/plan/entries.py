"""The content of a plan's entry: style, costs, communication, dataflow and reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from autoplan.analyse.moved import Excess, block_traffic, both_traffics
from autoplan.analyse.picture.flow import Flow, Node, node_of
from autoplan.analyse.solve import Solution
from autoplan.common.layout import Layout
from autoplan.common.patterns import grouped, is_under
from autoplan.decide.match import TRANSPARENT
from autoplan.decide.naming import Naming, Reading
from autoplan.decide.plan.folding import Names
from autoplan.values import Boundary, CallRewrite, Cost, Finding, Instruction, ParameterFact, Spread, Stack, Traffic
from autoplan.values.reasons import CutOfRecurrent

# The style of a parameter follows from the facts, so that a rule can never make a split that was not proven.

_BY_FIELD = {
    **dict.fromkeys((("linear", "out"), ("stacked", "out"), ("conv", "out")), "colwise"),
    **dict.fromkeys((("linear", "in"), ("stacked", "in"), ("conv", "in")), "rowwise"),
    ("embedding", "rows"): "embedding_rowwise",
    ("embedding", "width"): "embedding_colwise",
}


def style_of(fact: ParameterFact, readers: Iterable[Node], tp: int, *, gathered: bool, reduced: bool) -> str:
    """Return the style of a parameter. `readers`: boxes that read it; `gathered`, `reduced`: what its module does."""
    if fact.dim is None:
        return "replicated_with_grad_allreduce" if fact.gradient != "local" else "replicate"
    plain = {_style_in(node, fact) for node in readers}
    if "norm" in plain and reduced:
        return "distributed_norm"
    for style in ("embedding_rowwise", "embedding_colwise", "colwise", "rowwise"):
        if style in plain:
            if style == "colwise" and gathered:
                return "colwise_gather_output"
            assert fact.layout is not None
            return (
                style if Layout.parse(fact.layout).one_run(tp) or style.startswith("embedding") else f"packed_{style}"
            )
    return "local"


def _style_in(node: Node, fact: ParameterFact) -> str:
    for field, dim in node.dims:
        if dim.parameter in fact.names and dim.dim == fact.dim:
            return "norm" if node.kind == "norm" else _BY_FIELD.get((node.kind, field), "local")
    out = node.dim("out")
    is_bias = any(name in fact.names for name in node.parameters[1:])
    if is_bias and node.kind == "linear" and len(fact.shape) > 1:  # scales are sharded like their weight
        return next((_BY_FIELD[node.kind, field] for field, dim in node.dims if dim.dim == fact.dim), "local")
    return "colwise" if is_bias and out is not None and out.layout is not None else "local"


# The communication of a plan, block by block: equal blocks once, and a finding for each excess over the minimum.


def communication(
    solution: Solution, layers: Iterable[Stack], names: Names
) -> tuple[tuple[Traffic, ...], tuple[Finding, ...]]:
    """Return the traffic of blocks compared with the minimum, and findings that explain each excess."""
    if solution.shards is None or solution.tp_size == 1:
        return (), ()
    blocks = [fqn for stack in layers for fqn in stack.fqns]
    traffics, excesses = _traffic(solution, blocks)
    alike: dict[str, tuple[Traffic, list[str]]] = {}
    for moved in traffics:
        same = replace(moved, block="")
        alike.setdefault(repr(same), (same, []))[1].append(moved.block)
    blocks_by_excess = grouped((excess.reason, excess.block) for excess in excesses)
    traffic = [replace(same, block=pattern) for same, members in alike.values() for pattern in names.fold(members)]
    notes = [
        Finding("communication", "note", pattern, reason)
        for reason, members in blocks_by_excess.items()
        for pattern in names.fold(members)
    ]
    return tuple(traffic), tuple(notes)


def _traffic(solution: Solution, blocks: list[str]) -> tuple[tuple[Traffic, ...], tuple[Excess, ...]]:
    assert solution.shards is not None
    other, every = solution.over_all, solution.runtime
    if other is None or other.shards is None:
        return block_traffic(solution.shards, every, solution.reductions, blocks)
    cp = other.tp_size // solution.tp_size
    split, cut, both = (
        replace(every, instructions=tuple(done for done in every.instructions if done.over == over))
        for over in ("", "cp", "all")
    )
    by_tp, excess = block_traffic(solution.shards, split, solution.reductions, blocks, pieces=cp)
    more, beyond = block_traffic(other.shards, cut, other.reductions, blocks, context=cp, within=solution.shards)
    last, _ = block_traffic(other.shards, both, other.reductions, blocks)
    by_block = {block.block: block for block in by_tp}
    sums = zip(more, last, strict=True)
    return (
        tuple(both_traffics(by_block[block.block], block, all_of) for block, all_of in sums if block.block in by_block),
        (*excess, *beyond),
    )


# The cost of a module's split at run time. A sum of input gradients that several projections share is listed at each.


class Costs:
    """The costs of modules, from the sites that analysis decided on."""

    def __init__(self, solution: Solution, flow: Flow) -> None:
        self.flow = flow
        self.runtime = solution.runtime
        self.trace = solution.trace
        # Boxes whose value has its gradient all-reduced, wherever the instruction is attached
        partial = (boundary for boundary in self.runtime.of(Boundary) if boundary.gives is Spread.PARTIAL_GRADIENT)
        sites = {(boundary.pattern, boundary.side, boundary.path) for boundary in partial}
        tensors: set[int] = set()
        for visit in self.trace.visits:
            for side, crossings in (("input", visit.inputs), ("output", visit.outputs)):
                tensors.update(tensor for path, tensor in crossings if (visit.module, side, path) in sites)
        boxes: dict[int, int] = self.flow.graph.get("tensors", {})
        self.copied = {boxes[tensor] for tensor in tensors if tensor in boxes}
        self.summing = dict.fromkeys(
            self.trace.calls[call].module for call, kind in solution.reductions.items() if kind == "sum"
        )
        self.calls = {call.pattern: call for call in self.runtime.of(CallRewrite) if call.reduces}

    def of(
        self,
        module: str,
        facts: Iterable[tuple[str, ParameterFact]],
        readings: list[Reading],
        *,
        ends_here: bool = True,
    ) -> tuple[Cost, ...]:
        """Return every cost of one module, forward ones first. `ends_here`: the module's output is the product with
        these parameters. (Of experts' two weights only the second's is.)"""
        own_instructions = (instruction for instruction in self.runtime.instructions if instruction.pattern == module)
        costs = [
            done.cost for done in own_instructions if done.cost is not None and self._is_of_product(done, ends_here)
        ]
        costs += self._sum_further_out(module) if ends_here else []
        costs += self._input_gradient(module, readings)
        for name, fact in facts:
            if fact.gradient != "local":
                own, shared = name.rpartition(".")[2], fact.gradient == "shared"
                costs.append(Cost("sum", "parameter-gradient", parameter=own, shared_rows=shared))
        return tuple(dict.fromkeys(costs))

    def _is_of_product(self, instruction: Instruction, ends_here: bool) -> bool:
        """Return whether an instruction at a module belongs to the product with the parameters in question."""
        if isinstance(instruction, CallRewrite):
            return instruction is self.calls.get(instruction.pattern)
        return not isinstance(instruction, Boundary) or (ends_here and instruction.side == "output")

    def _sum_further_out(self, module: str) -> list[Cost]:
        """Return the cost of a partial sum that is reduced at an enclosing module, where others join it."""
        if module not in self.summing or module in self.calls:
            return []
        summed = (b for b in self.runtime.of(Boundary) if b.takes is Spread.PARTIAL and b.gives is not Spread.PARTIAL)
        sites = {boundary.pattern for boundary in summed if boundary.side == "output"}
        around = [name for name in sites if module == name or is_under(name, module)]
        place = max(around, key=len, default=module)
        if place == module:
            return []
        others = [name for name in self.summing if name != module and is_under(place, name) and name not in sites]
        shared = tuple(_seen_from(module, other) for other in others)
        return [Cost("sum", at=place.rpartition(".")[2], shared_with=shared)]

    def _input_gradient(self, module: str, readings: list[Reading]) -> list[Cost]:
        sources = {source for reading in readings for source in self.flow.predecessors(reading.box)} & self.copied
        if not sources:
            return []
        others = dict.fromkeys(
            _seen_from(module, node.module)
            for source in sorted(sources)
            for node in self._readers(source)
            if node.parameters and node.module != module
        )
        return [Cost("sum", "input-gradient", shared_with=tuple(others))]

    def _readers(self, box: int) -> list[Node]:
        readers: list[Node] = []
        for reader in self.flow.successors(box):
            node = node_of(self.flow, reader)
            readers += self._readers(reader) if node.kind in TRANSPARENT else [node]
        return readers


def _seen_from(module: str, other: str) -> str:
    """Return the other module's name without the common prefix: "k_proj", "k_proj.base"."""
    own, parts = module.split("."), other.split(".")
    common = next((i for i, (a, b) in enumerate(zip(own, parts, strict=False)) if a != b), min(len(own), len(parts)))
    return ".".join(parts[min(common, len(parts) - 1) :])


# Sentences with numbers: the units of a sharded parameter, what a rank gets, and why; or why it is replicated.

_OF_HEADS = "feature of each head"
_PLURALS = {_OF_HEADS: "features of each head"}


def units_text(fact: ParameterFact, naming: Naming | None) -> tuple[str, str]:
    """Return what is sharded: "14336 features"; for units of several rows with these, "8 groups × 16", and without."""
    if fact.layout is None:
        return "", ""
    layout = Layout.parse(fact.layout)
    units = _first_sharded(layout).size * _times(layout, naming)
    rows = layout.size // units if layout.size % units == 0 and layout.kind == "product" else 1
    counted = _count(units, _unit_of_gates(layout) if isinstance(fact.how, CutOfRecurrent) else _unit(naming, layout))
    return (f"{counted} × {rows}", counted) if rows > 1 else (counted, "")


def reason_text(fact: ParameterFact, naming: Naming | None, tp: int) -> str:
    """Return one sentence: the units, what each rank gets, and for attention the heads that read them."""
    if fact.dim is None:
        return "replicated, but each rank has a partial gradient: the gradients are summed"
    assert fact.layout is not None
    layout = Layout.parse(fact.layout)
    unit = _unit_of_gates(layout) if isinstance(fact.how, CutOfRecurrent) else _unit(naming, layout)
    parts = [_heads_text(layout, naming, tp) or _shards_text(layout, unit, tp, _times(layout, naming))]
    replicated_rows = _held_by_all(layout)
    if replicated_rows:
        parts.append(f"{replicated_rows} of its {layout.size} rows are replicated, their gradients summed")
    if layout.kind == "concatenation":
        parts.append(f"its {len(layout.parts)} segments are sharded separately")
    if fact.how is not None:
        return "; ".join([*parts, str(fact.how)])
    text = "; ".join(parts)
    return text if naming is not None else f"a verified split that no rule names: {text}"


def _shards_text(layout: Layout, unit: str, tp: int, times: int) -> str:
    first = _first_sharded(layout)
    counts = [Layout.parse(str(first)).held(rank, tp) * times for rank in range(tp)]
    all_units = _count(first.size * times, unit)
    if first.split != (0, 1):
        pieces = first.split[0] if first.split else 1
        in_pieces = "" if pieces == first.size * times else f" in {pieces} pieces"
        return f"{all_units}{in_pieces}, each on {_count(tp // pieces, 'rank')}; a rank holds {counts[0]}"
    if len(set(counts)) == 1:
        return f"{all_units}; {'ep' if unit == 'expert' else 'tp'}={tp} gives each rank {counts[0]}"
    return f"{all_units}; tp={tp} gives the first rank {counts[0]} and the last {counts[-1]}"


def _heads_text(layout: Layout, naming: Naming | None, tp: int) -> str:
    """Return both numbers of heads if several query heads read one key/value head; else ""."""
    groups = _first_sharded(layout)
    if naming is None or naming.unit != "head" or groups.split != (0, 1) or groups.size % tp:
        return ""
    heads = _query_heads(naming, groups.size)
    if heads <= groups.size or heads % groups.size:
        return ""
    key_heads = groups.size // tp
    return (
        f"{_count(heads, 'query head')} in {_count(groups.size, 'group')}; tp={tp} gives each rank "
        f"{_count(heads // groups.size * key_heads, 'query head')} and {_count(key_heads, 'key/value head')}"
    )


def _unit(naming: Naming | None, layout: Layout) -> str:
    """Return the unit that is sharded. Of heads, the last of several factors is features of every head, and a unit
    with several heads is a group."""
    if naming is None or naming.unit != "head":
        return "unit" if naming is None else naming.unit
    if _is_minor(layout, naming):
        return _OF_HEADS
    units = _first_sharded(layout).size * _times(layout, naming)
    return "group" if max(naming.sizes.get("by_head", 0), _query_heads(naming, units)) > units else "head"


def _unit_of_gates(layout: Layout) -> str:
    """Return the unit of recurrent weights: a rank has all gates of its hidden units, or some rows."""
    return "hidden unit" if layout.kind == "product" else "row"


def _is_minor(layout: Layout, naming: Naming) -> bool:
    """Return whether the only sharded factor is the last of a product, in all segments, which are not heads."""
    if layout.kind == "concatenation":
        return all(_is_minor(part, naming) for part in layout.parts if part.is_split)
    if layout.size == naming.sizes.get("by_head"):
        return False
    last = layout.parts[-1] if layout.kind == "product" else layout
    return last is not layout and last.is_split and not any(part.is_split for part in layout.parts[:-1])


def _times(layout: Layout, naming: Naming | None) -> int:
    """Return in how many groups the sharded heads are, where a rank has some heads of each group."""
    if naming is None or naming.unit != "head" or _is_minor(layout, naming):
        return 1
    if layout.kind == "concatenation":
        return next((_times(part, naming) for part in layout.parts if part.is_split), 1)
    first = next((n for n, part in enumerate(layout.parts) if part.is_split), 0)
    return prod(part.size for part in layout.parts[:first])


def _held_by_all(layout: Layout) -> int:
    """Return how many rows are replicated."""
    if not layout.parts:
        return 0 if layout.is_split else layout.size
    counts = [_held_by_all(part) for part in layout.parts]
    return prod(counts) if layout.kind == "product" else sum(counts)


def _query_heads(naming: Naming, groups: int) -> int:
    """Return the number of query heads, from the contracted size of the output and the width of a value head."""
    contracted, value = naming.sizes.get("output.in", 0), naming.sizes.get("value.out", 0)
    return contracted * groups // value if value and (contracted * groups) % value == 0 else 0


def _first_sharded(layout: Layout) -> Layout:
    if not layout.parts:
        return layout
    return next((_first_sharded(part) for part in layout.parts if part.is_split), layout)


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {_PLURALS.get(noun, f'{noun}s')}"

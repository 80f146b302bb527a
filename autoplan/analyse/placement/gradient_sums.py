"""Place the sums of partial gradients and the divisions of whole ones: the cheapest cut that hooks can carry out.

A value is a tree: its maker hands it out, module boundaries take it in, calls read it. At each place its gradient is
whole or partial. From a partial gradient below a boundary to a whole one above it is an all-reduce in the backward; the
other way round the gradient is divided by the number of ranks, for free. Which calls pass partial gradients on, and
which values need a whole one, are the implications of `minimum_cut.py`, with the forward sums as they were placed.

Prices are whole numbers: the elements of a sum and one for the message, and far below them what breaks ties. A sum is
placed where the value leaves its module rather than where another module takes it, at the outermost of these rather
than inside, and inside a module's own code only if nothing else would do. An implication that every answer breaks is a
refusal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import prod

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

from autoplan.analyse.infer import Shards
from autoplan.analyse.placement.callflow import CallFlow, Crossing, HookPoints, Kind, Placement, Refusal
from autoplan.analyse.placement.delayed_sums import Way
from autoplan.analyse.placement.minimum_cut import ELEMENT, HARD, NO, OUTSIDE, YES, CutProblem, Place, Version
from autoplan.analyse.splits.special import thin_matrix
from autoplan.common.patterns import holders
from autoplan.ops import call_record
from autoplan.ops.records.answers import Reduction
from autoplan.values import AllReduceGradient, ScaleGradient, Trace
from autoplan.values.reasons import NotPlaced

_INSIDE = 8  # a sum in a module's own code costs as much as so many at a boundary
_COLLECTED = 3  # and one where callers collect the value, for whom it should be whole, too
_PASSED = 64  # to leave a gradient partial where a value is made; a boundary further in costs 1
_HANDED_UP = 32  # a sum at the output of a module whose value another module returns: its callers may read it, too
_DIVIDED = 256
_CUT = HARD >> 16  # a sum at the input of a block, or before: there its stream may be cut along the sequence


class GradientSums(CutProblem):
    """The questions of the backward alone, asked at each boundary that a value crosses."""

    def __init__(
        self,
        shards: Shards,
        flow: CallFlow,
        reductions: Mapping[int, Reduction],
        hook_points: HookPoints,
        ways: list[Way],
    ) -> None:
        self.hook_points = hook_points
        # Calls that a partial sum passes on its way, with the factors that it is multiplied by there
        self.steps = {
            step: {t for t in flow.inputs[step] if t in flow.carries} - way.values - way.added
            for way in ways
            for step in way.path
        }
        self.boundaries: list[tuple[Place, Place, list[Crossing]]] = []  # behind, before, and under which names
        self.entries: list[tuple[Place, list[Crossing]]] = []  # before the inputs of blocks
        self.inside: list[tuple[Place, Place]] = []  # where a call reads, and the place before
        # What modules with sums in their submodules return (blocks, stacks). Callers collect it, and may compute losses
        parts = _parts_of_blocks(shards.trace)
        self.collected = {
            tensor
            for visit in shards.trace.visits
            for first, last in (visit.calls,)
            if visit.module not in parts
            and any(first <= index < last and shards.trace.calls[index].module != visit.module for index in reductions)
            for _, tensor in visit.outputs
        }
        super().__init__(shards, flow, reductions, flow.carries)
        self._tie_runs()

    # The problem

    def _asked(self, question: str, place: Place) -> bool:
        return question == "whole" and super()._asked(question, place)

    def _passing(self, index: int, reads: Mapping[int, Place]) -> list[int]:
        return []

    def _enters_split(self, index: int, reads: Mapping[int, Place], makes: Mapping[int, Place]) -> bool:
        factors = self.steps.get(index)
        if factors is None:
            return super()._enters_split(index, reads, makes)
        for tensor, place in (*reads.items(), *makes.items()):
            self.answer(NO if tensor in factors else YES, "whole", place)
        return True

    def _tie_runs(self) -> None:
        """Give all runs of a module the same answers before and behind a hook point: a hook acts on each of them."""
        by_point: dict[object, list[tuple[Place, Place]]] = defaultdict(list)
        for place, outer, names in self.boundaries:
            by_point[names[0].module, tuple(crossing.path for crossing in names)].append((place, outer))
        for pairs in by_point.values():
            for side in zip(*pairs, strict=True):
                self.alike("whole", side)

    def _passes_gradients(self, index: int) -> bool:
        flow, call = self.flow, self.trace.calls[index]
        if call.module in flow.branching or not flow.rewritten.isdisjoint(flow.outputs[index]):
            return False  # another run may have other readers; what was there before is gone
        if thin_matrix(index, flow, self.shards) is None:
            return super()._passes_gradients(index)
        # A thin matrix before others (an adapter's first one). Scores of a router may be read by others, too
        (output,) = flow.outputs[index]
        uses = flow.gradient_uses(output)
        return bool(uses) and all(call_record(self.trace.calls[use].name).is_layer for use in uses)

    def _is_matrix(self, tensor: int) -> bool:
        source = self.shards.axes.sources.get(tensor)
        weight = self.trace.tensors[tensor].kind == "parameter" or (
            source is not None and self.trace.tensors[source].quantised
        )
        return weight and len(self.trace.tensors[tensor].shape) > 1

    def _add_sum(self, version: Version) -> None:
        """Add the tree of a value's readers."""
        tensor, index = version
        source, root = (version, "made", index), (version, "summed", index)
        if not self._asked("whole", source):
            return
        mixed, parameter = self.shards.is_mixed(tensor), self.trace.tensors[tensor].kind == "parameter"
        price = (2 * prod(self.trace.tensors[tensor].shape) + 1) * ELEMENT  # of equal volumes the fewest messages
        uses = self.flow.gradient_uses(tensor)
        reads = {place[2]: place for place in self.read[version] if place[2] in uses or place[2] == OUTSIDE}
        branching = any(self.trace.calls[use].module in self.flow.branching for use in uses)
        leaving = None if index == OUTSIDE or branching else self.hook_points.leaving(tensor, index)
        at_output = price * _COLLECTED if tensor in self.collected else price + self._handed_up(version)
        self.edge("whole", root, source, 1 if parameter else HARD if leaving is None or mixed else at_output)
        self.edge("whole", source, root, _DIVIDED if mixed and (parameter or leaving is not None) else HARD)
        if not parameter:
            self.answer(YES, "whole", source, HARD if tensor in self.collected else _PASSED)
        inner: list[tuple[range, Place, int]] = [(range(-1, len(self.trace.calls)), root, 0)]
        blocks = {crossing.module for crossing in self.flow.entering.get(tensor, ())} & self.flow.blocks
        for span, names in () if branching or mixed else self._entering(version, reads):
            place = version, "input", names[0].visit
            _, outer, depth = next(
                entry for entry in reversed(inner) if span.start in entry[0] and span.stop <= entry[0].stop
            )
            enters_block = names[0].module in self.flow.blocks
            as_stream = enters_block and len(blocks) == 1
            self.edge("whole", place, outer, _CUT if as_stream else price * len(names) + depth + 1)
            self.edge("whole", outer, place, HARD if enters_block else _DIVIDED)
            if as_stream:
                self.answer(YES, "whole", outer, _CUT)
                self.entries.append((outer, names))
            inner.append((span, place, depth + 1))
            self.boundaries.append((place, outer, names))
        for use, place in reads.items():
            outer = next(entry[1] for entry in reversed(inner) if use in entry[0])
            self.edge("whole", place, outer, HARD if mixed or use == OUTSIDE else price * _INSIDE)
            self.edge("whole", outer, place)
            self.inside.append((place, outer))

    def _entering(self, version: Version, reads: Mapping[int, Place]) -> Iterator[tuple[range, list[Crossing]]]:
        """Yield the module runs with an open hook point behind which readers of the value are, outer ones first."""
        tensor, uses = version[0], self.flow.gradient_uses(version[0])
        entering = self.flow.entering.get(tensor, [])
        for crossing in sorted(entering, key=lambda c: (c.first - c.last, c.visit)):
            names = [c for c in entering if c.visit == crossing.visit]
            span = range(crossing.first, crossing.last)
            inside = {use for use in uses if use in span}
            if crossing is not names[0] or not inside or not reads.keys() >= inside:
                continue
            if all(self.hook_points.is_open(b, "input") and not self.flow.passes_through(tensor, b) for b in names):
                yield span, names

    def _handed_up(self, version: Version) -> int:
        tensor, maker = version
        out = {c.visit for c in self.flow.leaving.get(tensor, ()) if c.first <= maker < c.last}
        return _HANDED_UP if len(out) > 1 else 0

    # The answer

    def place(self, result: Placement) -> None:
        """Solve the problem, and add what is done to gradients to the placement."""
        whole, partial = self._implied(YES, self.graph.pred), self._implied(NO, self.graph.succ)
        if whole & partial:
            result.refusals += self._refusals(whole & partial)
            return
        # Questions with one answer are one node. Of the cheapest answers those with the fewest partial gradients count
        merged: nx.utils.UnionFind[object] = nx.utils.UnionFind()
        for node in whole:
            merged.union(YES, node)
        for node in partial:
            merged.union(NO, node)
        prices: dict[tuple[object, object], int] = nx.get_edge_attributes(self.graph, "capacity")
        hard = {pair for pair, price in prices.items() if price >= HARD}
        for no, yes in hard:
            if (yes, no) in hard:
                merged.union(no, yes)
        graph: nx.DiGraph[object] = nx.DiGraph()
        graph.add_nodes_from((merged[NO], merged[YES]))
        for (no, yes), price in prices.items():
            start, end = merged[yes], merged[no]
            if start != end:
                graph.add_edge(start, end, capacity=price + graph.get_edge_data(start, end, {}).get("capacity", 0))
        side = nx.minimum_cut(graph, merged[YES], merged[NO], flow_func=boykov_kolmogorov)[1][1]
        partial = {node for node in self.graph if merged[node] in side}
        for version, reads in self.read.items():
            if reads:
                self._place_value(version, partial, result)
                result.partial |= {version[0]} if ("whole", (version, "made", version[1])) in partial else set()
        for place, outer, names in self.boundaries:
            if (change := self._change(place, outer, partial)) is not None:
                for crossing in names:
                    result.at_input(crossing, change)
        for outer, names in self.entries:
            if ("whole", outer) in partial:
                result.partial_entries.update(names)
        for place, outer in self.inside:
            if self._change(place, outer, partial) is not None:
                result.inside_copies[place[2]].add(place[0][0])

    def _implied(self, answer: str, further: Mapping[object, Mapping[object, Mapping[str, int]]]) -> set[object]:
        """Return the questions that have this answer whatever the others are."""
        implied: set[object] = {answer}
        waiting: list[object] = [answer]
        while waiting:
            for node, edge in further[waiting.pop()].items():
                if edge["capacity"] >= HARD and node not in implied:
                    implied.add(node)
                    waiting.append(node)
        return implied

    def _change(self, behind: Place, before: Place, partial: Collection[object]) -> Kind | None:
        """Return what happens to the gradient between two places."""
        behind_is_partial, before_is_partial = (("whole", place) in partial for place in (behind, before))
        if not self._asked("whole", behind) or behind_is_partial == before_is_partial:
            return None
        return AllReduceGradient if behind_is_partial else ScaleGradient

    def _place_value(self, version: Version, partial: Collection[object], result: Placement) -> None:
        tensor, index = version
        change = self._change((version, "summed", index), (version, "made", index), partial)
        if change is None:
            return
        if self.trace.tensors[tensor].kind == "parameter":
            (result.shared_parameters if self.shards.is_mixed(tensor) else result.summed_parameters).add(tensor)
            return
        crossing = self.hook_points.leaving(tensor, index)
        assert crossing is not None
        if change is AllReduceGradient:
            result.at_output(crossing, change)
            return
        # Every rank has the whole gradient of the replicated rows: parts of it can be summed with those of the others
        dim = next(d for d, layout in enumerate(self.shards.layouts(tensor)) if layout is not None)
        from_end = dim - len(self.trace.tensors[tensor].shape)
        result.at_output(crossing, change, dim=from_end, layout=str(self.shards.layouts(tensor)[dim]))

    def _refusals(self, contradicted: Iterable[object]) -> Iterator[Refusal]:
        """Name the calls at which a gradient would have to be both whole and partial."""
        places = [node[1] for node in contradicted if isinstance(node, tuple)]
        for index in sorted({place[2] if place[1] == "read" else place[0][1] for place in places} - {OUTSIDE}):
            call = self.trace.calls[index]
            tensors = tuple(t for t in (*self.flow.inputs[index], *self.flow.outputs[index]) if self.shards.is_split(t))
            yield Refusal(index, NotPlaced("mixed-gradients", call=call.name, module=call.module), tensors)


def _parts_of_blocks(trace: Trace) -> set[str]:
    """Return the modules that are part of a repeated block, and are none themselves nor hold any."""
    alike = Counter((*_numbered(name), kind) for name, kind in trace.module_classes.items() if _numbered(name)[1])
    blocks = {name for name, kind in trace.module_classes.items() if alike[(*_numbered(name), kind)] > 1}
    holding = {holder for name in blocks for holder in holders(name)}
    within = {name for name in trace.module_classes if not blocks.isdisjoint(holders(name))}
    return within - blocks - holding


def _numbered(name: str) -> tuple[str, bool]:
    """Return what holds a module, and whether it is one of a list there."""
    holder, _, last = name.rpartition(".")
    return holder, last.isdigit()

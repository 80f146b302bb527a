"""What a module's split costs at run time: which sums and gathers happen because of it.

A sum of input gradients often sits upstream of the module, shared by several projections that read one value (the
norm before q, k and v): it is told at each of them, with the others named.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoplan.analyse.picture.flow import Flow, Node, node_of
from autoplan.analyse.solve import Solution
from autoplan.common.patterns import is_under
from autoplan.decide.matching.match import TRANSPARENT
from autoplan.decide.matching.naming import Reading
from autoplan.values import Boundary, CallRewrite, Cost, Instruction, ParameterFact, Spread

__all__ = ["Costs"]


class Costs:
    """Answers for modules, from the sites that analysis decided on."""

    def __init__(self, solution: Solution, flow: Flow) -> None:
        self.flow = flow
        self.runtime = solution.runtime
        self.trace = solution.trace
        self.copied = self._copied_boxes()
        self.summing = dict.fromkeys(
            self.trace.calls[call].module for call, kind in solution.reductions.items() if kind == "sum"
        )
        self.calls = {call.pattern: call for call in self.runtime.of(CallRewrite) if call.reduces}

    def _copied_boxes(self) -> set[int]:
        """Boxes whose value has its gradient summed, wherever that is attached."""
        partial = (one for one in self.runtime.of(Boundary) if one.gives is Spread.PARTIAL_GRADIENT)
        sites = {(one.pattern, one.side, one.path) for one in partial}
        tensors: set[int] = set()
        for visit in self.trace.visits:
            for side, crossings in (("input", visit.inputs), ("output", visit.outputs)):
                tensors.update(tensor for path, tensor in crossings if (visit.module, side, path) in sites)
        boxes: dict[int, int] = self.flow.graph.get("tensors", {})
        return {boxes[tensor] for tensor in tensors if tensor in boxes}

    def of(
        self,
        module: str,
        facts: Iterable[tuple[str, ParameterFact]],
        readings: list[Reading],
        *,
        ends_here: bool = True,
    ) -> tuple[Cost, ...]:
        """Every cost of one module, forward ones first.

        `ends_here`: the module's output is these parameters' product. (Of experts' two weights only the second's is.)
        """
        here = (one for one in self.runtime.instructions if one.pattern == module)
        found = [one.cost for one in here if one.cost is not None and self._is_of_product(one, ends_here)]
        found += self._sum_further_out(module) if ends_here else []
        found += self._input_gradient(module, readings)
        for name, fact in facts:
            if fact.gradient != "local":
                own, shared = name.rpartition(".")[2], fact.gradient == "shared"
                found.append(Cost("sum", "parameter-gradient", parameter=own, shared_rows=shared))
        return tuple(dict.fromkeys(found))

    def _is_of_product(self, one: Instruction, ends_here: bool) -> bool:
        """Does an instruction at a module belong to the product of the parameters that are asked about?"""
        if isinstance(one, CallRewrite):
            return one is self.calls.get(one.pattern)
        return not isinstance(one, Boundary) or (ends_here and one.side == "output")

    def _sum_further_out(self, module: str) -> list[Cost]:
        """A partial sum that travels to a module around this one, where others join it."""
        if module not in self.summing or module in self.calls:
            return []
        sites = {b.pattern for b in self.runtime.of(Boundary) if b.side == "output" and b.settles_partial}
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
        found: list[Node] = []
        for reader in self.flow.successors(box):
            node = node_of(self.flow, reader)
            found += self._readers(reader) if node.kind in TRANSPARENT else [node]
        return found


def _seen_from(module: str, other: str) -> str:
    """The other module's name without what both have in common: "k_proj", "k_proj.base"."""
    own, parts = module.split("."), other.split(".")
    common = next((i for i, (a, b) in enumerate(zip(own, parts, strict=False)) if a != b), min(len(own), len(parts)))
    return ".".join(parts[min(common, len(parts) - 1) :])

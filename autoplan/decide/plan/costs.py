"""What a module's split costs at run time, in words: which sums and gathers happen because of it.

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
from autoplan.values import ParameterFact

__all__ = ["Costs"]

_ENTRIES = ("copy", "gather_sum")  # what sums the gradient of a value that enters split regions
_SUMS = ("reduce", "mean", "reduce_scatter", "withhold")
_EXITS = {
    "reduce": "sum of the output (forward)",
    "reduce_scatter": "sum of the output, dealt out along the sequence (forward)",
    "withhold": "sum of the output (forward), shared with the branch that runs after it",
    "gather": "gather of the output (forward)",
}


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
        self.scoped = {call.pattern: call for call in self.runtime.scoped if call.reduce}

    def _copied_boxes(self) -> set[int]:
        """Boxes whose value has its gradient summed, wherever that is attached."""
        sites = {(hook.pattern, hook.side, hook.path) for hook in self.runtime.hooks if hook.action in _ENTRIES}
        tensors: set[int] = set()
        for visit in self.trace.visits:
            for side, borders in (("input", visit.inputs), ("output", visit.outputs)):
                tensors.update(tensor for path, tensor in borders if (visit.module, side, path) in sites)
        boxes: dict[int, int] = self.flow.graph.get("tensors", {})
        return {boxes[tensor] for tensor in tensors if tensor in boxes}

    def of(
        self,
        module: str,
        facts: Iterable[tuple[str, ParameterFact]],
        readings: list[Reading],
        *,
        ends_here: bool = True,
    ) -> tuple[str, ...]:
        """Every cost of one module, forward ones first.

        `ends_here`: the module's output is these parameters' product. (Of experts' two weights only the second's is.)
        """
        found: list[str] = []
        for hook in self.runtime.hooks:
            if ends_here and hook.pattern == module and hook.side == "output":
                found += [_EXITS[hook.action]] if hook.action in _EXITS else []
        for head in self.runtime.heads:
            if head.pattern == module and head.kind == "embedding":
                found.append("sum of the output (forward)")
        if module in self.scoped:
            found.append(f"{self.scoped[module].reduce} inside the module (forward)")
        found += self._sum_further_out(module) if ends_here else []
        found += self._input_gradient(module, readings)
        for name, fact in facts:
            if fact.gradient != "local":
                rows = " on shared rows" if fact.gradient == "shared" else ""
                found.append(f"sum of the gradient of {name.rpartition('.')[2]}{rows} (backward)")
        return tuple(dict.fromkeys(found))

    def _sum_further_out(self, module: str) -> list[str]:
        """A partial sum that travels to a module around this one, where others join it."""
        if module not in self.summing or module in self.scoped:
            return []
        sites = {h.pattern for h in self.runtime.hooks if h.side == "output" and h.action in _SUMS}
        around = [name for name in sites if module == name or is_under(name, module)]
        place = max(around, key=len, default=module)
        if place == module:
            return []
        others = [name for name in self.summing if name != module and is_under(place, name) and name not in sites]
        shared = f", shared with {', '.join(_seen_from(module, other) for other in others)}" if others else ""
        return [f"sum of the output (forward), where {place.rpartition('.')[2]} returns it{shared}"]

    def _input_gradient(self, module: str, readings: list[Reading]) -> list[str]:
        sources = {source for reading in readings for source in self.flow.predecessors(reading.box)} & self.copied
        if not sources:
            return []
        others = dict.fromkeys(
            _seen_from(module, node.module)
            for source in sorted(sources)
            for node in self._readers(source)
            if node.parameters and node.module != module
        )
        shared = f", shared with {', '.join(others)}" if others else ""
        return [f"sum of the input gradient (backward){shared}"]

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

"""Where ranks talk, while it is being found: what is done at modules' boundaries or in calls, what is refused."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from autoplan.analyse.placement.callflow import Crossing
from autoplan.ops.records.answers import Reduction
from autoplan.values import Boundary
from autoplan.values.reasons import NotPlaced

__all__ = ["Placement", "Refusal"]

Kind: TypeAlias = type[Boundary]


@dataclass(frozen=True)
class Refusal:
    """Something that no mechanism can place: the call's index and why, and the tensors whose split is to blame."""

    call: int
    why: NotPlaced
    tensors: tuple[int, ...]


@dataclass
class Placement:
    """All sites by where they sit. Crossings belong to module outputs and inputs; calls to the function mode."""

    outputs: dict[tuple[Crossing, Kind], Boundary] = field(default_factory=dict)  # what is done at modules' outputs
    inputs: dict[tuple[Crossing, Kind], Boundary] = field(default_factory=dict)  # and at their inputs
    summed_parameters: set[int] = field(default_factory=set)
    shared_parameters: set[int] = field(default_factory=set)
    divided_biases: set[int] = field(default_factory=set)
    blocks: set[str] = field(default_factory=set)  # whose branches are summed together
    embeddings: dict[int, Crossing] = field(default_factory=dict)
    inside_reductions: dict[int, Reduction] = field(default_factory=dict)
    inside_copies: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    inside_scales: dict[int, int] = field(default_factory=dict)
    reductions: dict[int, Reduction] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)

    def at_output(self, crossing: Crossing, kind: Kind, **how: Any) -> None:
        """Have this done to what the module returns."""
        self.outputs[crossing, kind] = kind(crossing.module, "output", crossing.path, **how)

    def at_input(self, crossing: Crossing, kind: Kind) -> None:
        """Have this done to what the module takes."""
        self.inputs[crossing, kind] = kind(crossing.module, "input", crossing.path)

    def done_to(self, kind: Kind) -> list[Crossing]:
        """Where this is done to what modules return."""
        return [crossing for crossing, known in self.outputs if known is kind]

"""A plan as styles for torch's own `parallelize_module`.

Splitting is decided for the model as a whole: reductions sit on other modules than the weights they belong to, tied
weights have two homes, integers are edited together. So each module's style only says that the module takes part, and
the last one, for the model itself (key ""), applies the plan: same code, same numbers as `autoplan.parallelize`. A
dictionary from which entries were taken out is refused, because half of a column/row pair is silently wrong.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from autoplan.common.errors import PlanMismatchError
from autoplan.execute.tensor_parallel import apply_plan, tp_mesh_of
from autoplan.values import Entry, Plan

__all__ = ["PlannedModel", "PlannedModule", "to_torch"]


class PlannedModule(ParallelStyle):
    """Says that the module takes part in the plan. `choices` are its entries: pattern and style."""

    def __init__(self, choices: tuple[tuple[str, str], ...], taken: set[str]) -> None:
        super().__init__()
        self.choices, self._taken = choices, taken

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._taken.update(pattern for pattern, _ in self.choices)
        return module

    def __repr__(self) -> str:
        return f"PlannedModule({', '.join(dict.fromkeys(style for _, style in self.choices))})"


class PlannedModel(ParallelStyle):
    """Applies the plan once every planned module has been named."""

    def __init__(self, plan: Plan, taken: set[str], gather_logits: bool | None) -> None:
        super().__init__()
        self.plan, self._taken, self.gather_logits = plan, taken, gather_logits
        self._used = False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self._used:
            raise PlanMismatchError(
                "these style objects were already applied to a model, and styles keep what they met there",
                hint="call plan.to_torch() once per model: it gives fresh objects each time",
            )
        self._used = True
        missing = [e.pattern for e in self.plan.entries if _module_of(e) and e.pattern not in self._taken]
        if missing:
            raise PlanMismatchError(
                f"{len(missing)} of {len(self.plan.entries)} planned modules were not applied, first {missing[0]!r}",
                hint="pass the whole dictionary of plan.to_torch() to parallelize_module",
            )
        self._taken.clear()
        mesh = device_mesh if device_mesh.ndim == 1 and device_mesh.size() == self.plan.ranks else None
        mesh = mesh or tp_mesh_of(device_mesh, self.plan)
        return module if mesh is None else apply_plan(module, mesh, self.plan, gather_logits=self.gather_logits)

    def __repr__(self) -> str:
        return f"PlannedModel({self.plan.model}, tp={self.plan.tp_size})"


def to_torch(plan: Plan, *, gather_logits: bool | None = None) -> dict[str, ParallelStyle]:
    """{pattern: style} for `parallelize_module(model, tp_mesh, …)`, fresh objects each call; the last key is ""."""
    taken: set[str] = set()
    by_module: dict[str, list[Entry]] = {}
    for entry in plan.entries:
        by_module.setdefault(_module_of(entry), []).append(entry)
    styles: dict[str, ParallelStyle] = {
        module: PlannedModule(tuple((entry.pattern, entry.style) for entry in entries), taken)
        for module, entries in by_module.items()
        if module
    }
    styles[""] = PlannedModel(plan, taken, gather_logits)
    return styles


def _module_of(entry: Entry) -> str:
    """torch finds modules only: an entry for a parameter (a stack of experts) is named by the module that holds it."""
    owner, _, name = entry.pattern.rpartition(".")
    return owner if entry.parameters == (name,) else entry.pattern

"""A plan as a Python module: a dict of styles and a function `parallelize(model, mesh)`, to keep under version control.

Where torch's stock styles suffice the module needs torch alone. They do when every split is a column or a row layer
and nothing else is needed: no edited integer, no packed weight, no gradient summed on a whole parameter. Otherwise the
module carries the plan itself and hands it to autoplan: a dict of stock styles would run and be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from autoplan.common.patterns import matches
from autoplan.decide.rulebook.read import exported_as
from autoplan.emit.exports.expressible import HEADS, parts_of
from autoplan.values import Entry, Plan

_STOCK = {
    "colwise": "ColwiseParallel()",
    "rowwise": "RowwiseParallel()",
    "embedding_rowwise": "RowwiseParallel(input_layouts=Replicate())",
}


def needs_autoplan(plan: Plan) -> str:
    """Why stock styles do not suffice, or an empty string."""
    if plan.sequence_parallel:
        return "sequence parallelism is placed on other modules than those that are split"
    if elsewhere := _held_elsewhere(plan):
        return f"{elsewhere} is one parameter with a planned one, and stock styles would part them"
    for part in parts_of(plan):
        for entry in part.entries:
            if entry.style not in _STOCK:
                return f"{entry.pattern} is {entry.style}, which no stock style does"
        if not part.is_plain:
            return str(part.needs[0]) if part.needs else f"{part.container} is more than column and row layers"
    return ""


def _held_elsewhere(plan: Plan) -> str:
    """A parameter that is split and that no entry holds: another name of a tied one."""
    known = {f"{entry.pattern}.{name}" for entry in plan.entries for name in entry.parameters}
    known |= {entry.pattern for entry in plan.entries}
    split = [rule.pattern for rule in plan.runtime.parameters if rule.dim is not None]
    return next((name for name in split if not any(matches(pattern, name) for pattern in known)), "")


def torch_module(plan: Plan) -> str:
    """The text of the module."""
    why = needs_autoplan(plan)
    return _with_autoplan(plan, why) if why else _stock(plan)


def automodel_module(plan: Plan) -> str:
    """The same with the two ways into Automodel and NeMo-RL: a dotted path to `plan`, and `register()`."""
    return torch_module(plan) + _REGISTER.format(model=plan.model)


def _heading(plan: Plan, more: str) -> str:
    return (
        f'"""Tensor-parallel plan of {plan.model} for {plan.tp_size} ranks, written by autoplan.\n\n{more}\n"""\n\n'
        "from __future__ import annotations\n\n"
    )


def _stock(plan: Plan) -> str:
    tied = _tied(plan)
    lines = "\n".join(f'        "{entry.pattern}": {_style(entry)},' for entry in plan.entries)
    again = "".join(
        f'    model.get_submodule("{other}").weight = model.get_submodule("{first}").weight\n' for first, other in tied
    )
    note = (
        "    # parallelize_module makes two parameters of a tied one: both ends share one layout, so tie them again.\n"
    )
    heading = _heading(plan, "It needs torch alone. Every rank must hold the same weights before it is called.")
    return heading + _STOCK_TEXT.format(lines=lines, tp=plan.tp_size, again=(note + again) if again else "")


def _style(entry: Entry) -> str:
    if exported_as(entry.rule) in HEADS:
        return "ColwiseParallel(output_layouts=logits, use_local_output=gather_logits)"
    return _STOCK[entry.style]


def _tied(plan: Plan) -> Iterator[tuple[str, str]]:
    """(table, head) that are one parameter."""
    tables = [entry.pattern for entry in plan.entries if exported_as(entry.rule) == "table"]
    for entry in plan.entries:
        if exported_as(entry.rule) == "tied_head" and tables:
            yield tables[0], entry.pattern


def _with_autoplan(plan: Plan, why: str) -> str:
    text = json.dumps(plan.to_dict(), ensure_ascii=True, indent=1)
    heading = _heading(plan, f"It needs autoplan: {why}.")
    return heading + _PLAN_TEXT.format(text=text.replace("\\", "\\\\"))


_STOCK_TEXT = '''from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module


def plan(gather_logits: bool = False) -> dict[str, ParallelStyle]:
    """Styles by module; fresh objects each call. Logits stay split over the vocabulary unless they are gathered."""
    logits = Replicate() if gather_logits else Shard(-1)
    return {{
{lines}
    }}


def parallelize(model: nn.Module, mesh: DeviceMesh, gather_logits: bool = False) -> nn.Module:
    """Shard `model` in place over a mesh of one dim and return it."""
    if mesh.size() != {tp}:
        raise ValueError(f"this plan is for {tp} ranks, the mesh has {{mesh.size()}}")
    parallelize_module(model, mesh, plan(gather_logits))
{again}    return model
'''

_PLAN_TEXT = '''import json

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from autoplan.decide.written_plans.plan_file import plan_from_dict


def plan(gather_logits: bool = False) -> dict[str, ParallelStyle]:
    """Styles by module; fresh objects each call. Logits stay split over the vocabulary unless they are gathered."""
    return plan_from_dict(json.loads(PLAN)).to_torch(gather_logits=gather_logits)


def parallelize(model: nn.Module, mesh: DeviceMesh, gather_logits: bool = False) -> nn.Module:
    """Shard `model` in place over a mesh of one dim and return it."""
    parallelize_module(model, mesh, plan(gather_logits))
    return model


PLAN = """
{text}
"""
'''

_REGISTER = '''

def register() -> None:
    """Make this the plan that Automodel finds for the class. (Or give it the dotted path of `plan`.)"""
    from nemo_automodel.components.distributed.optimized_tp_plans import PARALLELIZE_FUNCTIONS

    PARALLELIZE_FUNCTIONS["{model}"] = lambda model, sequence_parallel=False: plan()
'''

"""A plan is refused, before anything changes, where code or sizes are not those that it was made for."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.common.code.code_place import forward_code, same_code
from autoplan.common.errors import PlanFileError, PlanMismatchError
from autoplan.decide.written_plans.plan_file import plan_from_dict
from autoplan.execute.tensor_parallel import check_matches
from autoplan.values import CallRewrite, Plan

CODE = """
import torch
from torch import nn

def parted(x):
    return x.view(2, 3, 4, 8)

class Layer(nn.Module):
    def __init__(self, inner=32):
        super().__init__()
        self.up, self.down = nn.Linear(16, inner), nn.Linear(inner, 16)

    def forward(self, x):
        heads = parted(self.up(x)).softmax(-1)
        return self.down(heads.reshape(2, 3, 32))

class Model(nn.Module):
    def __init__(self, inner=32):
        super().__init__()
        self.layer = Layer(inner)

    def forward(self, x):
        return x + self.layer(x)
"""
X = torch.linspace(-1, 1, 2 * 3 * 16).view(2, 3, 16)


def written(folder: Path, name: str, code: str = CODE) -> Any:
    path = folder / f"{name}.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def typed(code: str = CODE) -> dict[str, Any]:
    """Code that is in no file, as at a prompt."""
    space: dict[str, Any] = {"__name__": "typed"}
    exec(compile(code, "<typed>", "exec"), space)
    return space


def planned(model: nn.Module) -> Plan:
    plan = autoplan.plan(model, 2, inputs={"x": X}, prove="none")
    calls = plan.runtime.of(CallRewrite)
    assert calls and not any(call.communicates for call in calls), "only numbers are rewritten"
    return plan


def test_the_same_code_fits(tmp_path: Path) -> None:
    plan = planned(written(tmp_path, "one").Model())
    (forward,) = plan.made_for.forwards
    assert forward.class_name == "Layer" and forward.code.startswith("source:")
    assert {one.library for one in plan.made_for.versions} == {"autoplan", "torch", "transformers"}
    check_matches(written(tmp_path, "other").Model(), plan)


EDITS = {
    "the forward": ("parted(self.up(x)).softmax(-1)", "parted(self.up(x) * 2).softmax(-1)"),
    "a function on the way": ("    return x.view(2, 3, 4, 8)", "    return  x.view(2, 3, 4, 8)"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_code_is_refused_and_nothing_changes(tmp_path: Path, edit: str) -> None:
    plan = planned(written(tmp_path, "one").Model())
    models = [written(tmp_path, "other", CODE.replace(*EDITS[edit])).Model() for _ in range(2)]
    before = {name: tensor.clone() for name, tensor in models[0].state_dict().items()}

    def rank(number: int) -> str:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(PlanMismatchError) as caught:
            autoplan.parallelize(models[number], mesh, plan)
        return str(caught.value)

    for message in run_ranks(rank, 2):
        assert "the code of Layer.forward has changed" in message and "torch 2" in message
        assert "autoplan plan MODEL --tp 2 -o FILE" in message
    after = models[0].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before) and not models[0].layer._forward_hooks


def test_other_sizes_are_refused(tmp_path: Path) -> None:
    module = written(tmp_path, "one")
    plan = planned(module.Model())
    with pytest.raises(PlanMismatchError, match=r"layer.*\[64.*planned with \[32"):
        check_matches(module.Model(inner=64), plan)


def test_wrappers_are_looked_through(tmp_path: Path) -> None:
    """Decorated forwards, and classes that somebody derived to wrap them, as FSDP2 does."""
    module = written(tmp_path, "one")
    plan, model = planned(module.Model()), module.Model()
    forward = module.Layer.forward
    module.Layer.forward = functools.wraps(forward)(lambda self, x: forward(self, x))
    check_matches(model, plan)
    model.layer.__class__ = type("Wrapped", (module.Layer,), {})
    check_matches(model, plan)


def test_code_without_source_is_known_by_what_was_compiled() -> None:
    plan = planned(typed()["Model"]())
    assert plan.made_for.forwards[0].code.startswith("compiled:")
    check_matches(typed()["Model"](), plan)
    edited = typed(CODE.replace(*EDITS["the forward"]))["Model"]()
    with pytest.raises(PlanMismatchError, match="has changed"):
        check_matches(edited, plan)


def test_hashes_that_cannot_be_compared_pass() -> None:
    assert same_code("source:1", "compiled:2") and same_code("source:1", "") and not same_code("source:1", "source:2")
    assert forward_code(type("NoForward", (), {}), ["forward:1:2"]) == ""


BROKEN = {
    "pattern": (("parameters", 0, "pattern"), "layer..up", "not a dotted path"),
    "layout and size": (("parameters", 0, "layout"), "30!", "is for 30 rows"),
    "groups of ranks": (("parameters", 0, "layout"), "2!2@3*16", "groups of ranks"),
    "numbers": (("instructions", -1, "arguments"), [{"path": [0], "passed": [1], "wanted": [1]}], "for 1 ranks, not 2"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, case: str) -> None:
    data = planned(written(tmp_path, "one").Model()).to_dict()
    (field, number, key), value, words = BROKEN[case]
    data["runtime"][field][number][key] = value
    with pytest.raises(PlanFileError, match=words):
        plan_from_dict(data)

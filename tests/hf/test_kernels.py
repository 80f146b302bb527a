"""Optional kernels: the plan is made and proven on the reference, whether they are installed or not, and says so."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.integrations import hub_kernels

import autoplan
from autoplan.check.ranks.common import RankError
from autoplan.check.ranks.run import run_ranks
from autoplan.execute.fits import model_hash
from autoplan.execute.hooks.function_mode import guard_kernels

WIDTH = 16
decorated = getattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", None)
pytestmark = pytest.mark.skipif(decorated is None, reason="this transformers has no kernels with a fallback")


@contextmanager
def package(name: str, **functions: Callable[..., Any]) -> Iterator[None]:
    """A library with these functions, as long as the model's code is imported."""
    module = ModuleType(name)
    vars(module).update(functions)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]


def gpu_scan(x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a kernel for GPUs was called on a CPU")


def reference(x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(x * rate.sigmoid(), dim=1)


if decorated is not None:
    with package("installed_kernels", scan=gpu_scan):
        scan = decorated("scan", "installed_kernels")(reference)
    missing_scan = decorated("scan", "missing_kernels")(reference)
try:
    from missing_library import fused_norm  # type: ignore[import-not-found]
except ImportError:
    fused_norm = None


class Scanned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.near, self.rate, self.far = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = scan(self.near(x), self.rate(x))
        return x + self.far(missing_scan(hidden, hidden))


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 5, WIDTH, dtype=torch.float64)}


def test_the_kernel_would_not_run_here(inputs: dict[str, torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="a kernel for GPUs"):
        Scanned().double()(**inputs)


def test_the_reference_is_planned_and_proven(inputs: dict[str, torch.Tensor]) -> None:
    model = Scanned().double()
    plan = autoplan.plan(model, 2, inputs=inputs)
    assert {entry.style for entry in plan.entries} == {"colwise", "rowwise"} and plan.proof.ok
    report = autoplan.verify(model, plan, inputs=inputs)
    assert report.ok, report.findings
    with pytest.raises(RuntimeError, match="a kernel for GPUs"):  # the kernel is back
        model(**inputs)


def test_the_plan_says_whose_reference_was_read(inputs: dict[str, torch.Tensor]) -> None:
    plan = autoplan.plan(Scanned().double(), 2, inputs=inputs)
    (note,) = [finding.message for finding in plan.findings if "kernels" in finding.message]
    assert "missing_kernels (scan)" in note and "installed_kernels (scan)" in note
    assert "missing_library (fused_norm)" in note


def project(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Only a kernel does the layer's work itself."""


def fused_project(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(hidden, weight, bias)


if decorated is not None:
    with package("fused_kernels", project=fused_project):
        project = decorated("project", "fused_kernels")(project)
try:
    with package("fused_library", imported_project=fused_project):
        from fused_library import imported_project  # type: ignore[import-not-found]
except ImportError:
    imported_project = None


class Fused(nn.Module):
    """Where it is fast a kernel takes the weight of the last layer, which is then not called; no plan sees it."""

    def __init__(self, imported: bool) -> None:
        super().__init__()
        self.near, self.far, self.imported = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), imported
        self.fast = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.near(x))
        if self.fast:
            kernel = imported_project if self.imported else project
            done = kernel(hidden, self.far.weight, self.far.bias)
            if done is not None:
                return x + done
        return x + self.far(hidden)


def run_fast(rank: int, model: nn.Module, plan: autoplan.Plan, x: torch.Tensor) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = autoplan.parallelize(copy.deepcopy(model), mesh, plan)
    sharded.fast = True
    return sharded(x).detach()


def test_a_kernel_that_takes_the_weight_of_a_planned_layer_gives_way(inputs: dict[str, torch.Tensor]) -> None:
    model = Fused(imported=False).double()
    plan = autoplan.plan(model, 2, inputs=inputs)
    assert {entry.style for entry in plan.entries} == {"colwise", "rowwise"}
    want = model(**inputs)
    for got in run_ranks(partial(run_fast, model=model, plan=plan, x=inputs["x"]), 2):
        torch.testing.assert_close(got, want)


def test_without_a_reference_it_is_refused(inputs: dict[str, torch.Tensor]) -> None:
    model = Fused(imported=True).double()
    plan = autoplan.plan(model.eval(), 2, inputs=inputs)
    with pytest.raises(RankError, match="takes a weight of Linear and would skip its sums over ranks"):
        run_ranks(partial(run_fast, model=model, plan=plan, x=inputs["x"]), 2)


def test_the_guards_of_an_earlier_model_do_not_change_what_a_plan_was_made_for() -> None:
    model, undo = Fused(imported=False), list[Callable[[], None]]()
    alone = model_hash(model)
    guard_kernels(model, [model.far], undo)
    assert getattr(project, "__wrapped__", None) is not None and model_hash(model) == alone
    for one in undo:
        one()
    assert model_hash(model) == alone


def test_an_undone_plan_takes_its_guards_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "autoplan.execute.hooks.function_mode.record_of", lambda module: module
    )  # as if it were sharded
    far = Fused(imported=False).double().far
    model = nn.ModuleList([Fused(imported=False), far])
    undo: list[Callable[[], None]] = []
    guard_kernels(model, [far], undo)
    hidden = torch.randn(3, 4 * WIDTH, dtype=torch.float64)
    assert project(hidden, far.weight, far.bias) is None  # the reference
    assert project(hidden, far.weight.clone(), far.bias.clone()) is not None  # what belongs to nobody: the kernel
    for one in undo:
        one()
    assert project(hidden, far.weight, far.bias) is not None

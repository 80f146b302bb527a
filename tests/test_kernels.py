"""Optional kernels: the plan is made and proven on the reference, whether they are installed or not, and says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers.integrations import hub_kernels

import autoplan

WIDTH = 16
decorated = getattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", None)
pytestmark = pytest.mark.skipif(decorated is None, reason="this transformers has no kernels with a fallback")


@contextmanager
def package(name: str) -> Iterator[None]:
    """A library whose kernel runs on a GPU only, as long as the model's code is imported."""

    def scan(x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a kernel for GPUs was called on a CPU")

    module = ModuleType(name)
    module.scan = scan  # type: ignore[attr-defined]
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]


def reference(x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(x * rate.sigmoid(), dim=1)


if decorated is not None:
    with package("installed_kernels"):
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

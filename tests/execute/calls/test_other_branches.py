"""A plan knows the branch that was recorded: a run that takes another one is refused, whatever its calls would need.

The hash of the code is the same for all branches, so it is the run that must notice.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from other_calls import Optional, Raised, TwoStreams
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.common import RankError
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import PlanMismatchError
from autoplan.execute.collectives import RankGroup
from autoplan.execute.hooks.unseen import watch_unrecorded
from autoplan.values import Constant, Plan, RewriteCall, Runtime, Side

X = torch.linspace(-1, 1, 2 * 6 * 16, dtype=torch.float64).view(2, 6, 16)


class TwoWays(nn.Module):
    """One branch has numbers that a rank must change; the other reads across what is split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.usual = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x)
        inner = inner.view(2, 6, 8, 4).tanh().flatten(-2) if self.usual else inner.softmax(-1)
        return x + self.down(inner)


def planned() -> tuple[TwoWays, Plan]:
    torch.manual_seed(0)
    model = TwoWays().double().eval()
    return model, autoplan.plan(model, 2, inputs={"x": X})


def sharded_run(model: nn.Module, plan: Plan, usual: bool) -> torch.Tensor:
    def rank(_: int) -> torch.Tensor:
        own = copy.deepcopy(model)
        autoplan.parallelize(own, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
        own.usual = usual
        with torch.no_grad():
            return own(X)

    return run_ranks(rank, 2)[0]


def test_the_branch_that_was_planned_runs() -> None:
    model, plan = planned()
    (call,) = plan.runtime.of(RewriteCall)
    assert call.arguments and not call.communicates, "numbers alone"
    torch.testing.assert_close(sharded_run(model, plan, usual=True), model(X).detach())


def test_another_branch_is_refused_where_only_numbers_are_rewritten() -> None:
    model, plan = planned()
    with pytest.raises(RankError, match="PlanMismatchError: .*view at .* was not reached"):
        sharded_run(model, plan, usual=False)


@pytest.mark.parametrize("what", ["a norm", "a reader more", "random numbers"])
def test_an_argument_that_nobody_saw_may_bring_in(what: str) -> None:
    torch.manual_seed(0)
    model = Optional(what).eval()
    plan = autoplan.plan(model, 2, inputs={"x": X.float()})
    report = autoplan.verify(model, plan, inputs={"x": X.float(), "context": torch.ones(1)})
    assert report.ok, report.findings


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 32), nn.Linear(32, 1)

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(places).tanh())


@pytest.mark.parametrize("asked", [False, True])
def test_a_gradient_of_an_input_is_summed_also_if_nobody_asked_for_it(asked: bool) -> None:
    torch.manual_seed(0)
    model, places = Energy().eval(), torch.randn(4, 6)
    asking = {"places": places.clone().requires_grad_()}
    plan = autoplan.plan(model, 2, inputs=asking if asked else {"places": places})
    assert plan.runtime.unsummed == () and (plan.runtime.constants == ()) == asked
    report = autoplan.verify(model, plan, inputs=asking)
    assert report.ok, report.findings
    report = autoplan.verify(model, plan, inputs={"places": places})
    assert report.ok and "inputs" in report.details["checked"], report.findings
    if not asked:
        nothing_sums = replace(plan, runtime=replace(plan.runtime, constants=()))
        report = autoplan.verify(model, nothing_sums, inputs={"places": places})
        assert {found.check for found in report.findings if found.level == "error"} == {"inputs"}, report.findings


def test_a_gradient_of_an_input_that_nothing_sums_is_refused() -> None:
    torch.manual_seed(0)
    model, places = Energy().eval(), torch.randn(4, 6)
    plan = autoplan.plan(model, 2, inputs={"places": places})
    plan = replace(plan, runtime=replace(plan.runtime, unsummed=("places",), constants=()))
    report = autoplan.verify(model, plan, inputs={"places": places.clone().requires_grad_()})
    (refused,) = {found.message for found in report.findings if found.check == "forward"}
    assert "'places' requires grad" in refused


@pytest.mark.parametrize("constant", ["zeros", "new_zeros", "read inside"])
def test_a_constant_that_is_none_in_another_call(constant: str) -> None:
    torch.manual_seed(0)
    model, x = TwoStreams(constant).eval(), X.float()
    plan = autoplan.plan(model, 2, inputs={"x": x})
    inside = [one for one in plan.runtime.constants if (one.pattern, one.path) != ("", ("x",))]  # x is an argument
    assert all(one.sums for one in plan.runtime.constants) and bool(inside) == (constant == "zeros")
    for filled in (False, True):
        report = autoplan.verify(model, plan, inputs={"x": x, "filled": filled})
        assert report.ok, report.findings


def test_a_rate_that_is_raised_later_draws_alike_on_all_ranks() -> None:
    torch.manual_seed(0)
    model, x = Raised().eval(), X.float()
    plan = autoplan.plan(model, 2, inputs={"x": x})
    report = autoplan.verify(model, plan, inputs={"x": x})  # which raises it
    assert report.ok and "dropout" in report.details["checked"], report.findings


@pytest.mark.parametrize("side", ["input", "output"])
def test_a_constant_that_nothing_sums_is_refused_where_it_has_a_gradient(side: Side) -> None:
    """So it is where the stream is cut along the sequence, or where sums would be placed elsewhere."""
    up, path = nn.Linear(4, 4).requires_grad_(False), ("input",) if side == "input" else ()
    seen = Runtime(constants=(Constant("up", side, path, sums=False),))
    (handle,) = watch_unrecorded({"up": up, "down": up}, seen, RankGroup("none", size=2, rank=0))
    x = torch.ones(2, 4)
    assert torch.equal(up(x), up(x.clone()))
    with pytest.raises(PlanMismatchError, match=f"the {'input of up at' if path else 'output of up has'}"):
        up(x.requires_grad_())
    with torch.no_grad():
        up(x)
    handle.remove()
    assert up(x).requires_grad


class Kernels(nn.Module):
    """Takes masks of kinds that no plan knows, as kernels do."""

    def forward(self, x: torch.Tensor, masks: Any = None) -> torch.Tensor:
        return x * masks["full"][0] if isinstance(masks, dict) else x


def test_what_stands_in_a_constants_place_may_be_something_else() -> None:
    module, x = Kernels(), torch.ones(2, requires_grad=True)
    seen = Runtime(constants=(Constant("one", "input", ("masks", "full", 0), sums=False),))
    list(watch_unrecorded({"one": module}, seen, RankGroup("none", size=2, rank=0)))
    for masks in (None, object(), [x], x, 5):
        assert module(x, masks) is x
    with pytest.raises(PlanMismatchError, match=r"input of one at \['masks'\]\['full'\]\[0\]"):
        module(x, {"full": [x]})


@dataclass
class Said:
    logits: torch.Tensor
    mask: torch.Tensor | None = None


class Speaking(nn.Module):
    """Logits in a record. What nobody saw may be a target, so logits know what they are until they leave."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(40, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 40, bias=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Said:
        x = self.table(ids)
        x = x + self.down(self.up(x).relu())
        return Said(self.head(x if mask is None else x * mask[..., None]), mask)


def test_logits_leave_in_a_record_whatever_else_was_given() -> None:
    torch.manual_seed(0)
    model, ids = Speaking().eval(), torch.randint(40, (2, 6))
    plan = autoplan.plan(model, 2, inputs={"ids": ids})
    report = autoplan.verify(model, plan, inputs={"ids": ids, "mask": torch.ones(2, 6)})
    assert report.ok, report.findings

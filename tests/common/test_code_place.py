"""A call is found again by its place in the code, whatever else the module does on that run."""

from __future__ import annotations

from typing import Any

import torch
from small_models import give_random_values
from torch import nn
from torch.overrides import TorchFunctionMode

from autoplan.api import plan
from autoplan.check.verify.on_ranks import sharding_of
from autoplan.check.verify.sharded import check_sharding
from autoplan.common.code.code_place import code_place
from autoplan.values import CallRewrite


class Places(TorchFunctionMode):
    """Writes down where each torch call stands."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func.__name__, code_place()))
        return func(*args, **(kwargs or {}))


def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, 2)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor, rounds: int = 1, extra: bool = False) -> torch.Tensor:
        if extra:
            x = torch.add(x, 1)
        for _ in range(rounds):
            x = torch.neg(x)
        return twice(twice(x))


def places(**how: Any) -> list[tuple[str, str]]:
    module, x = Branching(), torch.ones(2)
    with Places() as mode:
        module(x, **how)
    return mode.seen


def test_a_place_is_the_way_through_the_code() -> None:
    assert places() == [
        ("neg", "forward:4:16-28"),
        ("mul", "forward:5:21-29>twice:1:11-26"),  # two calls on one line are two places
        ("mul", "forward:5:15-30>twice:1:11-26"),
    ]


def test_other_branches_and_rounds_move_no_place() -> None:
    assert places(extra=True)[1:] == places()
    assert places(rounds=3) == places()[:1] * 3 + places()[1:]


class Experts(nn.Module):
    """Runs the experts that were hit, each by itself; a row that was sent to none of them passes as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.up = nn.Parameter(torch.zeros(3, 32, 16))
        self.down = nn.Parameter(torch.zeros(3, 16, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows = torch.nonzero(chosen == expert)[:, 0]
            mine = x[rows]
            if expert < 3:
                hidden = nn.functional.linear(mine, self.up[expert]).relu()
                mine = nn.functional.linear(hidden, self.down[expert])
            result = result.index_add(0, rows, mine * weight[rows, None])
        return x + result


def test_experts_are_exact_whichever_are_hit() -> None:
    """The plan is made on rows of which some experts get none; then all of them do, and the pass-through too."""
    model = give_random_values(Experts()).double()
    with torch.no_grad():
        model.router.bias.zero_()
    many = torch.randn(40, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hit = model.router(many).argmax(-1)
    assert hit.unique().numel() == 4
    few = many[(hit == 0) | (hit == 1)]
    made = plan(model, 2, inputs={"x": few}, prove="none")
    assert {call.site.function for call in made.runtime.of(CallRewrite)} >= {"linear"}
    report = check_sharding(model, {"forward": {"x": many}}, sharding_of(made), 2, checks=["forward"])
    assert report.ok and set(report.gradients) == {"router.weight", "router.bias", "up", "down"}, report.findings


def test_a_planned_sum_that_is_left_out_is_an_error() -> None:
    """Another branch would need its sums elsewhere, and nobody would see that they are missing."""
    model = give_random_values(TwoWays()).double()
    x = torch.randn(3, 16, dtype=torch.float64)
    made = plan(model, 2, inputs={"x": x}, prove="none")
    assert any(call.reduces for call in made.runtime.of(CallRewrite))
    one, other = {"x": x}, {"x": x, "other": True}
    assert check_sharding(model, {"forward": one}, sharding_of(made), 2, checks=["forward"]).ok
    (finding,) = check_sharding(model, {"forward": other}, sharding_of(made), 2, checks=["forward"]).findings
    assert "was not reached" in finding.message


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(32, 16))
        self.down = nn.Parameter(torch.empty(16, 32))

    def forward(self, x: torch.Tensor, other: bool = False) -> torch.Tensor:
        hidden = nn.functional.linear(x, self.up).relu()
        if other:
            return x + nn.functional.linear(hidden, self.down).tanh()
        return x + nn.functional.linear(hidden, self.down).tanh()

"""Ranks that hold different plans are told so, all of them, before the model changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from interrupted_models import plan_for
from interrupts import fake_world
from mesh_toys import deep, mesh_of

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import PlanMismatchError
from autoplan.execute import agreement
from autoplan.execute.agreement import Voters, fail_together, meet, same_model, same_plan
from autoplan.values import Plan


def other(plan: Plan) -> Plan:
    """The same, without the last instruction."""
    runtime = replace(plan.runtime, instructions=plan.runtime.instructions[:-1])
    return replace(plan, runtime=runtime)


@pytest.mark.parametrize("odd", range(4))
def test_every_rank_of_a_2x2_mesh_is_told(odd: int) -> None:
    plan = plan_for("toy")

    def rank_body(rank: int) -> str:
        model = deep(depth=1)
        with pytest.raises(PlanMismatchError) as error:
            mine = other(plan) if rank == odd else plan
            autoplan.parallelize(model, mesh_of(dp=2, tp=2), mine, check=False)
        assert autoplan.applied(model) is None
        return str(error.value)

    for message in run_ranks(rank_body, 4):
        assert "different plans" in message and "autoplan.load_plan" in message


def test_other_options_are_told_too() -> None:
    def rank_body(rank: int) -> None:
        with pytest.raises(PlanMismatchError, match="different plans or options"):
            autoplan.parallelize(deep(depth=1), mesh_of(tp=2), plan_for("toy"), gather_logits=rank == 1)

    run_ranks(rank_body, 2)


def test_the_same_plan_made_on_each_rank_passes() -> None:
    def rank_body(rank: int) -> None:
        model = autoplan.parallelize(deep(depth=1), mesh_of(tp=2), replace(plan_for("toy"), findings=()))
        assert autoplan.applied(model) is not None

    run_ranks(rank_body, 2)


def count_exchanges(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> int:
    made: list[torch.Tensor] = []
    gather = agreement.all_gather_rows
    monkeypatch.setattr(agreement, "all_gather_rows", lambda *given: (made.append(given[0]), gather(*given))[1])
    act()
    assert all(one.nbytes <= 32 for one in made)
    return len(made)


@pytest.mark.parametrize(("sizes", "exchanges"), [({"tp": 2}, 1), ({"dp": 2, "tp": 2}, 2), ({"dp": 4, "tp": 1}, 1)])
def test_one_small_exchange_a_mesh_dim(sizes: dict[str, int], exchanges: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each `meet` and at the end of a block; over a process group whose other ranks are made up, too."""
    from autoplan.common.options import TensorParallel

    def act() -> None:
        with fail_together(Voters.of(*meshes), "this"):
            meet(same_model(model), same_plan(plan_for("toy"), TensorParallel()))

    with fake_world(sizes.get("dp", 1) * sizes["tp"]):
        mesh, model = mesh_of(**sizes), deep(depth=1)
        meshes = [mesh[name] for name in sizes]
        assert count_exchanges(monkeypatch, act) == 2 * exchanges


def test_one_rank_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(1):
        mesh = mesh_of(tp=1)
        found = count_exchanges(monkeypatch, lambda: autoplan.parallelize(deep(depth=1), mesh, Plan("toy", 1)) and None)
    assert found == 0

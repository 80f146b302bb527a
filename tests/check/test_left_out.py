"""Each class of instruction, left out of a plan that needs it, is noticed by verify; or it is said why it cannot be."""

from __future__ import annotations

import pytest
from instruction_toys import TOYS, subject, toy_for
from planted_faults import LEFT_OUT, UNSEEN, Fault, first, plant, without

from autoplan.check.verify.on_ranks import mesh_of, sharding_of
from autoplan.check.verify.sharded import check_sharding
from autoplan.values import INSTRUCTIONS, Instruction


@pytest.mark.parametrize("name", TOYS)
def test_right_plans_are_clean(name: str) -> None:
    model, feeds, plan = subject(name)
    how = {"checks": ("parameters", "forward", "dropout"), "dims": mesh_of(plan)}
    report = check_sharding(model, feeds, sharding_of(plan), 2, **how)
    assert report.ok, report.findings[:3]


@pytest.mark.parametrize("fault", LEFT_OUT, ids=lambda fault: fault.kind.__name__)
def test_what_is_left_out_is_noticed(fault: Fault) -> None:
    found = toy_for(lambda plan: fault.spoil(plan) is not None)
    assert found is not None, f"no toy has {fault.kind.__name__}: add one to helpers/instruction_toys.py"
    model, feeds, plan = found
    planted = plant(fault, plan, sharding_of)
    report = check_sharding(model, feeds, planted.sharding, 2, checks=fault.checks, dims=mesh_of(plan))
    assert not report.ok, f"{fault.name} went unnoticed"


@pytest.mark.parametrize("kind", UNSEEN, ids=lambda kind: kind.__name__)
def test_what_cannot_be_noticed_is_so(kind: type[Instruction]) -> None:
    """Else it belongs to those that are."""
    fault = Fault(f"no {kind.__name__}", "", first(kind, without), checks=("parameters", "forward", "dropout"))
    model, feeds, plan = toy_for(lambda plan: fault.spoil(plan) is not None)
    planted = plant(fault, plan, sharding_of)
    assert check_sharding(model, feeds, planted.sharding, 2, checks=fault.checks, dims=mesh_of(plan)).ok


def test_each_class_has_a_fault_or_a_reason() -> None:
    assert {fault.kind for fault in LEFT_OUT} | UNSEEN.keys() == set(INSTRUCTIONS.values())
    assert all(UNSEEN.values())

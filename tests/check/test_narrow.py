"""Cuts that are wrong are found by halves and kept whole; a plan that stays wrong is not applied."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autoplan
from autoplan.check.audit.gate import refuse_disproven
from autoplan.check.verify.on_ranks import cut_together, wrong_cuts
from autoplan.common.errors import PlanRefusedError
from autoplan.values import Finding

MODULES = [(name,) for name in "abcdefghijklmnop"]
NAMES = st.sampled_from([name for (name,) in MODULES])


@given(st.sets(NAMES, min_size=1))
def test_cuts_that_are_wrong_each_by_itself(wrong: set[str]) -> None:
    found = wrong_cuts(MODULES, lambda cut: not wrong.isdisjoint(cut), trials=100)
    assert set(found) == wrong


@given(st.sets(NAMES, min_size=2, max_size=2), st.integers(0, 12))
def test_the_rest_is_always_right(pair: set[str], trials: int) -> None:
    """Wrong together only, and few trials: more may stay whole, never less than is needed."""
    found = wrong_cuts(MODULES, lambda cut: pair <= set(cut), trials)
    assert not pair.isdisjoint(found)


def test_few_trials_for_one_wrong_cut() -> None:
    asked: list[tuple[str, ...]] = []
    assert wrong_cuts(MODULES, lambda cut: asked.append(cut) or "k" in cut, trials=100) == ("k",)
    assert len(asked) <= 8


def test_what_shares_a_cut_is_one_suspect() -> None:
    axes = ({"a", "c"}, {"b"}, {"d", "e"})
    groups = cut_together("abcde", lambda whole: set().union(*(axis for axis in axes if whole not in axis)))
    assert groups == [("a", "c"), ("b",), ("d", "e")]


def test_a_plan_found_wrong_is_not_applied() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    plan = autoplan.plan(model, 2, inputs={"input": torch.randn(2, 8)})
    wrong = replace(plan, findings=(Finding("proof", "error", "0", "on simulated ranks it differs"),))
    refuse_disproven(plan)
    with pytest.raises(PlanRefusedError, match="failed verification when it was made.*\n.*it differs"):
        refuse_disproven(wrong)

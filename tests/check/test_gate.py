"""A foreign plan is audited before `parallelize` applies it: a wrong one is refused, and nothing is touched."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus.toys import GOOD, Attention, decoder, torch_styles
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoplan
from autoplan.check.audit.gate import refuse_disproven, refuse_wrong
from autoplan.check.ranks.run import run_processes
from autoplan.check.verify.on_ranks import cut_together, wrong_cuts
from autoplan.common.errors import AutoplanError, PlanRefusedError
from autoplan.hf.source import resolve
from autoplan.values import Finding

torch.set_num_threads(1)
UNSUMMED = GOOD  # right for the plain decoder, and silently wrong where queries and keys have norms of their own
HALF = {key: style for key, style in GOOD.items() if not key.endswith("o_proj")}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return decoder(partial(Attention, norm="head")) if kind == "norms" else decoder()


def parallelized(rank: int, kind: str, plan: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What a rank sees: the error or none, what was split, whether the model is as it was, how far logits are off."""
    model, plain = model_of(kind), model_of(kind)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    said = ""
    try:
        autoplan.parallelize(model, mesh, plan, gather_logits=True, **options)
    except AutoplanError as error:
        said = f"{type(error).__name__}: {error}"
    ids = torch.arange(12).reshape(2, 6)
    whole = dict(plain.named_parameters())
    untouched = all(type(p) is nn.Parameter and torch.equal(p, whole[n]) for n, p in model.named_parameters())
    untouched &= not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    difference = _first(model(ids)) - _first(plain(ids))
    return {
        "said": said,
        "split": sorted(n for n, p in model.named_parameters() if isinstance(p, DTensor)),
        "untouched": untouched and autoplan.applied(model) is None,
        "error": difference.abs().max().item(),
    }


def all_parallelized(rank: int, cases: list[tuple[str, Any, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [parallelized(rank, *case) for case in cases]


def _first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else next(iter(output.values()))


@pytest.mark.slow
@pytest.mark.gloo
def test_a_foreign_dict_is_audited_first() -> None:
    cases = [("norms", UNSUMMED, {}), ("norms", UNSUMMED, {"check": False}), ("plain", GOOD, {})]
    (refused, *applied), _ = run_processes(all_parallelized, (cases,), 2)
    assert refused["said"].startswith("PlanRefusedError") and "check=False" in refused["said"]
    assert "q_norm" in refused["said"] and "nothing was applied" in refused["said"]
    assert refused["untouched"]
    for done in applied:
        assert not done["said"] and done["error"] < 1e-5
        assert any(name.endswith("q_proj.weight") for name in done["split"])


def test_only_wrong_plans_are_refused(tmp_path: Path) -> None:
    source = resolve(model_of("norms"))
    for plan in (UNSUMMED, torch_styles(UNSUMMED)(None)):
        with pytest.raises(PlanRefusedError, match=r"(?s)gradients: .*_norm.*off by.*check=False"):
            refuse_wrong(source, plan, 2)
    file = tmp_path / "plan.yaml"
    file.write_text("\n".join(f"{key!r}: {style}" for key, style in HALF.items()))
    plain = resolve(model_of("plain"))
    with pytest.raises(PlanRefusedError, match="pairing"):
        refuse_wrong(plain, file, 2)
    assert all(finding.level == "warn" for finding in refuse_wrong(plain, "corpus.toys:GOOD", 2))


def test_plans_of_ours_are_not_foreign(tmp_path: Path) -> None:
    source = resolve(model_of("norms"))
    plan = autoplan.plan(model_of("norms"), 2, prove="none")
    plan.save(tmp_path / "ours.yaml")
    for ours in (plan, str(tmp_path / "ours.yaml"), "auto", "inferred"):
        assert refuse_wrong(source, ours, 2) == ()


def test_what_cannot_be_read_is_said_before_anything_is_tried() -> None:
    for plan, said in (("nowhere.PLAN", "no module named 'nowhere'"), ({"embed": "oddwise"}, "oddwise")):
        with pytest.raises(AutoplanError, match=said):
            refuse_wrong(resolve(model_of("plain")), plan, 2)


# Cuts that are wrong are found by halves and kept whole; a plan that stays wrong is not applied.


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

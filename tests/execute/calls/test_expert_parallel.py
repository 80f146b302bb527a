"""Whole experts over ranks: which modules allow it, what a rank computes, and that it is exact wherever it is said."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from experts_toys import Adding, Sorted, Stacked, with_listed, with_stacks
from safetensors.torch import save_file
from slow_cases import marked, slow_but
from test_experts import TYPES, computing_with, implementations
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.check.verify.clone import Clone, clone_of
from autoplan.check.verify.verify import verify_clone
from autoplan.cli.app import main
from autoplan.common.errors import AutoplanError, IndivisibleError, PlanFileError, PlanMismatchError
from autoplan.common.options import Wish
from autoplan.emit.exports.expressible import ExportError
from autoplan.execute.collectives import RankGroup
from autoplan.execute.hooks.boundaries import ExpertsOfARank
from autoplan.hf.source import resolve
from autoplan.planning import draft_plan
from autoplan.values import Capabilities, IntegerEdit, LocalExperts, Plan

torch.set_num_threads(1)
CHECKS = ("parameters", "forward", "second_shape")


@cache
def planned(model_type: str, tp_size: int = 2, ep_size: int = 2) -> tuple[Clone, Plan]:
    clone = clone_of(resolve(model_type))
    return clone, draft_plan(resolve(clone.model, inputs=clone.feeds), Wish(tp_size, ep_size)).plan


def expert_weights(plan: Plan) -> dict[str, tuple[int | None, str | None]]:
    owners = {site.pattern for site in plan.runtime.of(LocalExperts)}
    rules = plan.runtime.parameters
    return {rule.pattern: (rule.dim, rule.layout) for rule in rules if rule.pattern.rpartition(".")[0] in owners}


# ------------------------------------------------------------------------------------------------ exact


@pytest.mark.parametrize(("model_type", "implementation"), implementations((*TYPES, "qwen3_moe")))
def test_exact_in_every_implementation(model_type: str, implementation: str) -> None:
    clone, plan = planned(model_type)
    report = verify_clone(computing_with(clone, implementation), plan, checks=CHECKS)
    assert report.ok, report.findings
    cut = expert_weights(plan)
    assert cut and set(cut.values()) == {(0, "12!")}, "every weight of an experts' module is cut by expert"
    assert {f"{site.pattern}.gate_up_proj" for site in plan.runtime.of(LocalExperts)} <= cut.keys()
    assert all(entry.style == "expert_parallel" for entry in plan.entries if entry.role == "experts")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", slow_but(["mixtral", "gpt_oss", "deepseek_v3", "llama4_text"], "deepseek_v3"))
def test_exact_on_four_ranks_that_are_processes(model_type: str) -> None:
    clone, plan = planned(model_type, 4, 4)
    report = verify_clone(clone, plan, engine="gloo", checks=(*CHECKS, "loss", "state_dict"))
    assert report.ok and report.tp_size == 4, report.findings


@pytest.mark.slow
def test_all_checks_hold() -> None:
    """Decoding from a cache, the loss, dropout, the checkpoint and the optimizer too."""
    clone, plan = planned("mixtral")
    report = verify_clone(clone, plan)
    assert report.ok and not report.details["not_checked"].get("cache"), report.findings


def test_ranks_that_hold_experts_and_nothing_else() -> None:
    clone, plan = planned("mixtral", 1, 4)
    assert (plan.tp_size, plan.ep_size, plan.ranks) == (1, 4, 4)
    assert {entry.role for entry in plan.entries if entry.style != "replicated_with_grad_allreduce"} == {"experts"}
    report = verify_clone(clone, plan, checks=CHECKS)
    assert report.ok, report.findings
    blocks = len(next(stack for stack in plan.layers).fqns)
    assert sum(report.details["collectives"]["forward"].values()) == blocks, "one sum for each block's experts"


@pytest.mark.parametrize("model_type", slow_but(["mixtral", "deepseek_v3", "gpt_oss", "llama4_text"], "mixtral"))
def test_under_sequence_parallel(model_type: str) -> None:
    clone = clone_of(resolve(model_type))
    source = resolve(clone.model, inputs=clone.feeds)
    plan = draft_plan(source, Wish(2, 2), capabilities=Capabilities(True, True)).plan
    assert plan.sequence_parallel and plan.runtime.of(LocalExperts)
    report = verify_clone(clone, plan, checks=CHECKS)
    assert report.ok, report.findings


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=2,ep=2"])
def test_training_on_a_mesh(mesh: str) -> None:
    clone, _ = planned("mixtral")
    report = autoplan.verify(clone.model, mesh=mesh, ep_size=2, inputs=clone.feeds, checks=["parameters", "forward"])
    assert report.ok, report.findings
    assert "training with checkpointing" in report.details["checked"]


# ------------------------------------------------------------------------------------------------ by structure alone


@pytest.mark.parametrize("experts", marked([Stacked, Sorted], long=[Stacked]))
def test_a_model_of_nobodys(experts: type[nn.Module]) -> None:
    model, inputs = with_stacks(experts)
    plan = autoplan.plan(model, tp_size=2, ep_size=2, inputs=inputs)
    assert [site.pattern for site in plan.runtime.of(LocalExperts)] == ["layers.*.mlp.pool"]
    assert plan.proof.ok and not [f for f in plan.findings if f.check in ("experts", "proof") and f.level != "note"]
    edited = {
        (edit.attribute, edit.old, edit.new) for edit in plan.runtime.of(IntegerEdit) if edit.pattern.endswith(".pool")
    }
    assert edited == {("how_many", 8, 4)}
    report = autoplan.verify(model, plan, tp_size=2, inputs=inputs)
    assert report.ok, report.findings


def test_what_only_looks_like_experts_is_found_out_on_ranks() -> None:
    model, inputs = with_stacks(Adding)
    plan = autoplan.plan(model, tp_size=2, ep_size=2, inputs=inputs)
    assert not plan.runtime.of(LocalExperts)
    told = [finding.message for finding in plan.findings if finding.check == "experts" and finding.level == "warn"]
    assert told and "results differed on simulated ranks" in told[0]
    assert autoplan.verify(model, plan, tp_size=2, inputs=inputs, checks=CHECKS).ok


def test_a_number_that_also_sizes_something_else_stays() -> None:
    """Eight experts with eight features each: the attribute that a view is told for the features is not the count."""
    model, inputs = with_stacks(Stacked, inner=8)
    plan = autoplan.plan(model, tp_size=2, ep_size=2, inputs=inputs, prove="none")
    assert {edit.attribute for edit in plan.runtime.of(IntegerEdit) if edit.pattern.endswith(".pool")} == {"how_many"}
    assert autoplan.verify(model, plan, tp_size=2, inputs=inputs, checks=CHECKS).ok


def test_namesakes_are_told_apart_on_the_clone() -> None:
    """As many experts as features in each: only one of the two attributes counts experts in a model of other sizes."""
    plan = autoplan.plan("qwen3_next", tp_size=8, ep_size=8, prove="none")
    edits = {
        (edit.attribute, edit.old, edit.new)
        for edit in plan.runtime.of(IntegerEdit)
        if edit.pattern.endswith(".experts")
    }
    assert edits == {("num_experts", 512, 64)}
    (site,) = plan.runtime.of(LocalExperts)
    assert site.experts == 512


def test_experts_that_do_not_divide_are_cut_inside() -> None:
    model, inputs = with_stacks(Stacked, experts=6)
    plan = autoplan.plan(model, tp_size=4, ep_size=4, inputs=inputs, prove="none")
    assert not plan.runtime.of(LocalExperts)
    (told,) = [finding for finding in plan.findings if finding.check == "experts" and finding.where]
    assert told.level == "warn" and "6 experts are not divisible by 4 ranks" in told.message
    assert autoplan.verify(model, plan, tp_size=4, inputs=inputs, checks=CHECKS).ok
    with pytest.raises(IndivisibleError, match="6 experts are not divisible by 4 ranks"):
        autoplan.plan(model, tp_size=4, ep_size=4, inputs=inputs, strict=True)
    with pytest.raises(IndivisibleError, match="6 experts are not divisible by 4 ranks"):
        autoplan.plan(model, tp_size=1, ep_size=4, inputs=inputs)


def test_experts_in_a_list_are_cut_inside() -> None:
    model, inputs = with_listed()
    plan = autoplan.plan(model, tp_size=2, ep_size=2, inputs=inputs, prove="none")
    assert not plan.runtime.of(LocalExperts) and [
        f for f in plan.findings if f.check == "experts" and f.level == "warn"
    ]
    assert autoplan.verify(model, plan, tp_size=2, inputs=inputs, checks=CHECKS).ok


@pytest.mark.parametrize(
    ("tp_size", "ep_size", "why"),
    [(4, 2, "valid: ep_size=1"), (2, 4, "valid: ep_size=1"), (2, 0, "from 1 to"), (2, 1.5, "from 1 to")],
)
def test_odd_sizes_are_refused(tp_size: int, ep_size: Any, why: str) -> None:
    with pytest.raises(AutoplanError, match=why):
        autoplan.plan("mixtral", tp_size=tp_size, ep_size=ep_size)


# ------------------------------------------------------------------------------------------------ what a rank computes


class Doubling(nn.Module):
    """Says which experts it was asked for."""

    def forward(self, tokens: torch.Tensor, which: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        self.asked = which
        return (tokens[:, None] * (1 + which[..., None]) * share[..., None]).sum(1)


SITE = LocalExperts("experts", 4, ("tokens",), ("which",), ("share",))


def local(rank: int, tokens: torch.Tensor, which: torch.Tensor, share: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    module, work = Doubling(), ExpertsOfARank(SITE, ("tokens", "which", "share"), RankGroup("", 2, rank), "experts")
    args, kwargs = work.enter((tokens,), {"which": which, "share": share})
    return module, work.leave(module(*args, **kwargs))


def test_only_pairs_of_own_experts_are_computed() -> None:
    tokens = torch.tensor([[1.0], [10.0], [100.0]], requires_grad=True)
    which, share = torch.tensor([[0, 3], [2, 3], [1, 0]]), torch.tensor([[0.5, 0.25], [1, 2], [3, 4]])
    first, left = local(0, tokens, which, share)
    second, right = local(1, tokens, which, share)
    assert first.asked.tolist() == [[0], [1], [0]] and second.asked.tolist() == [[1], [0], [1]]
    assert left.flatten().tolist() == [0.5, 0.0, 100 * 3 * 2 + 100 * 4]
    assert right.flatten().tolist() == [1 * 2 * 0.25, 10 * 1 * 1 + 10 * 2 * 2, 0.0]


def test_a_rank_without_work_still_has_gradients() -> None:
    tokens, share = torch.ones(2, 3, requires_grad=True), torch.ones(2, 1, requires_grad=True)
    module, result = local(1, tokens, torch.tensor([[0], [1]]), share)
    assert len(module.asked) == 1 and not result.any()
    result.sum().backward()
    assert tokens.grad is not None and share.grad is not None and not tokens.grad.any() and not share.grad.any()


def test_where_counts_are_unknown_foreign_pairs_weigh_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, which, share = torch.rand(5, 2), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    compact = [local(rank, tokens, which, share)[1] for rank in range(2)]
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    masked = [local(rank, tokens, which, share) for rank in range(2)]
    for (module, result), other in zip(masked, compact, strict=True):
        assert module.asked.shape == which.shape and int(module.asked.max()) < 2
        torch.testing.assert_close(result, other)


def test_a_call_without_routing_is_an_error() -> None:
    work = ExpertsOfARank(SITE, ("tokens", "which", "share"), RankGroup("", 2, 0), "experts")
    with pytest.raises(PlanMismatchError, match="which"):
        work.enter((torch.ones(2, 3),), {})


# ------------------------------------------------------------------------------------------------ around a plan


def test_files_differences_and_text(tmp_path: Path) -> None:
    _, plan = planned("gpt_oss")
    plan.save(tmp_path / "plan.yaml")
    assert autoplan.load_plan(tmp_path / "plan.yaml") == plan
    _, inside = planned("gpt_oss", 2, 1)
    changes = {(change.pattern, change.what) for change in plan.diff(inside)}
    assert ("", "ep_size") in changes and ("model.layers.*.mlp.experts", "LocalExperts") in changes
    assert "ep 2" in str(plan) and "ep=2 gives each rank 6" in str(plan)
    assert "each rank computes 6 of 12 experts" in plan.explain("model.layers.0.mlp.experts")
    text = (tmp_path / "plan.yaml").read_text().replace("ep_size: 2", "ep_size: 3")
    (tmp_path / "odd.yaml").write_text(text)
    with pytest.raises(PlanFileError, match="ep_size=3"):
        autoplan.load_plan(tmp_path / "odd.yaml")


def test_a_plan_file_is_a_source_for_its_own_size(tmp_path: Path) -> None:
    clone, plan = planned("mixtral")
    plan.save(tmp_path / "plan.yaml")
    how: dict[str, Any] = {"source": str(tmp_path / "plan.yaml"), "inputs": clone.feeds}
    assert autoplan.plan(clone.model, 2, ep_size=2, **how) == plan
    with pytest.raises(PlanMismatchError, match="a plan for ep=2, not 1"):
        autoplan.plan(clone.model, 2, **how)


def test_real_ranks_of_ep_verify_themselves() -> None:
    clone, plan = planned("mixtral", 1, 2)

    def rank_body(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        how: Any = {"mesh": mesh, "inputs": clone.feeds, "checks": CHECKS[:2]}
        return autoplan.verify(copy.deepcopy(clone.model), plan, **how)

    assert all(report.ok and report.details["engine"] == "mesh" for report in run_ranks(rank_body, 2))


def test_written_plans_that_cut_experts_inside_stay_so() -> None:
    clone, _ = planned("mixtral")
    chosen = {"model.layers.*.mlp.experts.gate_up_proj": "packed_colwise"}
    how: Any = {"inputs": clone.feeds, "prove": "none", "overrides": chosen}
    plan = autoplan.plan(clone.model, 2, ep_size=2, **how)
    (told,) = [finding for finding in plan.findings if finding.check == "experts" and finding.level == "warn"]
    assert not plan.runtime.of(LocalExperts) and "overrides shards" in told.message


def test_rounding_is_measured_too() -> None:
    clone, plan = planned("mixtral", 1, 2)
    how: Any = {"inputs": clone.feeds, "checks": CHECKS[:2], "rounding": True}
    report = autoplan.verify(clone.model, plan, **how)
    assert report.ok and report.details["rounding"]


def test_the_plan_of_a_large_model_is_verified_on_its_clone() -> None:
    plan = autoplan.plan("mixtral", tp_size=8, ep_size=8, prove="none")
    report = autoplan.verify("mixtral", plan, checks=CHECKS)
    assert report.ok and not report.findings, report.findings


@pytest.mark.slow
def test_a_plan_for_experts_alone_is_proven_on_ranks() -> None:
    plan = autoplan.plan("mixtral", tp_size=1, ep_size=8, prove="ranks")
    assert plan.proof.ok and plan.legal_tp == (1, 2, 4, 8)
    assert "ep 8" in str(plan) and not [finding for finding in plan.findings if finding.level != "note"]


def test_weights_are_read_by_expert(tmp_path: Path) -> None:
    clone, plan = planned("gpt_oss")
    state = {name: tensor.contiguous() for name, tensor in clone.model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = autoplan.parallelize(clone_of(resolve("gpt_oss")).model.to("meta"), mesh, plan)
        autoplan.load_weights(model, tmp_path)
        weight = model.model.layers[0].mlp.experts.gate_up_proj
        whole = state["model.layers.0.mlp.experts.gate_up_proj"]
        assert torch.equal(weight.to_local(), whole.chunk(2)[rank]) and torch.equal(weight.full_tensor(), whole)
        found = autoplan.full_tensors(model)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())

    run_ranks(rank_body, 2)


def test_torchs_own_parallelize_module() -> None:
    clone, plan = planned("mixtral")
    inputs = next(iter(clone.feeds.values()))
    with torch.no_grad():
        expected = clone.model(**inputs).logits

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = parallelize_module(clone_of(resolve("mixtral")).model, mesh, plan.to_torch(gather_logits=True))
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits, expected)

    run_ranks(rank_body, 2)


def test_a_mesh_dim_that_would_hold_copies_is_refused() -> None:
    clone, plan = planned("mixtral")

    def rank_body(rank: int) -> None:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
        with pytest.raises(PlanMismatchError, match="2 ranks in 'ep'"):
            autoplan.parallelize(clone.model, both, plan)

    run_ranks(rank_body, 4)
    alone = replace(plan, tp_size=1)

    def without(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(PlanMismatchError, match="no dim named 'ep'"):
            autoplan.parallelize(clone.model, mesh, alone)

    run_ranks(without, 2)


@pytest.mark.parametrize("target", ["hf", "hf-old", "deepspeed", "vllm", "automodel"])
def test_exports_refuse_what_they_cannot_say(target: str) -> None:
    clone, plan = planned("mixtral")
    if target == "automodel":
        assert "expert" in plan.export(target, clone.model)
        return
    with pytest.raises(ExportError, match="experts"):
        plan.export(target, clone.model)
    text = plan.export(target, clone.model, drop=True)
    assert all("replicate" in line for line in text.splitlines() if ".experts" in line)


@pytest.mark.parametrize(("tp_size", "ep_size"), [(2, 2), (1, 2)])
def test_an_audit_finds_nothing_wrong(tp_size: int, ep_size: int) -> None:
    clone, plan = planned("gpt_oss", tp_size, ep_size)
    report = autoplan.audit(clone.model, plan, tp_size, inputs=clone.feeds)
    assert report.ok and not [f for f in report.findings if f.level == "error"], report.findings
    assert tp_size == 1 or not report.findings, report.findings


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        return int(caught.value.code or 0), "".join(capsys.readouterr())

    code, text = run("plan", "mixtral", "--tp", "4", "--ep", "4", "--prove", "none")
    assert code == 0 and "tp 4 · ep 4" in text
    code, text = run("plan", "mixtral", "--tp", "4", "--ep", "3")
    assert code == 2 and "--ep 4" in text
    code, text = run("verify", "gpt_oss", "--ep", "2")
    assert code == 0 and "passed" in text


@pytest.mark.slow
def test_on_the_scoreboard(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["scoreboard", "causal_lm", "--only", "mixtral", "--ep", "2"])
    code, text = caught.value.code, "".join(capsys.readouterr())
    assert code == 0 and "ep 2" in text

"""Verify finds nothing in a right sharding and the fault in a wrong one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from mesh_toys import clone
from planted_faults import FAULTS
from small_models import give_random_values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from toy_sharding import Toy, sharding
from transformers import LlamaConfig

import autoplan
from autoplan.check.ranks.run import run_processes
from autoplan.check.verify import clone as clones
from autoplan.check.verify.clone import MeshSizes, parse_mesh
from autoplan.check.verify.sharded import CHECK_NAMES, check_sharding
from autoplan.check.verify.verify import verify
from autoplan.cli.app import main
from autoplan.common.errors import AutoplanError
from autoplan.hf.source import Source, resolve
from autoplan.values import DrawOnShards, IntegerEdit


def toy(**kwargs) -> Toy:
    torch.manual_seed(0)
    return give_random_values(Toy(**kwargs)).double()


def ids(batch: int, length: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"forward": {"ids": torch.randint(12, (batch, length), generator=torch.Generator().manual_seed(7))}}


def check(model: Toy, fault: str = "", **kwargs):
    return check_sharding(model, ids(2, 5), sharding(fault), 2, others=ids(3, 12), **kwargs)


@pytest.mark.parametrize("engine", ["threads", "gloo"])
def test_right_sharding_is_exact(engine) -> None:
    report = check(toy(), engine=engine)
    assert report.ok
    note, advice = report.findings  # the toy's shards are plain parameters, so a rank sees a part of the norm only
    assert note.level == "note" and "draws in different calls" in note.message  # it draws a seed for its ranks
    assert advice.level == "warn" and "clip_grad_norm_" in advice.hint
    assert set(report.gradients) == {name for name, _ in toy().named_parameters()}
    assert max(report.gradients.values()) < 1e-12 and report.forward < 1e-12
    absent = {"attention", "cache", "inputs", "other_dims"}
    assert set(report.details["checked"]) == set(CHECK_NAMES) - absent
    assert set(report.details["not_checked"]) == absent
    assert report.details["collectives"] == {"forward": {"all_reduce": 1}, "backward": {"all_reduce": 2}}


def on_live_mesh(rank: int, fault: str) -> tuple[bool, set[str], bool]:
    """What a rank of a running job does."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, state = toy(), torch.get_rng_state()
    report = check(model, fault, mesh=mesh)
    wrong = {finding.where for finding in report.findings if finding.level == "error"}
    return report.ok, wrong, torch.equal(torch.get_rng_state(), state)


def test_real_ranks_verify_on_their_own_mesh() -> None:
    assert run_processes(on_live_mesh, ("",), 2) == [(True, set(), True)] * 2
    for ok, wrong, _ in run_processes(on_live_mesh, ("rank's own norm",), 2):
        assert not ok and "norm.weight" in wrong


@pytest.mark.parametrize(
    ("fault", "model", "checks_that_see_it", "named"),
    [
        ("no gradient sum", {}, {"gradients", "second_shape", "loss", "optimizer"}, "scale"),
        ("scale without sum", {}, {"gradients", "second_shape", "loss", "optimizer"}, "scale"),
        ("double gradient sum", {}, {"gradients"}, "norm.weight"),
        ("no forward sum", {}, {"forward", "second_shape", "loss"}, "logits"),
        ("wrong piece", {}, {"parameters", "forward", "gradients", "state_dict"}, "gate.weight"),
        ("untied", {"tied": True}, {"gradients", "optimizer"}, "embedding.weight"),
        ("rank's own norm", {}, {"parameters", "forward"}, "norm.weight"),
        ("renamed", {}, {"state_dict"}, ""),
        ("unseeded dropout", {"dropout": 0.3}, {"dropout"}, "logits"),
        ("wrong dim", {}, {"forward"}, ""),
    ],
)
def test_wrong_sharding_is_found_and_named(fault, model, checks_that_see_it, named) -> None:
    report = check(toy(**model), fault)
    assert not report.ok
    errors = [finding for finding in report.findings if finding.level == "error"]
    assert checks_that_see_it <= {finding.check for finding in errors}
    assert named in {finding.where for finding in errors} or not named


def test_forward_alone_does_not_see_a_missing_gradient_sum() -> None:
    """Why gradients are compared at all."""
    report = check(toy(), "no gradient sum", checks=["forward"])
    assert {finding.check for finding in report.findings} == {"gradients"}
    assert report.forward < 1e-12 and max(report.gradients.values()) > 0.1


def test_dropout_drawn_alike_is_right() -> None:
    assert check(toy(dropout=0.3)).ok


@pytest.mark.parametrize("engine", ["threads", "gloo"])
def test_a_rank_that_raises_is_a_finding(engine) -> None:
    report = check(toy(), "a rank raises", engine=engine)
    (finding,) = report.findings
    assert finding.check == "forward" and "planted" in finding.message and "toy_sharding.py" in finding.message


def test_ranks_that_wait_for_each_other_are_a_finding(monkeypatch) -> None:
    monkeypatch.setattr("autoplan.check.ranks.threads.STUCK_AFTER", 0.4)
    report = check(toy(), "ranks wait for each other", checks=["forward"])
    assert not report.ok and "others never enter" in report.findings[0].message


def test_nan_reference_is_not_comparable() -> None:
    model = toy()
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    report = check(model, checks=["forward"])
    assert {finding.level for finding in report.findings} == {"warn"}
    assert {finding.kind for finding in report.findings} == {"not-comparable"}
    assert "not comparable" in report.findings[0].message


class Flat(nn.Module):
    """Its output is a step of its input: every gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sign(self.down(torch.relu(self.up(x))))


def test_a_model_whose_gradients_are_all_zero_goes_through_every_check() -> None:
    report = verify(Flat(), tp_size=2, inputs={"x": torch.randn(3, 6, generator=torch.Generator().manual_seed(1))})
    assert report.ok and "optimizer" in report.details["checked"]
    assert set(report.gradients.values()) == {0.0}


def test_single_precision_is_said() -> None:
    report = check(toy().float())
    assert report.ok and report.details["precision"] == "float32" and report.details["tolerance"] > 1e-5


def test_the_model_is_left_alone() -> None:
    model, state = toy().train(), torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check(model)
    assert model.training and type(model) is Toy and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_unknown_check_is_refused() -> None:
    with pytest.raises(AutoplanError, match="no such check: 'fowrard'"):
        check(toy(), checks=["fowrard"])


# ------------------------------------------------------------------------------------------------ verify itself


def llama(**sizes):
    from transformers import LlamaConfig

    return LlamaConfig(**{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                          "num_attention_heads": 4, "num_key_value_heads": 2, **sizes})  # fmt: skip


@pytest.mark.parametrize("engine", ["threads", "gloo"])
def test_a_config_is_planned_and_verified(engine) -> None:
    report = verify(llama(), tp_size=2, engine=engine)
    assert report.ok and report.findings == () and report.tp_size == 2
    absent = {"training", "inputs", "other_dims"}  # it computes the same in training, and takes ids
    assert set(report.details["checked"]) == set(CHECK_NAMES) - absent
    assert report.details["collectives"] == {"forward": {"all_reduce": 5}, "backward": {"all_reduce": 5}}


def test_a_plan_for_another_size_is_compared_with_the_clones() -> None:
    large = llama(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, num_hidden_layers=6)
    plan = autoplan.plan(large, tp_size=8, prove="none")
    report = verify(large, plan, tp_size=2, checks=["forward"])
    assert report.ok and not [finding for finding in report.findings if finding.check == "plan"]
    assert (report.tp_size, report.details["plan_tp"]) == (2, 8)
    other = replace(plan, entries=tuple(replace(entry, style="rowwise") for entry in plan.entries))
    warned = verify(large, other, tp_size=2, checks=["forward"]).findings
    assert warned and {finding.check for finding in warned} == {"plan"}


def test_a_plan_for_this_very_model_is_applied_as_it_is() -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama())
    plan = autoplan.plan(model, tp_size=2, prove="none")
    spoiled = next(f for f in FAULTS if f.name == "no gradient sum").spoil(plan)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert verify(model, plan, checks=["forward"]).ok
    assert not verify(model, spoiled, checks=["forward"]).ok
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class OneDropout(nn.Module):
    """One dropout for an MLP's inner width, which is split, and for the stream, which is not."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(61, 16), nn.LayerNorm(16), nn.Linear(16, 61, bias=False)
        self.up, self.down, self.forget = nn.Linear(16, inner), nn.Linear(inner, 16), nn.Dropout(0.3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        inner = self.forget(nn.functional.gelu(self.up(self.norm(x))))
        return self.head(x + self.forget(self.down(inner)))


@pytest.mark.parametrize(("inner", "apart"), [(48, True), (32, False)])
def test_a_dropout_shared_by_two_widths_is_told_apart_where_that_is_certain(inner: int, apart: bool) -> None:
    """Half of 32 is as wide as the stream: then the place does not tell which value comes."""
    model = OneDropout(inner)
    plan = autoplan.plan(model, tp_size=2)
    assert [call.site.width for call in plan.runtime.of(DrawOnShards)] == ([16] if apart else [])
    assert autoplan.verify(model, plan, tp_size=2).ok


class ClampsItsTemperature(nn.Module):
    """A forward that writes into a weight, as contrastive models do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.temperature.clamp_(0.001, 0.5)
        return self.down(self.up(x).relu()) / self.temperature


def test_a_forward_that_writes_into_a_weight_is_compared_before_it_does() -> None:
    report = autoplan.verify(ClampsItsTemperature(), tp_size=2, inputs={"x": torch.randn(3, 8)})
    assert report.ok, report.findings


# `verify` and the command line on meshes, and `autoplan layers`.


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=2"])
def test_verify_covers_a_mesh(mesh: str) -> None:
    report = autoplan.verify(clone("gpt2").model, mesh=mesh, checks=["parameters", "forward"])
    assert report.ok and report.findings == ()
    assert report.details["mesh"] == mesh
    assert report.details["checked"] == ("parameters", "forward", "training", "training with checkpointing")
    assert max(report.gradients.values()) < 1e-9


@pytest.mark.parametrize(
    ("text", "names", "sizes"),
    [
        ("dp=2,tp=2", ("dp", "tp"), (2, 2)),
        ("tp=2,dp=4", ("dp", "tp"), (4, 2)),
        ("tp=2, dp_shard=1, dp_replicate=2", ("dp_replicate", "dp_shard", "tp"), (2, 1, 2)),
        ("fsdp=3", ("fsdp",), (3,)),
    ],
)
def test_meshes_are_written_as_text(text: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    assert parse_mesh(text) == MeshSizes(names, sizes)


@pytest.mark.parametrize("text", ["dp", "dp=x", "dp=0", "cows=2", "dp=2,tp=-1"])
def test_odd_meshes_are_refused(text: str) -> None:
    with pytest.raises(AutoplanError, match="mesh"):
        parse_mesh(text)


def test_a_mesh_without_the_ranks_that_were_asked_for_is_refused() -> None:
    with pytest.raises(AutoplanError, match="the mesh dp=3 has tp 1, tp_size is 2"):
        autoplan.verify("llama", tp_size=2, mesh="dp=3")


def test_layers_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["layers", "llama", "--json"])
    (stack,) = json.loads(capsys.readouterr().out)
    assert caught.value.code == 0
    assert (stack["name"], stack["kind"], len(stack["fqns"])) == ("model.layers", "decoder", 32)


# A plan needs one tiny clone: it is built and fed once, for the trial, the proof on its graph and verify.


torch.set_num_threads(1)

CONFIG = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256},
    **{"num_attention_heads": 8, "num_key_value_heads": 8},
}


class Counted:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, int] = {}
        for owner, name in ((Source, "tiny"), (clones, "feeds_at")):
            patch.setattr(owner, name, self._counting(name, getattr(owner, name)))

    def _counting(self, name: str, function: Any) -> Any:
        def counting(*args: Any, **keywords: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return function(*args, **keywords)

        return counting


# at tp 8 each rank holds a single head: the clone is fitted to that, and tried on four ranks
@pytest.mark.parametrize(("prove", "tp_size"), [("graph", 2), ("graph", 8), ("ranks", 2)])
def test_one_clone_is_tried_recorded_and_verified(monkeypatch: pytest.MonkeyPatch, prove: Any, tp_size: int) -> None:
    counted = Counted(monkeypatch)
    plan = autoplan.plan(LlamaConfig(**CONFIG), tp_size, prove=prove)
    assert plan.proof.ok and plan.proof.method == prove, plan.proof
    assert counted.calls == {"tiny": 1, "feeds_at": 2}  # calls of two sizes


def test_modules_with_a_config_of_their_own_follow_what_is_changed_in_the_shared_one() -> None:
    """Each attention layer of Phi-3 reads its heads off the config, of which it gets a copy; what is switched in the
    shared one must reach it, or masks are made for another kernel than the one that runs."""
    torch.manual_seed(0)
    model = resolve("phi3").tiny(dtype=torch.float64)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, :4] = 0
    plan = autoplan.plan(model, 2)
    assert "config.num_attention_heads" in {edit.name for edit in plan.runtime.of(IntegerEdit)}
    inputs = {"input_ids": torch.randint(3, 40, (2, 10)), "attention_mask": mask, "use_cache": False}
    report = autoplan.verify(model, plan, inputs=inputs, checks=("attention",))
    assert report.ok and "attention" in report.details["checked"], report

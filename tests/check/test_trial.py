"""A plan says "Proven" only where its sharded tiny clone was run on simulated ranks and gave the same.

The modules here are those on which the trial was left out without a word, or on which only the trial sees the mistake.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan
from autoplan.check.audit.gate import refuse_disproven, refuse_unproven, warn_unproven
from autoplan.check.ranks.run import run_ranks
from autoplan.check.verify import verify
from autoplan.check.verify.clone import Sizes, tried_sizes
from autoplan.common.errors import AutoplanError, PlanRefusedError, UnprovenPlanWarning
from autoplan.common.options import Options
from autoplan.hf.source import resolve
from autoplan.hf.tiny_sizes import VARIANTS, fitted
from autoplan.values import Proof, Trial, replace

torch.set_num_threads(1)


class KeepsTable(nn.Module):
    """A table is made in the first call, and kept for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.outer(torch.arange(x.shape[1]), torch.linspace(0, 1, 64)).sin().to(x.dtype)
        return x + self.table[: x.shape[1]] + self.down(torch.tanh(hidden))


def test_a_call_after_the_first_is_tried_where_the_first_leaves_something() -> None:
    x = torch.randn(2, 6, 64)
    plan = autoplan.plan(KeepsTable(), 2, inputs={"x": x})
    assert plan.proof.ok, plan

    def twice(rank: int) -> None:
        model = autoplan.parallelize(KeepsTable(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
        for _ in range(2):  # the second takes another way through the forward
            model(x)

    run_ranks(twice, 2)


class Single(nn.Module):
    """A convolution, which takes no other dtype than that of its weights, and then an MLP."""

    def __init__(self, scale: str = "") -> None:
        super().__init__()
        self.mix = nn.Conv1d(64, 64, 3, padding=1)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.good_up, self.good_down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        hidden = torch.tanh(self.up(x))
        if self.scale == "bytes":  # of the shard, on a rank: nothing that runs in torch shows it
            hidden = hidden * (hidden.untyped_storage().nbytes() / hidden.element_size() / 1280)
        x = x + self.down(hidden)
        return x + self.good_down(torch.tanh(self.good_up(x)))


class Pinned(nn.Module):
    """Asks for single precision by name, in one way or another."""

    def __init__(self, pin: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.pin = pin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        if self.pin == "float":
            hidden = hidden.float()
        elif self.pin == "constant":
            hidden = hidden @ torch.eye(128, dtype=torch.float32)
        elif self.pin == "asserted":
            assert hidden.dtype == torch.float32
        return x + self.down(hidden)


def inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 5, 64)}


def planned(model: nn.Module, **how: Any) -> autoplan.Plan:
    return autoplan.plan(model, 2, inputs=inputs(), **how)


def said(plan: autoplan.Plan) -> list[str]:
    return [finding.message for finding in plan.findings if finding.check == "proof"]


def test_inputs_in_the_users_dtype_are_tried_on_ranks() -> None:
    plan = planned(Single())
    assert plan.proof.ok and said(plan) == []
    narrowed = planned(Single("bytes"))
    assert len(narrowed.entries) < len(plan.entries)
    assert any("sharded, the tiny clone's results differed" in text for text in said(narrowed)), narrowed.findings
    report = autoplan.verify(Single("bytes"), narrowed, inputs=inputs(), checks=["forward"])
    assert report.ok, report.findings


@pytest.mark.parametrize("pin", ["float", "constant", "asserted"])
def test_what_asks_for_single_precision_is_proven_in_it(pin: str) -> None:
    plan = planned(Pinned(pin))
    assert plan.proof.ok and plan.proof.method == "graph" and said(plan) == [], plan.findings


class Half(nn.Module):
    """Runs in half precision only, in which rounding hides small mistakes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)).to(torch.bfloat16))


class AwareHalf(Half):
    """And does something else where any weight is split."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = sum(isinstance(part._parameters["weight"], DTensor) for part in (self.up, self.down))
        return super().forward(x) * (1 + split)


class Torn(nn.Module):
    """Runs forward only: what its backward needs is changed in place. The graph shows nothing wrong with it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        hidden.mul_(2)
        return x + self.down(hidden)


class Aware(nn.Module):
    """Wrong however it is split: its Python does something else where any weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        split = sum(isinstance(part._parameters["weight"], DTensor) for part in (self.up, self.down))
        return x + self.down(hidden) * (1 + split)


def test_what_cannot_be_tried_is_not_called_proven() -> None:
    plan = planned(Torn())
    assert plan.proof.method == "graph" and plan.proof.trial.outcome == "skipped"
    assert not plan.proof.ok and not plan.proof.failed and {entry.proof for entry in plan.entries} == {"unproven"}
    first, *_, last = " ".join(str(plan).split("\n\n")[0].split()), " ".join(str(plan).split("\n\n")[-1].split())
    assert first.startswith("test_trial.Torn") and "not verified" in first
    assert last.startswith("Not verified on simulated ranks: ") and "inplace" in last and "pass inputs=" in last
    assert "Proven" not in str(plan)
    (finding,) = [finding for finding in plan.findings if finding.check == "proof"]
    assert finding.level == "warn" and "inplace" in finding.message and "inputs=" in finding.hint


def test_half_precision_alone_is_tried_in_half() -> None:
    given = {"x": torch.randn(2, 5, 64, dtype=torch.bfloat16)}
    plan = autoplan.plan(Half().bfloat16(), 2, inputs=given)
    assert plan.proof.ok and plan.proof.trial.outcome == "passed", plan.proof
    wrong = autoplan.plan(AwareHalf().bfloat16(), 2, inputs=given)
    assert wrong.proof.trial.outcome == "wrong", wrong.proof


def test_a_plan_that_is_wrong_on_ranks_failed() -> None:
    plan = planned(Aware())
    assert plan.proof.trial.outcome == "wrong" and plan.proof.failed and not plan.proof.ok
    assert {entry.proof for entry in plan.entries} == {"unproven"}
    assert "Proof failed on simulated ranks: " in str(plan) and "Proven" not in str(plan)
    with pytest.raises(PlanRefusedError, match="failed verification when it was made"):
        refuse_disproven(plan)


def test_what_was_wrong_stays_so_where_nothing_else_can_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rewritten calls there may be nothing left to split: that is no reason to forget what ranks have shown."""
    drawn = verify.plan_for

    def plan_for(clone: Any, source: Any, plan: Any, sizes: Any, capabilities: Any, choices: Any = None) -> Any:
        if not capabilities.scoped:
            raise AutoplanError("nothing can be split")
        return drawn(clone, source, plan, sizes, capabilities, choices)

    monkeypatch.setattr(verify, "plan_for", plan_for)
    assert planned(Aware()).proof.trial.outcome == "wrong"


@pytest.mark.parametrize(
    ("proof", "refused"),
    [
        (Proof("graph", 2, False, wrong=("permutation",), trial=Trial("passed")), True),
        (Proof("graph", 2, False, wrong=("replay",), trial=Trial("skipped")), True),
        (Proof("none", 1, False, trial=Trial("wrong", "off")), True),
        (Proof("ranks", 2, False, ("forward",), "off"), True),
        (Proof("graph", 2, False, trial=Trial("skipped", "why")), False),
        (Proof("graph", 2, True, trial=Trial("passed")), False),
        (Proof("none", 1, False), False),
    ],
)
def test_a_failed_proof_is_refused_and_a_missing_one_is_not(proof: Proof, refused: bool) -> None:
    plan = replace(autoplan.Plan("m", 2), proof=proof)
    assert proof.failed == refused
    if refused:
        with pytest.raises(PlanRefusedError):
            refuse_disproven(plan)
    else:
        refuse_disproven(plan)


def test_a_plan_that_was_not_tried_is_applied_with_a_warning() -> None:
    plan = autoplan.Plan("m", 2, proof=Proof("graph", 2, False, trial=Trial("skipped", "no clone", "pass a config")))
    with pytest.warns(UnprovenPlanWarning, match=r"(?s)m at tp=2 is unproven: not verified.*no clone.*pass a config"):
        warn_unproven(plan)
    for proof in (Proof("none", 1, False), Proof("graph", 2, True, trial=Trial("passed"))):
        warn_unproven(replace(plan, proof=proof))  # warnings are errors here


def test_the_other_ways_to_prove(tmp_path: Any) -> None:
    assert planned(Single(), prove="none").proof == Proof("none", 1, False)
    plan = planned(Single(), prove="ranks")
    assert plan.proof.ok and plan.proof.method == "ranks" and plan.proof.trial == Trial("passed", ranks=2)
    wrong = planned(Aware(), prove="ranks")
    assert wrong.proof.failed and "forward" in wrong.proof.wrong and wrong.proof.trial.outcome == "wrong"
    for made in (plan, wrong, planned(Torn())):
        made.save(tmp_path / "plan.yaml")
        assert autoplan.load_plan(tmp_path / "plan.yaml") == made


def test_what_somebody_chose_is_what_is_tried() -> None:
    """Overrides used to be laid over a plan that had been tried without them, and what it kept whole was cut again."""
    plan = planned(Single("bytes"), overrides={"mix": "replicate"})
    assert any("sharded, the tiny clone's results differed" in text for text in said(plan)), plan.findings
    report = autoplan.verify(Single("bytes"), plan, inputs=inputs(), checks=["forward"])
    assert report.ok, report.findings
    with pytest.raises(AutoplanError, match=r"shards .* and the tiny clone's results differed.*\n.*'replicate'"):
        planned(Single("bytes"), overrides={"up": "colwise", "down": "rowwise"})
    assert planned(Single("bytes"), overrides={"up": "replicate", "down": "replicate"}).proof.ok


class Slow(nn.Module):
    """Takes its time, a little in each run."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return x + self.down(torch.tanh(self.up(x)))


def test_a_trial_has_a_time_budget() -> None:
    plan = planned(Slow(), trial_seconds=0.05)
    assert plan.proof.trial.outcome == "skipped" and not plan.proof.ok and not plan.proof.failed
    assert (
        "the trial exceeded its limit of 0.05 s" in plan.proof.trial.why and "trial_seconds=" in plan.proof.trial.hint
    )
    assert "0.05 s" in str(plan)
    assert planned(Slow()).proof.ok
    with pytest.raises(AutoplanError, match="trial_seconds=0"):
        planned(Slow(), trial_seconds=0)


def test_ranks_are_stopped_when_the_time_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits(Slow):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            split = any(isinstance(part._parameters["weight"], DTensor) for part in (self.up, self.down))
            time.sleep(3.0 if split else 0.0)
            return x + self.down(torch.tanh(self.up(x)))

    before = time.monotonic()
    plan = planned(Waits(), trial_seconds=2.0)
    assert plan.proof.trial.outcome == "skipped" and "on simulated ranks" in plan.proof.trial.why
    assert time.monotonic() - before < 15


def test_strict_takes_proven_plans_only() -> None:
    skipped = autoplan.Plan("m", 2, proof=Proof("graph", 2, False, trial=Trial("skipped", "no clone", "pass a config")))
    with pytest.raises(PlanRefusedError, match=r"(?s)unproven.*no clone.*pass a config"):
        refuse_unproven(skipped)
    with pytest.raises(PlanRefusedError, match='was made with prove="none"'):
        refuse_unproven(autoplan.Plan("m", 2))
    refuse_unproven(replace(skipped, proof=Proof("graph", 2, True, trial=Trial("passed"))))
    refuse_unproven(autoplan.Plan("m", 1))  # nothing is split
    no_clone = Proof("none", 1, False, (), "no tiny clone", Trial("passed"))
    with pytest.warns(UnprovenPlanWarning, match="no tiny clone"):
        warn_unproven(replace(skipped, proof=no_clone))
    assert Options.of({"strict": True}).strict and not Options.of({}).strict


def test_parallelize_strictly(tmp_path: Any) -> None:
    unproven = planned(Single(), prove="none")

    def refused(rank: int) -> str:
        model, mesh = Single(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        try:
            autoplan.parallelize(model, mesh, unproven, strict=True)
        except PlanRefusedError as error:
            return error.message if autoplan.applied(model) is None else "half applied"
        return "applied"

    assert all("unproven" in said for said in run_ranks(refused, 2))


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")])
@pytest.mark.parametrize("given", ["module", "config"])
def test_what_the_caller_has_switched_on_is_no_fault_of_the_plan(around: Any, given: str) -> None:
    sizes: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=64)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    with around():
        plan = autoplan.plan(LlamaForCausalLM(config) if given == "module" else config, 2)
    assert plan.proof.ok, plan.proof


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (9, 3)])
def test_heads_that_are_not_divisible_are_tried_so(heads: int, kv_heads: int) -> None:
    """Their values are split instead: ranks have the same attention weights, and must drop the same ones."""
    sizes: dict[str, Any] = dict(hidden_size=8 * heads, intermediate_size=48, num_hidden_layers=1, vocab_size=64)
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=kv_heads)
    ((clone, _), _) = tried_sizes(resolve(config), Sizes(2, 1))
    tiny: Any = clone.tiny().config
    assert (tiny.num_attention_heads % 2, tiny.num_key_value_heads % 2) == (1, 1)
    plan = autoplan.plan(config, 2, prove="ranks")
    assert plan.proof.ok and "dropout" in plan.proof.checked, plan.findings
    assert not plan.runtime.random


def test_sizes_of_a_clone_are_found_for_any_number_of_heads() -> None:
    """Whatever is shared by fewer key heads, also numbers that are no multiples of each other."""
    for heads, kv_heads, ranks, tried in product(range(1, 41), range(1, 41), (2, 3, 4, 8, 16), (2, 4, 8)):
        fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        sizes = fitted(VARIANTS[0], fields, ranks, tried)
        assert sizes.hidden == sizes.heads * sizes.head_dim, (fields, ranks, tried)
        if 1 < kv_heads < heads and heads % kv_heads == 0:
            assert sizes.heads % sizes.kv_heads == 0, (fields, ranks, tried)
            assert (heads % ranks != 0 and ranks % heads != 0) == (
                sizes.heads % tried != 0 and tried % sizes.heads != 0
            )

"""Outputs that a caller asks for at call time: whole on every rank, or an error that says what to do; never a part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import run_ranks

ASKING = {"output_hidden_states": True, "output_attentions": True}


def build() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config).eval()


IDS = torch.arange(16).view(2, 8)


def ask(plan: autoplan.Plan, **asked: bool) -> list[Any]:
    """What two ranks return, or the error that they raise."""

    def rank(number: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = autoplan.parallelize(build(), mesh, plan, gather_logits=True)
        try:
            return [dict(model(IDS, **asked)) for _ in range(2)][1]
        except autoplan.AutoplanError as error:
            return str(error)

    return run_ranks(rank, 2)


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_hidden_states_are_whole_under_tensor_parallelism() -> None:
    expected = build()(IDS, output_hidden_states=True)
    for found in ask(autoplan.plan(build(), 2, prove="none"), output_hidden_states=True):
        same(found["hidden_states"], expected.hidden_states)


@pytest.mark.parametrize(
    "planned",
    [pytest.param({}, marks=pytest.mark.long), {"inputs": {"input_ids": IDS, "output_hidden_states": True}}],
)
def test_hidden_states_are_whole_under_sequence_parallelism(planned: dict[str, Any]) -> None:
    """Whether the plan saw them or not; the first is collected behind the hook that cuts it."""
    expected = build()(IDS, output_hidden_states=True)
    plan = autoplan.plan(build(), 2, sequence_parallel=True, **planned)
    assert plan.sequence_parallel and plan.proof.ok
    for found in ask(plan, output_hidden_states=True):
        assert len(found["hidden_states"]) == 6
        same(found["hidden_states"], expected.hidden_states)
        same(found["logits"], expected.logits)


def test_gradients_of_losses_on_hidden_states_are_right_under_sequence_parallelism() -> None:
    def step(model: Any) -> None:
        output = model(IDS, output_hidden_states=True)
        sum(h.square().mean() * n for n, h in enumerate(output.hidden_states)).backward()

    whole = build()
    step(whole)
    plan = autoplan.plan(build(), 2, sequence_parallel=True, prove="none")

    def rank(number: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = autoplan.parallelize(build(), mesh, plan, gather_logits=True)
        step(model)
        return autoplan.full_tensors(model, grads=True)

    for found in run_ranks(rank, 2):
        for name, parameter in whole.named_parameters():
            if parameter.grad is not None:
                same(found[name], parameter.grad)


def test_parts_are_refused_by_name() -> None:
    for sequence_parallel in (False, True):
        plan = autoplan.plan(build(), 2, prove="none", sequence_parallel=sequence_parallel)
        assert plan.sequence_parallel == sequence_parallel
        for found in ask(plan, output_attentions=True):
            assert "output 'attentions" in found and "inputs= that request it" in found


def test_explain_says_what_is_done_along_the_sequence() -> None:
    text = autoplan.plan(build(), 2, sequence_parallel=True, prove="none").explain("model.layers.0")
    assert "sharded along the sequence (forward)" in text and "gathered where the model returns it" in text


def test_what_was_planned_with_is_whole_in_every_block() -> None:
    """The trace had fewer blocks than the model."""
    plan = autoplan.plan(build(), 2, inputs={"input_ids": IDS, **ASKING}, prove="none")
    expected = build()(IDS, **ASKING)
    for found in ask(plan, **ASKING):
        assert len(found["attentions"]) == 5
        same(found["attentions"], expected.attentions)
        same(found["hidden_states"], expected.hidden_states)


class SaysMore(nn.Module):
    """Returns a second result only when it is given something to say it about."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.more = nn.Embedding(64, 16), nn.Linear(16, 64), nn.Linear(16, 48)

    def forward(self, ids: torch.Tensor, besides: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        said = {"logits": self.head(self.table(ids))}
        return said if besides is None else {**said, "more": self.more(self.table(besides))}


def test_a_result_that_a_call_does_not_return_is_not_missed() -> None:
    """The plan gathers it where it is returned, and the call without it runs."""
    ids = torch.arange(12).view(2, 6)
    calls = {"short": {"ids": ids}, "long": {"ids": ids, "besides": ids.flip(0)}}
    plan = autoplan.plan(SaysMore(), 2, inputs=calls)
    assert "more.weight" not in {item.fqn for item in plan.replicated}
    report = autoplan.verify(SaysMore(), plan, tp_size=2, inputs=calls)
    assert report.ok, report.findings


class Trunk(nn.Module):
    """Heads on features that a call may ask for, beside what they say or instead of it."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.stem, self.inner = nn.Linear(8, 16), nn.Linear(16, 64 if wide else 16)
        self.norm = nn.Identity() if wide else nn.LayerNorm(16)
        head = (
            (lambda: nn.Linear(64, 40))
            if wide
            else lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 40))
        )
        self.heads = nn.ModuleDict({name: head() for name in ("near", "far")})

    def forward(self, x: torch.Tensor, ask: str = "") -> Any:
        x = self.norm(torch.relu(self.inner(self.stem(x).sin())))
        said = {name: head(x) for name, head in self.heads.items()}
        return {"": said, "instead": x, "beside": (said, x), "first": said["near"]}[ask]


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("ask", ["instead", "beside", "first"])
def test_results_of_another_kind_are_right_or_refused(ask: str, wide: bool) -> None:
    """A dict when it was planned, now a tensor or a tuple. Wide features lie on ranks; narrow ones are whole, and of
    their gradient each head gives a part, which is summed further up."""
    torch.manual_seed(0)
    given, model = {"x": torch.randn(3, 5, 8)}, Trunk(wide)
    plan = autoplan.plan(model, 2, inputs=given, prove="none")
    report = autoplan.verify(model, plan, inputs={**given, "ask": ask})
    if wide and ask != "first":
        refused = [finding.message for finding in report.findings if finding.level == "error"]
        assert refused and all("differs between ranks" in said for said in refused)
    else:
        assert report.ok, report.findings


class Language(nn.Module):
    """Returns embeddings where its logits were."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(96, 16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.head = nn.Linear(16, 96)

    def forward(self, ids: torch.Tensor, return_embeddings: bool = False) -> torch.Tensor:
        x = self.table(ids)
        x = x + self.down(self.up(x).relu())
        return x if return_embeddings else self.head(x)


def test_embeddings_in_the_place_of_logits_are_whole() -> None:
    ids = torch.arange(12).view(2, 6)
    plan = autoplan.plan(Language(), 2, inputs={"ids": ids}, prove="none")
    assert plan.runtime.of(autoplan.values.SplitLogits)
    for asked in (True, False):
        report = autoplan.verify(Language(), plan, inputs={"ids": ids, "return_embeddings": asked})
        assert report.ok, report.findings

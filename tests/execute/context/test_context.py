"""Context parallelism: whole weights, a rank's own positions, and what comes out is that of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.check.scoreboard.run import scoreboard
from autoplan.common.errors import AutoplanError, IndivisibleError, PlanMismatchError
from autoplan.decide.written_plans.plan_file import load_plan
from autoplan.execute.collectives import RankGroup
from autoplan.execute.vocabulary.own_positions import PositionLogits, position_logits, whole_logits

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=64,
)
WAYS = ("loss of the model", "loss of the caller", "whole logits")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval().double()


@pytest.fixture(scope="module")
def plan(model: Any) -> autoplan.Plan:
    return autoplan.plan(model, cp_size=2)


def on_ranks(model: Any, plan: autoplan.Plan, run: Callable[[Any], Any], **how: Any) -> list[Any]:
    """What `run` gives for a copy of the model on each rank of a mesh with the one dim "cp"."""
    copies = [copy.deepcopy(model) for _ in range(2)]

    def rank(number: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        return run(autoplan.parallelize(copies[number], mesh, plan, **how))

    return run_ranks(rank, 2)


def loss_of(model: Any, ids: torch.Tensor, labels: torch.Tensor, way: str) -> torch.Tensor:
    if way == "loss of the model":
        found: torch.Tensor = model(ids, labels=labels).loss
        return found
    logits = model(ids).logits
    if way == "whole logits":
        logits = logits * torch.ones(1, ids.shape[1], 1)  # as long as the sequence: not known to leave positions alone
    return F.cross_entropy(logits[:, :-1].reshape(-1, CONFIG.vocab_size), labels[:, 1:].reshape(-1))


@pytest.mark.parametrize("length", (8, 11))
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_one_device(model: Any, plan: autoplan.Plan, way: str, length: int) -> None:
    ids = torch.randint(3, CONFIG.vocab_size, (2, length))
    labels = ids.clone()
    labels[0, : length // 2 + 1] = -100  # ranks have different numbers of labels

    def step(of: Any) -> tuple[float, dict[str, torch.Tensor], tuple[torch.Size, ...]]:
        of.zero_grad(set_to_none=True)
        loss = loss_of(of, ids, labels, way)
        loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in of.named_parameters()}
        return float(loss.detach()), gradients, tuple(parameter.shape for parameter in of.parameters())

    loss, gradients, shapes = step(copy.deepcopy(model))
    for other, found, kept in on_ranks(model, plan, step):
        single = way == "loss of the model"  # which computes it in single precision
        assert other == pytest.approx(loss, abs=1e-5 if single else 1e-12)
        assert kept == shapes  # weights are whole
        for name, gradient in gradients.items():
            assert torch.allclose(found[name], gradient, rtol=1e-9, atol=1e-6 if single else 1e-12), name


def packed(model: Any, ids: torch.Tensor) -> None:
    positions = torch.arange(ids.shape[1])[None] % (ids.shape[1] // 2)
    model(ids[:1], position_ids=positions, labels=ids[:1]).loss.backward()


def padded(model: Any, ids: torch.Tensor) -> None:
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()


def accumulated(model: Any, ids: torch.Tensor) -> None:
    for batch in (ids, ids[:, :7], ids):
        model(batch, labels=batch, num_items_in_batch=30).loss.backward()


@pytest.mark.parametrize("checkpointing", (False, True, "selective"))
@pytest.mark.parametrize("call", (packed, padded, accumulated))
def test_other_calls_are_those_of_one_device(
    model: Any, plan: autoplan.Plan, call: Callable[[Any, torch.Tensor], None], checkpointing: Any
) -> None:
    ids = torch.randint(3, CONFIG.vocab_size, (2, 12))
    alone = copy.deepcopy(model)
    call(alone, ids)

    def run(of: Any) -> list[torch.Tensor]:
        call(of, ids)
        return [parameter.grad for parameter in of.parameters()]

    for gradients in on_ranks(model, plan, run, activation_checkpointing=checkpointing):
        for (name, parameter), found in zip(alone.named_parameters(), gradients, strict=True):
            assert torch.allclose(found, parameter.grad, rtol=1e-4, atol=1e-6), name


def test_a_gradient_of_an_input_is_refused(model: Any, plan: autoplan.Plan) -> None:
    def run(of: Any) -> None:
        embeds = torch.randn(2, 9, CONFIG.hidden_size, dtype=torch.float64, requires_grad=True)
        with pytest.raises(PlanMismatchError, match="inputs_embeds"):
            of(inputs_embeds=embeds)

    on_ranks(model, plan, run)


def test_outputs_leave_as_own_positions_where_a_gradient_is_computed(model: Any, plan: autoplan.Plan) -> None:
    ids = torch.randint(3, CONFIG.vocab_size, (2, 9))

    def run(of: Any) -> Any:
        split = of(ids).logits
        with torch.no_grad():
            whole = of(ids).logits
            states = of(ids, output_hidden_states=True).hidden_states
        local = split.as_subclass(torch.Tensor)
        return type(split), tuple(split.shape), local.shape[1], whole_logits(split).detach(), whole, states

    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
    for rank, (kind, shape, own, gathered, whole, states) in enumerate(on_ranks(model, plan, run)):
        assert issubclass(kind, PositionLogits)
        assert shape == tuple(expected.logits.shape)
        assert own == (5, 4)[rank]
        assert torch.allclose(gathered, expected.logits)
        assert torch.allclose(whole, expected.logits)
        assert all(torch.allclose(a, b) for a, b in zip(states, expected.hidden_states, strict=True))


def test_positions_that_a_call_picks_are_those_of_the_whole(model: Any, plan: autoplan.Plan) -> None:
    ids = torch.randint(3, CONFIG.vocab_size, (2, 9))
    with torch.no_grad():
        expected = model(ids, logits_to_keep=2).logits
        written = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)

    def run(of: Any) -> Any:
        with pytest.raises(PlanMismatchError, match="logits_to_keep"):
            of(ids, logits_to_keep=2)  # with gradients
        with torch.no_grad():
            return of(ids, logits_to_keep=2).logits, of.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)

    for kept, tokens in on_ranks(model, plan, run):
        assert torch.allclose(kept, expected)
        assert torch.equal(tokens, written)


@pytest.mark.parametrize(
    "mesh", ["dp_shard=2,cp=2", pytest.param("dp_replicate=2,dp_shard=1,cp=2", marks=pytest.mark.long)]
)
def test_it_trains_beside_fsdp(mesh: str) -> None:
    report = autoplan.verify("llama", mesh=mesh, checks=["forward", "loss"])
    assert report.ok, report.findings
    assert {"training", "training with checkpointing"} <= set(report.details["checked"])


KINDS = {  # what each has beside the others
    "gpt2": "a tied head behind a view that is told the length",
    "gemma3_text": "a tied head, windows",
    "bloom": "slopes of heads made in the model's code",
    "deepseek_v3": "latents, experts",
    "mamba2": "a scan, a short convolution",
    "rwkv": "a token shift on the stream",
    "zamba2": "a second stream into its blocks",
    "minimax": "lightning attention in blocks",
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_mixers(kind: str) -> None:
    board = scoreboard("causal_lm", 1, cp_size=2, only=[kind], lengths=(16, 13))
    assert [score.verdict for score in board.scores] == ["exact"], board.scores[0].reason


@pytest.mark.gloo
@pytest.mark.long
def test_processes_agree_with_one_device() -> None:
    assert autoplan.verify("mixtral", cp_size=2, engine="gloo").ok


def test_experts_run_on_own_tokens() -> None:
    """A dispatch by an index for each token moves nothing."""
    moved = autoplan.plan("mixtral", cp_size=2, prove="none").communication
    assert {move.block for move in moved} == {"model.layers.*"}
    assert all(len(one.forward) == 2 for one in moved)  # of attention: a gather and a reduce-scatter


def test_a_plan_file_keeps_the_size(plan: autoplan.Plan, tmp_path: Any) -> None:
    plan.save(tmp_path / "plan.yaml")
    loaded = load_plan(tmp_path / "plan.yaml")
    assert loaded == plan
    assert (loaded.tp_size, loaded.cp_size, loaded.ranks) == (1, 2, 2)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"tp_size": 2}, "tp_size"),
        ({"ep_size": 2}, "ep_size"),
        ({"source": "hf"}, "source"),
        ({"overrides": {"model.layers.*.mlp.up_proj": "colwise"}}, "overrides"),
    ],
)
def test_what_cannot_stand_beside_it_is_refused(model: Any, how: dict[str, Any], error: str) -> None:
    with pytest.raises(AutoplanError, match=error):
        autoplan.plan(model, cp_size=2, **how)


def test_a_mesh_without_the_dim_is_refused(model: Any, plan: autoplan.Plan) -> None:
    def run(number: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(PlanMismatchError, match="'cp'"):
            autoplan.parallelize(copy.deepcopy(model), mesh, plan)

    run_ranks(run, 2)


def test_a_model_without_positions_is_refused() -> None:
    blocks = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()) for _ in range(3)))
    with pytest.raises(IndivisibleError, match="the sequence cannot be cut over cp=2 ranks"):
        autoplan.plan(blocks, cp_size=2, inputs={"input": torch.randn(4, 16)})


@pytest.mark.parametrize("length", (2, 7, 12))
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("shape", ("flat", "classes second", "shifted"))
def test_a_loss_of_own_positions(length: int, reduction: str, shape: str) -> None:
    """Also where a rank has no positions, with weights, smoothed labels and such as do not count."""
    torch.manual_seed(1)
    logits, weight = torch.randn(2, length, 5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    labels = torch.randint(0, 5, (2, length))
    labels[0, 0] = -100

    def loss(x: torch.Tensor) -> torch.Tensor:
        how: dict[str, Any] = {"reduction": reduction, "weight": weight, "label_smoothing": 0.1}
        if shape == "classes second":
            return F.cross_entropy(x.transpose(1, 2), labels, **how)
        kept, wanted = (x[..., :-1, :].contiguous(), labels[:, 1:]) if shape == "shifted" else (x, labels)
        return F.cross_entropy(kept.float().double().view(-1, 5), wanted.reshape(-1), **how)

    whole = logits.clone().requires_grad_()
    expected = loss(whole)
    expected.sum().backward()

    def rank(number: int) -> Any:
        group = RankGroup.of(init_device_mesh("cpu", (3,), mesh_dim_names=("cp",)))
        each = -(-length // 3)
        padded = F.pad(logits, (0, 0, 0, 3 * each - length))[:, number * each : (number + 1) * each]
        own = padded.clone().requires_grad_()
        found = loss(position_logits(own, -2, length, group))
        found.sum().backward()
        return found.detach(), own.grad

    for number, (found, gradient) in enumerate(run_ranks(rank, 3)):
        assert torch.allclose(found, expected.detach())
        each = -(-length // 3)
        wanted = F.pad(whole.grad, (0, 0, 0, 3 * each - length))[:, number * each : (number + 1) * each]  # type: ignore[arg-type]
        assert torch.allclose(gradient, wanted)


def test_a_loss_over_all_routers_is_that_of_one_device() -> None:
    """A mean over all tokens times another, beside the loss of own positions."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**{**CONFIG.to_dict(), "num_local_experts": 4, "output_router_logits": True})
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).eval()
    ids = torch.randint(3, CONFIG.vocab_size, (2, 9))

    def step(of: Any) -> tuple[float, dict[str, torch.Tensor]]:
        loss = of(ids, labels=ids).loss
        loss.backward()
        return float(loss.detach()), {name: parameter.grad for name, parameter in of.named_parameters()}

    loss, gradients = step(copy.deepcopy(model))
    for other, found in on_ranks(model, autoplan.plan(model, cp_size=2), step):
        assert other == pytest.approx(loss, rel=1e-5)
        for name, gradient in gradients.items():
            assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max())), name

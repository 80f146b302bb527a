"""Attention whose heads the ranks of cp do not divide: a rank attends with its own queries, to all keys and values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.bias import CausalBias
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import autoplan
from autoplan.check.ranks.run import count_collectives, run_ranks
from autoplan.common.errors import PlanMismatchError
from autoplan.execute.hooks import halo
from autoplan.forecast.recording.kernels import flops_of
from autoplan.values import AttendAcross, ExchangeToPieces

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default

HEADS = {2: (3, 1), 4: (6, 3)}  # ranks: heads, and of them keys


@pytest.fixture(scope="module", params=HEADS)
def made(request: Any) -> tuple[int, Any, autoplan.Plan]:
    ranks: int = request.param
    heads, keys = HEADS[ranks]
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    torch.manual_seed(0)
    config = LlamaConfig(num_attention_heads=heads, num_key_value_heads=keys, head_dim=8, **sizes)
    model = LlamaForCausalLM(config).eval().double()
    return ranks, model, autoplan.plan(model, cp_size=ranks)


def on_ranks(made: tuple[int, Any, autoplan.Plan], run: Any) -> list[Any]:
    ranks, model, plan = made
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def rank(number: int) -> Any:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        return run(autoplan.parallelize(copies[number], mesh, plan))

    return run_ranks(rank, ranks)


def test_the_plan_says_so(made: Any) -> None:
    ranks, _, plan = made
    (attends,) = [one for one in plan.runtime.instructions if isinstance(one, AttendAcross)]
    assert attends.pattern == "model.layers.*.self_attn"
    assert not [one for one in plan.runtime.instructions if isinstance(one, ExchangeToPieces)]
    traffic = plan.communication[0]
    assert traffic.forward.keys() == {"all_gather"} and tuple(traffic.forward.values()) == (traffic.least_forward,)
    assert not [finding for finding in plan.findings if finding.check == "communication"]
    assert "with the keys and values of all ranks" in plan.explain("model.layers.1.self_attn")
    assert f"are not divisible by {ranks} ranks" in plan.explain("model.layers.1.self_attn.q_proj")
    assert "for its own queries" in plan.explain("model.layers.1.self_attn.q_proj")


def test_compiled_code_is_refused_before_ranks_could_wait_for_each_other(made: Any) -> None:
    def run(model: Any) -> None:
        model.model.layers[1].compile(backend="eager")
        with pytest.raises(PlanMismatchError, match="compiled, which is not supported over cp"):
            model(input_ids=torch.arange(8)[None])

    on_ranks(made, run)


@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("length", (8, 9, 13))  # of nine positions on four ranks one has none
def test_a_step_is_that_of_one_device(made: Any, length: int, padded: bool) -> None:
    ranks, model, _ = made
    ids = torch.randint(3, 64, (2, length))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given = {"labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask} if padded else {"labels": ids}

    def step(of: Any) -> tuple[Any, dict[str, Any]]:
        loss = of(ids, **given).loss
        loss.backward()
        return loss.detach(), {name: parameter.grad.clone() for name, parameter in of.named_parameters()}

    loss, gradients = step(copy.deepcopy(model))
    for other, found in on_ranks(made, step):
        assert torch.allclose(other, loss, atol=1e-5)  # which the model computes in single precision
        for name, gradient in gradients.items():
            assert torch.allclose(found[name], gradient, rtol=1e-9, atol=1e-6), name


def test_what_is_sent_is_what_the_plan_says(made: Any) -> None:
    """Keys and values alone, and at the end the logits."""
    _, _, plan = made
    ids = torch.randint(3, 64, (1, 8))

    def counted(of: Any) -> Any:
        with torch.no_grad(), count_collectives() as counts:
            of(ids)
        return counts

    said = plan.communication[0].forward["all_gather"][0]
    assert all(counts == {"all_gather": 2 * said + 1} for counts in on_ranks(made, counted))


@pytest.mark.parametrize(
    ("how", "length"), [({}, 2), ({}, 9), ({"num_beams": 2}, 5), ({"use_cache": False}, 5)], ids=str
)
def test_it_generates_as_one_device_does(made: Any, length: int, how: dict[str, Any]) -> None:
    _, model, _ = made
    ids = torch.randint(3, 64, (2, length))
    mask = torch.ones_like(ids)
    mask[0, :1] = 0

    def generated(of: Any) -> Any:
        how_all = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "output_logits": True, **how}
        done = of.generate(ids, attention_mask=mask, return_dict_in_generate=True, **how_all)
        return done.sequences, torch.stack(done.logits)

    sequences, logits = generated(model)
    for others, found in on_ranks(made, generated):
        assert torch.equal(others, sequences)
        assert torch.allclose(found, logits)


def test_a_step_after_generating_is_on_own_positions(made: Any) -> None:
    ids = torch.randint(3, 64, (1, 8))

    def counted(of: Any) -> Any:
        of.generate(ids, max_new_tokens=2, do_sample=False)
        with torch.no_grad(), count_collectives() as counts:
            of(ids)
        return counts

    said = made[2].communication[0].forward["all_gather"][0]
    assert all(counts == {"all_gather": 2 * said + 1} for counts in on_ranks(made, counted))


@pytest.mark.parametrize("given", (True, False))
def test_a_cache_of_own_positions_is_refused_by_name(made: Any, given: bool) -> None:
    """It was filled in a call with gradients, or made in one that did not ask for it."""
    ids = torch.randint(3, 64, (1, 8))

    def called(of: Any) -> Any:
        cache = DynamicCache() if given else None
        with torch.set_grad_enabled(given):
            cache = of(ids, past_key_values=cache).past_key_values
        with torch.no_grad(), pytest.raises(PlanMismatchError, match="use_cache=False"):
            of(ids[:, :1], past_key_values=cache)

    on_ranks(made, called)


def test_a_mask_that_is_not_in_memory_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU is given it; a CPU makes it anyway."""
    query, key = torch.rand(1, 2, 3, 8), torch.rand(1, 2, 7, 8)
    options = halo._causal_of_the_last(3, 7, query)
    with monkeypatch.context() as patched, FlopCounterMode(display=False):
        patched.setattr(torch.Tensor, "is_cuda", True)
        other = halo._causal_of_the_last(3, 7, query)
    assert isinstance(other["attn_mask"], CausalBias)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(sdpa(query, key, key, **options), sdpa(query, key, key, **other))


def test_operations_are_those_of_the_rank_with_most_keys() -> None:
    """The last of four ranks: a quarter of the queries, seven sixteenths of what a causal attention computes."""
    query, key = (torch.empty(1, 1, length, 8, device="meta") for length in (16, 64))
    whole, last = (flops_of(_ATTENTION, (q, key, key), {"is_causal": True}, None) for q in (key, query))
    assert last * 16 == whole * 7

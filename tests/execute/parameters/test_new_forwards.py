"""A forward that a library sets on a sharded model, to compute a loss without logits, reads whole weights."""

from __future__ import annotations

import copy
import types
from math import prod
from typing import Any

import pytest
import torch
from mesh_toys import mesh_of
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan
from autoplan.check.ranks.run import run_ranks

CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=101, max_position_embeddings=32,
)  # fmt: skip
IDS = torch.randint(0, 101, (2, 7), generator=torch.Generator().manual_seed(0))


def with_fused_head(model: Any) -> Any:
    """As TRL and Liger do it: the head is not called, and its weight read."""
    original = model.forward

    def fused(self: Any, input_ids: torch.Tensor, labels: torch.Tensor | None = None, fuse: bool = False) -> Any:
        if not fuse:
            return original(input_ids=input_ids, labels=labels)
        hidden = self.model(input_ids=input_ids).last_hidden_state[:, :-1]
        scores = (hidden @ self.get_output_embeddings().weight.T).log_softmax(-1)
        return {"log_probs": scores.gather(-1, labels[:, 1:, None]).squeeze(-1)}

    model.forward = types.MethodType(fused, model)
    return model


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_its_value_and_gradients_are_those_of_the_whole_model(sizes: dict[str, int], tied: bool) -> None:
    torch.manual_seed(0)
    whole = LlamaForCausalLM(LlamaConfig(**CONFIG.to_dict() | {"tie_word_embeddings": tied})).double()
    plan = autoplan.plan(whole, tp_size=2, prove="none")
    assert any(rule.dim == 0 for rule in plan.runtime.parameters if "lm_head" in rule.pattern or tied)
    ranks = [copy.deepcopy(whole) for _ in range(prod(sizes.values()))]
    alone = with_fused_head(whole)
    wanted = alone(IDS, IDS, fuse=True)["log_probs"]
    wanted.mean().backward()
    plain = alone(IDS, IDS).loss.item()

    def rank_body(rank: int) -> None:
        mesh = mesh_of(**sizes)
        model = with_fused_head(autoplan.parallelize(ranks[rank], mesh, plan))
        at = mesh.get_local_rank("dp_shard") if "dp_shard" in sizes else None
        mine = slice(None) if at is None else slice(at, at + 1)
        found = model(IDS[mine], IDS[mine], fuse=True)["log_probs"]
        torch.testing.assert_close(found, wanted[mine].detach())
        found.mean().backward()
        for name, gradient in autoplan.full_tensors(model, grads=True).items():
            torch.testing.assert_close(gradient, whole.get_parameter(name).grad, msg=name)
        if at is None:
            assert abs(model(IDS, IDS).loss.item() - plain) < 1e-5  # the loss is of single precision

    run_ranks(rank_body, prod(sizes.values()))

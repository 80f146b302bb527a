"""`parallelize` on models without storage, in a world of fake ranks of any size: shapes at full size, nothing sent."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import autoplan
from autoplan.capture.fold import fold
from autoplan.forecast.sharded import fake_mesh


def _llama(**sizes: Any) -> LlamaConfig:
    known = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}  # fmt: skip
    return LlamaConfig(**known | sizes)


def _fake(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    def fake(tensor: torch.Tensor, name: str) -> torch.Tensor:
        with mode:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

    return fold(model, fake, fold=False).module


def _local(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    ("dims", "options"),
    [
        ({"tp": 8}, {}),
        ({"dp_shard": 64, "tp": 8}, {"activation_checkpointing": "selective"}),
        pytest.param(
            {"dp_replicate": 2, "dp_shard": 4, "tp": 8}, {"activation_checkpointing": True}, marks=pytest.mark.slow
        ),
    ],
)
def test_forward_backward_and_step_run_without_storage(dims: dict[str, int], options: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(_llama()).bfloat16()
    plan = autoplan.plan(model, tp_size=8, prove="none")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_mesh(dims) as mesh:
        sharded = _fake(model, mode)
        autoplan.parallelize(sharded, mesh, plan, check=False, **options)
        with mode:
            sharded.train()
            optimizer = torch.optim.AdamW(sharded.parameters())
            ids = torch.zeros(2, 64, dtype=torch.long)
            outputs = sharded(input_ids=ids, labels=ids, use_cache=False)
            assert tuple(outputs.logits.shape) == (2, 64, 128256) and outputs.loss.dim() == 0
            outputs.loss.backward()
            optimizer.step()
        weight = sharded.model.layers[0].self_attn.q_proj.weight
        assert tuple(weight.shape) == (4096, 4096)
        assert _local(weight).shape[0] == 4096 // 8 // dims.get("dp_shard", 1)
        assert _local(weight.grad).shape == _local(weight).shape


def test_whole_experts_of_a_rank_get_an_even_share_of_the_tokens() -> None:
    config = MixtralConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
                           num_key_value_heads=4, vocab_size=512, num_local_experts=8)  # fmt: skip
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        model = MixtralForCausalLM(config).bfloat16()
    plan = autoplan.plan(model, tp_size=4, ep_size=4, prove="none")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    seen: list[int] = []
    with fake_mesh({"tp": 4}) as mesh:
        sharded = _fake(model, mode)
        autoplan.parallelize(sharded, mesh, plan, check=False)
        sharded.model.layers[0].mlp.experts.act_fn.register_forward_hook(lambda m, a, out: seen.append(len(out)))
        with mode:
            ids = torch.zeros(2, 16, dtype=torch.long)
            sharded(input_ids=ids, labels=ids).loss.backward()
    assert seen == [2 * 16 * 2 // 4]  # of all pairs of a token and one of its two experts


def test_a_model_on_the_meta_device_runs_forward_and_backward() -> None:
    block = nn.Sequential(nn.Linear(8192, 28672, device="meta"), nn.ReLU(), nn.Linear(28672, 8192, device="meta"))
    plan = autoplan.plan(block, tp_size=8, prove="none", inputs={"input": torch.randn(3, 8192)})
    with fake_mesh({"tp": 8}, rank=5) as mesh:
        autoplan.parallelize(block, mesh, plan, check=False)
        out = block(torch.randn(3, 8192, device="meta"))
        out.sum().backward()
    assert out.shape == (3, 8192) and _local(block[0].weight.grad).shape == (28672 // 8, 8192)


def test_a_live_process_group_is_put_back() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    said = sys.excepthook
    try:
        with fake_mesh({"dp_shard": 512, "tp": 8}, rank=17) as inner:
            assert sys.excepthook is not said
            assert list(inner.get_coordinate()) == [2, 1]
        assert torch.distributed.get_world_size() == 2 and sys.excepthook is said
    finally:
        torch.distributed.destroy_process_group()


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(autoplan.AutoplanError, match="no rank 8"), fake_mesh({"tp": 8}, rank=8):
        pass

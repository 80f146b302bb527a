"""The folded copy keeps every kind of block, runs, and leaves the user's model as it was."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from torch import nn
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Sam2HieraDetConfig,
    Sam2HieraDetModel,
)

from autoplan.capture.capture import capture_fake
from autoplan.capture.fold import fold
from autoplan.common.errors import CaptureError

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def on_meta(model_class, config):
    with torch.device("meta"):
        return model_class(config)


def small_llama(layers: int = 6) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_hidden_layers=layers)).eval()


def kept(module: nn.Module, container: str) -> list[str]:
    return list(module.get_submodule(container)._modules)


def test_llama_70b_folds_quickly():
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    start = time.process_time()
    model = on_meta(LlamaForCausalLM, LlamaConfig(**sizes, num_hidden_layers=80))
    building = time.process_time() - start
    spent = []
    for _ in range(3):  # garbage may be collected in any one of them
        start = time.process_time()
        folded = fold(model)
        spent.append(time.process_time() - start)
    assert min(spent) < 2 * building
    assert kept(folded.module, "model.layers") == ["0", "1", "79"]
    members = dict(folded.folds[0].members)
    assert members == {str(layer): "1" for layer in range(2, 79)}


@pytest.mark.parametrize(
    ("model_class", "config", "expected"),
    [
        (DeepseekV3ForCausalLM, DeepseekV3Config(), ["0", "1", "3", "4", "60"]),  # three dense blocks, then experts
        (Gemma3ForCausalLM, Gemma3TextConfig(), ["0", "1", "5", "11", "25"]),  # full attention every sixth
        (Qwen3NextForCausalLM, Qwen3NextConfig(), ["0", "1", "3", "7", "47"]),  # attention every fourth
        (BambaForCausalLM, BambaConfig(attn_layer_indices=[9, 18, 27]), ["0", "1", "9", "18", "31"]),
    ],
)
def test_every_kind_is_kept_twice(model_class, config, expected):
    model = on_meta(model_class, config)
    folded = fold(model)
    assert kept(folded.module, "model.layers") == expected
    representatives = {by for _, by in folded.folds[0].members}
    assert representatives <= {expected[1], expected[3]}
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert all(shapes[name] == p.shape for name, p in folded.module.named_parameters())


def test_per_layer_lists_can_be_read_by_index_and_by_place():
    folded = fold(on_meta(Gemma3ForCausalLM, Gemma3TextConfig()))
    layers, types = folded.module.model.layers, folded.module.config.layer_types
    assert [types[place] for place in range(5)] == ["sliding_attention"] * 2 + ["full_attention"] * 2 + [
        "sliding_attention"
    ]
    assert [types[int(key)] for key in layers._modules] == [types[place] for place in range(5)]
    assert Gemma3TextConfig().layer_types[2] == "sliding_attention"


def test_the_original_is_untouched_and_its_hooks_do_not_run():
    model = small_llama()
    calls: list[str] = []
    model.model.layers[1].register_forward_hook(lambda *_: calls.append("block"))
    model.register_forward_pre_hook(lambda *_: calls.append("model"))
    config = copy.deepcopy(model.config.to_dict())
    tensors = {name: (id(p), p.data_ptr(), p._version) for name, p in model.named_parameters()}
    modules = [(name, id(module), module.training) for name, module in model.named_modules()]
    random = torch.get_rng_state()
    folded = fold(model, lambda tensor, name: nn.Parameter(tensor.detach().clone()))
    with torch.no_grad():
        folded.module(input_ids=torch.arange(10).view(2, 5))
    folded.module.config.num_hidden_layers = 1
    assert calls == []
    assert torch.equal(random, torch.get_rng_state())
    assert model.config.to_dict() == config
    assert {name: (id(p), p.data_ptr(), p._version) for name, p in model.named_parameters()} == tensors
    assert [(name, id(module), module.training) for name, module in model.named_modules()] == modules
    assert len(model.model.layers[1]._forward_hooks) == 1


def test_the_copy_computes_what_its_blocks_compute():
    model = small_llama(layers=2)
    ids = torch.arange(10).view(2, 5)
    with torch.no_grad():
        expected = model(input_ids=ids, output_hidden_states=True)  # installs hooks of the library itself
        got = fold(model, lambda tensor, _: tensor.clone()).module(input_ids=ids, output_hidden_states=True)
    assert torch.equal(expected.logits, got.logits)
    assert len(got.hidden_states) == len(expected.hidden_states)


def test_ties_stay_ties_and_each_tensor_is_asked_for_once():
    model = LlamaForCausalLM(LlamaConfig(**SMALL, num_hidden_layers=5, tie_word_embeddings=True))
    asked: list[str] = []

    def replace(tensor, name):
        asked.append(name)
        return nn.Parameter(torch.empty_like(tensor, device="meta"))

    module = fold(model, replace).module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert len(asked) == len(set(asked))
    assert not any(name.startswith("model.layers.3.") for name in asked)


def test_all_blocks_on_request():
    folded = fold(small_llama(), fold=False)
    assert folded.folds == ()
    assert kept(folded.module, "model.layers") == list("012345")
    assert all(parameter.is_meta for parameter in folded.module.parameters())


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))


class Block(nn.Module):
    def __init__(self, index: int, window: int = 0) -> None:
        super().__init__()
        self.index, self.rate, self.window = index, 0.1 * (index + 1), window
        self.norm, self.mixture = nn.LayerNorm(8), Mixture()
        self.extra = torch.ones(3)


class Model(nn.Module):
    def __init__(self, windows: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(index, window) for index, window in enumerate(windows))
        self.also = list(self.blocks)  # a plain list that holds the blocks again


def test_counters_and_rates_do_not_make_kinds_but_sizes_do():
    assert kept(fold(Model([0] * 6)).module, "blocks") == ["0", "1", "5"]
    assert kept(fold(Model([0, 0, 7, 0, 7, 7])).module, "blocks") == ["0", "1", "2", "4", "5"]


def test_kept_blocks_are_indexed_by_place():
    blocks = nn.ModuleList(Block(8) for _ in range(6))
    copied = fold(nn.Sequential(blocks)).module[0]
    assert list(copied._modules) == ["0", "1", "5"]
    assert [copied[place] for place in (0, 1, 2, -1)] == [*copied, copied._modules["5"]]
    with pytest.raises(IndexError):
        copied[3]
    assert blocks[5] is blocks._modules["5"]  # the original counts as before


def test_experts_are_never_folded():
    module = fold(Model([0] * 6)).module
    assert kept(module, "blocks.1.mixture.experts") == ["0", "1", "2", "3"]


def test_tensors_and_lists_beside_modules_follow():
    folded = fold(Model([0] * 6), lambda tensor, name: torch.empty_like(tensor, device="meta"))
    assert folded.module.blocks[0].extra.is_meta
    stands = [0, 1, 1, 1, 1, 5]
    blocks = folded.module.blocks._modules
    assert [folded.module.also[place] is blocks[str(stands[place])] for place in range(6)] == [True] * 6


def test_what_cannot_be_copied_is_named():
    model = small_llama(layers=3)
    model.model.guard = threading.Lock()
    with pytest.raises(CaptureError, match=r"model\.guard"):
        fold(model)


def test_results_that_are_counted_by_blocks_are_those_of_all_blocks() -> None:
    """It returns what the last block of each stage made, by the blocks' numbers: of fewer blocks it returns others."""
    model = on_meta(Sam2HieraDetModel, Sam2HieraDetConfig(image_size=[64, 64])).eval()
    trace = capture_fake(model, {"forward": {"pixel_values": torch.randn(1, 3, 64, 64)}}).trace
    root = next(visit for visit in trace.visits if visit.module == "")
    stages = [trace.tensors[tensor].shape[-1] for path, tensor in root.outputs if path[0].startswith("intermediate")]
    assert stages == model.config.embed_dim_per_stage


class OfFewBlocks(Sam2HieraDetModel):
    """Runs on a folded copy and not on the model."""

    def forward(self, pixel_values, **how):
        result = super().forward(pixel_values, **how)
        if len(self.blocks) == sum(self.config.blocks_per_stage):
            raise RuntimeError("not with all blocks")
        return result


def test_a_model_that_runs_on_a_folded_copy_alone_is_not_recorded() -> None:
    model = on_meta(OfFewBlocks, Sam2HieraDetConfig(image_size=[64, 64])).eval()
    with pytest.raises(CaptureError, match="not with all blocks"):
        capture_fake(model, {"forward": {"pixel_values": torch.randn(1, 3, 64, 64)}})

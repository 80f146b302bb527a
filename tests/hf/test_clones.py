"""A tiny clone stands for a model only if all that runs in the model runs in the clone, too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, Dinov2Config, HGNetV2Config
from transformers.pytorch_utils import compile_compatible_method_lru_cache

import autoplan
from autoplan.capture.recorder import record
from autoplan.check.pipeline import prove_graph
from autoplan.common.random_values import randomise
from autoplan.hf.inputs.make import make_inputs
from autoplan.hf.shrink import tiny_config
from autoplan.hf.source import resolve
from autoplan.hf.tiny_sizes import VARIANTS, has_listed_stages, related_width, vision_layers
from autoplan.planning import capture_source

# Kinds of layer that come late or seldom: every fourth, every fifth from the fourth on, in rounds of three, chosen by
# a list, or only where the sequence is long.
KINDS = {
    "mllama:MllamaForCausalLM": "MllamaTextCrossAttention",
    "recurrent_gemma:RecurrentGemmaForCausalLM": "RecurrentGemmaAttention",
    "nllb-moe:NllbMoeForConditionalGeneration": "NllbMoeExperts",
    "big_bird:BigBirdForMaskedLM": "BigBirdBlockSparseAttention",
    "bigbird_pegasus:BigBirdPegasusForConditionalGeneration": "BigBirdPegasusBlockSparseAttention",
    "jamba:JambaForCausalLM": "JambaAttention",
    "llama4_text:Llama4ForCausalLM": "Llama4TextMoe",
    "zamba2:Zamba2ForCausalLM": "Zamba2AttentionDecoderLayer",
}


@pytest.mark.parametrize("name", KINDS)
def test_the_seldom_kinds_of_layer_run_in_the_clone(name: str) -> None:
    source = resolve(name)
    clone = source.tiny(dtype=torch.float32)
    feeds = make_inputs(clone, config=clone.config, model_type=source.model_type).feeds
    ran: set[str] = set()
    for module in clone.modules():
        module.register_forward_hook(lambda module, *_: ran.add(type(module).__name__))
    for feed in feeds.values():
        clone(**feed)
    assert KINDS[name] in ran, sorted(ran)


def test_a_proof_says_what_the_clone_never_ran() -> None:
    source = resolve("llama")
    plan = autoplan.plan("llama", 2)
    assert not any("never runs" in finding.message for finding in plan.findings)
    another, _ = record(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), {"forward": {"input": torch.randn(2, 8)}})
    found = [finding.message for finding in prove_graph(source, plan, another).findings]
    assert len(found) == 1 and "never runs Sequential, Tanh:" in found[0], found


def test_what_the_clone_never_ran_is_not_called_proven() -> None:
    source, plan = resolve("llama"), autoplan.plan("llama", 2, prove="none")
    trace = capture_source(source, source.module()).trace
    classes = {name: "Seldom" if name.endswith(".mlp") else kind for name, kind in trace.module_classes.items()}
    proof = prove_graph(source, plan, replace(trace, module_classes=classes))
    unproven = {feed.pattern for feed in proof.stamp(plan.entries) if feed.proof == "unproven"}
    assert unproven == {f"model.layers.*.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert proof.proof.text.endswith("except Seldom, which the tiny clone never runs")


class Folded(nn.Module):
    """A product whose dims of one are squeezed in place, as einsum does it."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.near(torch.tanh(x)))
        apart = hidden.unsqueeze(1) * 2
        apart.squeeze_(1)
        apart = apart + 1
        apart.transpose_(0, 1)
        return x + self.far(apart.transpose(0, 1))


def test_what_is_reshaped_in_place_is_another_value() -> None:
    inputs = {"x": torch.randn(3, 4, 16, dtype=torch.float64)}
    model = Folded().double()
    trace, _ = record(model, {"forward": inputs})
    squeezed = next(op for op in trace.ops if op.name == "squeeze")
    before, after = (trace.tensors[ref.id].shape for ref in (squeezed.args[0], squeezed.outputs[0]))
    assert (before, after) == ((3, 1, 4, 32), (3, 4, 32))
    plan = autoplan.plan(model, 2, inputs=inputs)
    assert plan.proof.ok and {feed.style for feed in plan.entries} == {"colwise", "rowwise"}
    report = autoplan.verify(model, plan, inputs=inputs)
    assert report.ok, report.findings


@compile_compatible_method_lru_cache(maxsize=4)
def waves(places: int, width: int) -> torch.Tensor:
    return torch.arange(places * width, dtype=torch.float64).view(places, width).cos()


class Tables(nn.Module):
    """A table that is kept for all models of the class, by its size."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(16, 32), nn.Linear(32, 16)

    @staticmethod
    @compile_compatible_method_lru_cache(maxsize=4)
    def table(places: int, width: int) -> torch.Tensor:
        return torch.arange(places * width, dtype=torch.float64).view(places, width).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.far(
            torch.tanh(self.near(x + self.table(x.shape[1], x.shape[2]) * waves(x.shape[1], x.shape[2])))
        )


def test_a_recording_leaves_nothing_in_the_caches_of_a_class() -> None:
    inputs = {"x": torch.randn(2, 5, 16, dtype=torch.float64)}
    assert autoplan.plan(Tables().double(), 2, inputs=inputs).proof.ok
    for function in (Tables.table, waves):
        assert type(function(5, 16)) is torch.Tensor  # not one without storage
        assert function(5, 16) is function(5, 16)  # the cache is back


def test_deep_stacks_of_wide_layers_keep_their_size() -> None:
    """Were each to amplify, thirty of them would drown everything in rounding."""
    stack = nn.Sequential(*(nn.Conv1d(256, 256, 7, padding=3) for _ in range(30)))
    randomise(stack)
    with torch.no_grad():
        assert 0.01 < stack(torch.randn(1, 256, 64)).abs().mean() < 100


def test_one_number_per_feature_stays_near_what_it_starts_from() -> None:
    scale = nn.ParameterList([torch.ones(1, 64, 1)])
    randomise(scale)
    assert scale[0].mean() > 0.8


@pytest.mark.parametrize("stages", [["stage2", "stage3", "stage4"], ["stage4"]])
def test_the_tiny_backbone_returns_the_same_stages(stages: list[str]) -> None:
    assert tiny_config(HGNetV2Config(out_features=stages)).out_features == stages


def test_a_backbone_with_fewer_blocks_returns_as_many_outputs() -> None:
    tiny = tiny_config(Dinov2Config(out_indices=[3, 6, 9, 12]))
    assert (tiny.num_hidden_layers, tiny.out_indices) == (4, [1, 2, 3, 4])


# What a tiny clone must keep of its config's numbers: sections, layers that are read, widths that are related.


def test_a_width_stays_the_same_multiple_or_part_of_another() -> None:
    assert related_width(5120, "intermediate", [1280], 128) == 512
    assert related_width(256, "intermediate", [1024], 128) == 32
    assert related_width(5632, "intermediate", [768, 1408], 128) == 512  # the first width that it is a multiple of
    assert related_width(5000, "intermediate", [768], 128) is None
    assert related_width(5120, "vocab", [1280], 128) is None


def test_layers_of_the_vision_tower_that_are_read_exist() -> None:
    assert vision_layers({"vision_feature_layers": [-2, -11, 6], "insert_layer_id": 6}, 2) == {
        "vision_feature_layers": [-2, -2, 1],
        "insert_layer_id": 1,
    }
    assert vision_layers({"vision_feature_layer": -2}, 4) == {}
    tiny = tiny_config(AutoConfig.for_model("vipllava"))
    assert all(-tiny.vision_config.num_hidden_layers <= layer for layer in tiny.vision_feature_layers)


def test_rotary_sections_fill_half_a_head_before_the_class_looks() -> None:
    tiny = tiny_config(AutoConfig.for_model("cosmos3_edge_text"))
    assert sum(tiny.rope_parameters["mrope_section"]) == tiny.head_dim // 2


def test_listed_stages_keep_their_widths_where_free_ones_do_not_run() -> None:
    config = AutoConfig.for_model("efficientnet")
    assert has_listed_stages(vars(config)) and not has_listed_stages({"depths": [2], "hidden_size": 4})
    assert tiny_config(config).hidden_dim == VARIANTS[0].hidden
    assert tiny_config(config, shrink="related").hidden_dim == config.hidden_dim

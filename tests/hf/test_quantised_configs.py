"""Quantised configs: read or refused by name, planned as stored, and legal where servers can run them."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from releases import since
from slow_cases import slow_but
from transformers import AutoConfig, LlamaConfig, PretrainedConfig

import autoplan
from autoplan.common.errors import IndivisibleError, SourceError
from autoplan.values import Plan
from autoplan.values.reasons import InsideQuantisedBlock, OfDim

SHAPES = Path(__file__).parents[2] / "examples" / "shapes" / "quantised"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


@cache
def published(name: str) -> PretrainedConfig:
    """The config of a public checkpoint, with few layers and small pictures: what is asked here is the same in each."""
    config = AutoConfig.from_pretrained(SHAPES / name)
    text = config.get_text_config()
    text.num_hidden_layers = 4
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:4]
    if getattr(tower := getattr(config, "vision_config", None), "image_size", 0) > 500:
        tower.image_size = 448
    return config


def llama(quantised: dict[str, Any], **sizes: int) -> LlamaConfig:
    base = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4,
            "num_hidden_layers": 3, "vocab_size": 1024}  # fmt: skip
    config = LlamaConfig(**(base | sizes), architectures=["LlamaForCausalLM"])
    config.quantization_config = copy.deepcopy(quantised)
    return config


def plan(config: Any, tp: int, **how: Any) -> Plan:
    return autoplan.plan(config, tp_size=tp, prove="none", **how)


CASES = [  # what servers refuse: name, tp, what a rank would hold, block
    ("qwen3-30b-a3b-fp8", 4, "192 of 768, 1.5 quantised blocks of 128"),
    ("qwen3-235b-a22b-fp8", 8, "192 of 1536, 1.5 quantised blocks of 128"),
    ("qwen3-coder-480b-a35b-fp8", 8, "320 of 2560, 2.5 quantised blocks of 128"),
    ("minimax-m2.5-fp8", 8, "192 of 1536, 1.5 quantised blocks of 128"),
    ("qwen3.6-35b-a3b-fp8", 8, "64 of 512, 0.5 quantised blocks of 128"),
    ("deepseek-r1-fp8", 32, "576 of 18432, 4.5 quantised blocks of 128"),
    ("qwen2.5-vl-72b-awq", 2, "14784 of 29568, 115.5 quantised blocks of 128"),
]
LONG = ("qwen3.6", "qwen2.5")
SLOW = (*LONG, "qwen3-235b", "qwen3-coder")


@pytest.mark.parametrize(
    ("name", "tp", "numbers"),
    [pytest.param(*case, marks=pytest.mark.slow if case[0].startswith(SLOW) else ()) for case in CASES],
)
def test_published_sizes_are_refused_with_ways_out(name: str, tp: int, numbers: str) -> None:
    config = published(name)
    with pytest.raises(IndivisibleError, match="Options, in order") as refused:
        plan(config, tp, strict=True)
    assert numbers in str(refused.value)
    made = plan(config, tp)
    assert tp not in made.legal_tp and tp // 2 in (*made.legal_tp, 1)
    found = [finding for finding in made.findings if finding.check == "quantised" and finding.level == "warn"]
    assert any(numbers in finding.message and "options, in order" in finding.hint for finding in found)
    whole = [item for item in made.replicated for why in item.why
             if isinstance(why, OfDim) and isinstance(why.why, InsideQuantisedBlock)]  # fmt: skip
    assert bool(whole) == any(finding.bytes for finding in found), "what stays whole says so"


@pytest.mark.parametrize("name", ["qwen3-30b-a3b-fp8", "qwen3-coder-480b-a35b-fp8", "minimax-m2.5-fp8"])
def test_experts_apart_is_a_way_out(name: str) -> None:
    made = plan(published(name), 8, ep_size=8, strict=name != "qwen3-30b-a3b-fp8")  # whose 4 kv heads are shared
    experts = [weight for weight in made.packed if ".experts." in weight.name]
    assert experts and all(t.dim == 0 for weight in experts for t in weight.tensors if len(t.shape) > 1)
    assert not [finding for finding in made.findings if finding.check == "quantised" and finding.level == "warn"]


def test_scales_are_cut_with_their_weight() -> None:
    made = plan(published("deepseek-r1-fp8"), 8)
    cut = {w.name: {t.name: (t.shape, t.segment) for t in w.tensors} for w in made.packed}
    assert cut["model.layers.3.mlp.experts.gate_up_proj"] == {
        "gate_up_proj": ((256, 4096, 7168), "1:2048!|2048!"),
        "gate_up_proj_scale_inv": ((256, 32, 56), "1:16!|16!"),
    }
    assert cut["model.layers.*.self_attn.q_b_proj.weight"]["weight_scale_inv"] == ((192, 12), "0:192!")
    entry = next(entry for entry in made.entries if entry.pattern.endswith("self_attn.o_proj"))
    assert entry.parameters == ("weight", "weight_scale_inv") and entry.segments == ("1:128!*128", "1:128!")
    assert "weight_scale_inv" in made.explain("model.layers.0.self_attn.o_proj")


QUICK = ("deepseek-r1-fp8", "gpt-oss-20b-mxfp4", "llama-3.1-405b-awq", "llama-3.1-70b-gptq-act-order",
         "llama-3.1-8b-bnb-nf4", "llama-3.3-70b-nvfp4", "phi-4-mini-torchao-int4", "qwen3-30b-a3b-fp8")  # fmt: skip


@pytest.mark.parametrize("name", slow_but(sorted(path.name for path in SHAPES.iterdir()), *QUICK))
def test_no_public_config_is_read_as_unquantised(name: str) -> None:
    made = plan(published(name), 2)
    assert made.packed and made.findings, name
    assert all(t.bytes > 0 for weight in made.packed for t in weight.tensors)
    stored, plain = (sum(x) for x in zip(*[(w.bytes, w.elements * 2) for w in made.packed], strict=True))
    assert stored < 0.6 * plain


# ------------------------------------------------------------------------------------------------- methods, one by one


def tensors(made: Plan, ending: str) -> dict[str, tuple[tuple[int, ...], str]]:
    weight = next(weight for weight in made.packed if weight.name.endswith(ending))
    return {t.name: (t.shape, t.segment) for t in weight.tensors}


def test_gptq_in_order_and_in_order_of_activation() -> None:
    down = "down_proj.weight"
    assert tensors(plan(llama(GPTQ), 4), down) == {
        "qweight": ((256, 1024), "0:256!"), "qzeros": ((16, 128), "0:16!"),
        "scales": ((16, 1024), "0:16!"), "g_idx": ((2048,), "0:2048!"),
    }  # fmt: skip
    assert tensors(plan(llama(GPTQ | {"desc_act": True}), 4), down) == {
        "qweight": ((256, 1024), "0:256!"), "qzeros": ((16, 128), "whole"),
        "scales": ((16, 1024), "whole"), "g_idx": ((2048,), "0:2048!"),
    }  # fmt: skip
    assert 32 not in plan(llama(GPTQ, num_attention_heads=32, num_key_value_heads=32), 2).legal_tp  # 64 = half a group


def test_three_bits_and_one_group() -> None:
    made = plan(llama(GPTQ | {"bits": 3, "group_size": -1}), 4)
    assert tensors(made, "down_proj.weight")["qweight"] == ((192, 1024), "0:64!*3")
    assert tensors(made, "down_proj.weight")["scales"] == ((1, 1024), "whole")
    assert tensors(made, "gate_proj.weight")["qzeros"] == ((1, 192), "1:64!*3")


def test_awq_packs_outputs() -> None:
    assert tensors(plan(llama(AWQ), 4), "gate_proj.weight") == {
        "qweight": ((1024, 256), "1:256!"), "qzeros": ((8, 256), "1:256!"), "scales": ((8, 2048), "1:2048!"),
    }  # fmt: skip


def test_bitsandbytes_flat() -> None:
    nf4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    made = plan(llama(nf4), 4)
    assert tensors(made, "gate_proj.weight")["weight"] == ((1048576, 1), "0:1048576!")
    assert tensors(made, "down_proj.weight")["weight.absmax"] == ((32768,), "0:1024*32!")


def test_modules_that_stay_as_they_are() -> None:
    kept = llama(FP8 | {"modules_to_not_convert": ["model.layers.1", "o_proj", "lm_head"]})
    packed = {weight.name for weight in plan(kept, 2).packed}
    assert not any("o_proj" in name or "layers.1." in name or "*" in name for name in packed)
    assert "model.layers.0.mlp.up_proj.weight" in packed
    dynamic = llama(GPTQ | {"dynamic": {"-:.*q_proj": {}, "+:.*down_proj": {"bits": 8}}})
    made = plan(dynamic, 2)
    assert not any("q_proj" in weight.name for weight in made.packed)
    assert tensors(made, "down_proj.weight")["qweight"][0] == (512, 1024)


def test_mixed_groups_of_compressed_tensors() -> None:
    def weights(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
        return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **more}

    mixed = {
        "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head", "re:.*k_proj$"],
        "config_groups": {
            "a": {"targets": ["Linear"], "format": "float-quantized", "weights": weights(8, "float", "channel")},
            "b": {"targets": ["re:.*down_proj$"], "format": "pack-quantized",
                  "weights": weights(4, "int", "group", group_size=64)},
        },
    }  # fmt: skip
    made = plan(llama(mixed), 2)
    assert tensors(made, "down_proj.weight")["weight_packed"] == ((1024, 256), "1:256!")
    assert tensors(made, "up_proj.weight")["weight_scale"] == ((2048, 1), "0:2048!")
    assert not any("k_proj" in weight.name for weight in made.packed)


def test_blocks_and_heads() -> None:
    """Two heads of 64 to a block: eight heads divide by eight ranks, their blocks do not."""
    made = plan(llama(FP8, hidden_size=512, num_key_value_heads=8), 4)
    assert 8 not in made.legal_tp and 4 in made.legal_tp
    assert tensors(made, "q_proj.weight")["weight_scale_inv"] == ((4, 4), "0:4!")


# ---------------------------------------------------------------------------------------------------------- bad input


UNDESCRIBED = ("aqlm", "quanto", "quark", "hqq", "eetq", "higgs", "vptq", "spqr", "bitnet", "gguf", "fp_quant", "sinq",
               "metal", "gemma", "fouroversix")  # fmt: skip


@pytest.mark.parametrize("method", UNDESCRIBED)
def test_undescribed_methods_are_refused_by_name(method: str) -> None:
    with pytest.raises(SourceError, match=f"'{method}'"):
        plan(llama({"quant_method": method}), 2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"quant_method": "gptq", "group_size": 128}, "bits"),
        (GPTQ | {"bits": 5}, "5 bits"),
        (GPTQ | {"group_size": 0}, "group_size is 0"),
        (FP8 | {"weight_block_size": [128]}, "cannot be read"),
        (FP8 | {"modules_to_not_convert": ["model", "lm_head"]}, "applies to no weight of LlamaForCausalLM"),
        (AWQ | {"version": "gemv"}, "'gemv'"),
    ],
)
def test_configs_that_cannot_be_meant(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SourceError, match=said):
        plan(llama(wrong), 2)


def test_every_method_of_the_library_is_read_or_refused() -> None:
    """Canary: a new method of transformers must not be dropped in silence."""
    since((5, 16), "nvfp4")
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    from autoplan.hf.quantised.methods import _METHODS

    described = {name for name in AUTO_QUANTIZATION_CONFIG_MAPPING if name in _METHODS}
    assert {"fp8", "mxfp4", "awq", "gptq", "compressed-tensors", "torchao", "nvfp4", "fbgemm_fp8"} <= described


def test_shapes_are_those_of_the_library() -> None:
    """Float8 modules, as transformers builds them on meta."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.utils.quantization_config import FineGrainedFP8Config

    config = published("qwen3-30b-a3b-fp8")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    own = FineGrainedFP8Config(weight_block_size=(128, 128))
    replace_with_fp8_linear(model, modules_to_not_convert=["lm_head"], quantization_config=own, pre_quantized=True)
    shapes = {name: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in model.named_parameters()}
    for weight in plan(config, 1).packed:
        for tensor in weight.tensors:
            name = f"{weight.owner}.{tensor.name}".replace("*", "0")
            assert shapes[name] == (tensor.shape, tensor.dtype), name


def test_plan_files_hold_it(tmp_path: Path) -> None:
    made = plan(llama(FP8), 2)
    made.save(tmp_path / "plan.yaml")
    assert autoplan.load_plan(tmp_path / "plan.yaml") == made
    assert json.dumps(made.to_dict())


# ------------------------------------------------------------------------------------------- what attacks have found


@pytest.mark.parametrize("tp", [3, 16, 64])
def test_legal_sizes_do_not_depend_on_the_size_that_was_asked(tp: int) -> None:
    """Where nothing divides other axes are split: MiniMax's sizes at tp 16 were said to be 1 and 2."""
    config = published("minimax-m2.5-fp8")
    sizes = plan(config, 2).legal_tp
    assert plan(config, tp).legal_tp == sizes and 4 in sizes and tp not in sizes


def test_stacks_that_are_turned_and_do_not_say_so() -> None:
    """Llama 4's experts hold inputs before outputs; their checkpoints list linear layers."""
    from transformers import Llama4TextConfig

    config = Llama4TextConfig(
        hidden_size=512, intermediate_size=1024, intermediate_size_mlp=2048, num_hidden_layers=2, head_dim=128,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=4, vocab_size=256,
        architectures=["Llama4ForCausalLM"],
    )  # fmt: skip
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    config.quantization_config = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "re:.*router"],
        "config_groups": {"a": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    made = plan(config, 2)
    assert tensors(made, "experts.gate_up_proj") == {
        "gate_up_proj": ((4, 2048, 512), "1:1024!|1024!"), "gate_up_proj_scale": ((4, 2048, 1), "1:1024!|1024!"),
    }  # fmt: skip
    assert tensors(made, "experts.down_proj") == {
        "down_proj": ((4, 512, 1024), "2:1024!"), "down_proj_scale": ((4, 512, 1), "whole"),
    }  # fmt: skip


def test_what_was_quantised_apart_has_its_own_scales_in_a_stack() -> None:
    """One scale for gate, one for up; of each an index of groups."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=256, moe_intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=64, num_experts=4, num_experts_per_tok=2, vocab_size=256, architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    config.quantization_config = GPTQ | {"group_size": 64, "desc_act": True}
    assert tensors(plan(config, 2), "experts.gate_up_proj")["gate_up_proj_g_idx"] == ((4, 2, 256), "whole")
    assert tensors(plan(config, 2), "experts.down_proj")["down_proj_g_idx"] == ((4, 1, 256), "2:256!")
    config.quantization_config = FP8 | {"weight_block_size": None}
    assert tensors(plan(config, 2), "experts.gate_up_proj")["gate_up_proj_scale_inv"] == ((4, 2, 1), "whole")


def test_a_kernel_that_takes_no_bias() -> None:
    """transformers' nvfp4 leaves linear layers with a bias, and odd sizes, as they are."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        hidden_size=256, intermediate_size=520, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=256, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    config.quantization_config = {"quant_method": "nvfp4"}
    assert {weight.name.rpartition("layers.")[2] for weight in plan(config, 2).packed} == {"*.self_attn.o_proj.weight"}


@pytest.mark.parametrize("packing", ["tile_packed_to_4d", {"_type": "Int4PackingFormat", "_data": "PRESHUFFLED"}])
def test_packings_of_one_kernel_are_refused(packing: Any) -> None:
    said = {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 128, "int4_packing_format": packing}}
    with pytest.raises(SourceError, match="^torchao's int4 in the packing '(tile_packed_to_4d|preshuffled)'"):
        plan(llama({"quant_method": "torchao", "quant_type": {"default": said}}), 2)

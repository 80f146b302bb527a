"""Small models under every method that is described, and quantised checkpoints of them with random numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from packing import random_parts
from safetensors.torch import save_file
from torch import nn

import autoplan
from autoplan.common.patterns import matches
from autoplan.execute.quantised.formats import dequantise
from autoplan.hf.quantised.methods import method_of
from autoplan.hf.quantised.schemes import Method, Plain, packed_weight
from autoplan.values.quantised import PackedWeight


def compressed(format: str, bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **more}
    groups = {"a": {"targets": ["Linear"], "format": format, "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


def torchao(kind: str, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": fields}}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
METHODS: dict[str, dict[str, Any]] = {
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "fp8 tensor": {"quant_method": "fp8", "weight_block_size": None},
    "fp8 rows": {"quant_method": "fbgemm_fp8"},
    "fp4 experts": {"quant_method": "fp8", "weight_block_size": [32, 32], "expert_dtype": "fp4"},
    "mxfp8": {"quant_method": "mxfp8"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "gptq": GPTQ,
    "gptq 2 bits": GPTQ | {"bits": 2},
    "gptq 3 bits": GPTQ | {"bits": 3},
    "gptq 8 bits, one group": GPTQ | {"bits": 8, "group_size": -1},
    "gptq act order": GPTQ | {"desc_act": True},
    "gptq v2": GPTQ | {"checkpoint_format": "gptq_v2"},
    "bnb nf4": NF4,
    "bnb nf4 double": NF4 | {"bnb_4bit_use_double_quant": True},
    "bnb int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "ct fp8 channel": compressed("float-quantized", 8, "float", "channel"),
    "ct fp8 tensor": compressed("float-quantized", 8, "float", "tensor"),
    "ct fp8 block": compressed("float-quantized", 8, "float", "block", block_structure=[32, 32]),
    "ct int8 zero points": compressed("int-quantized", 8, "int", "channel"),
    "ct packed": compressed("pack-quantized", 4, "int", "group", group_size=32),
    "ct packed, zero points": compressed("pack-quantized", 4, "int", "group", group_size=32, symmetric=False),
    "ct packed act order": compressed("pack-quantized", 4, "int", "group", group_size=32, actorder="group"),
    "ct packed 8 bits": compressed("pack-quantized", 8, "int", "channel"),
    "ct nvfp4": compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16),
    "ct mxfp4": compressed("mxfp4-pack-quantized", 4, "float", "group", group_size=32),
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao float8": torchao("Float8WeightOnlyConfig"),
    "torchao int4": torchao("Int4WeightOnlyConfig", group_size=32),
}


def weights_of(method: Method, shapes: dict[str, tuple[int, ...]]) -> list[PackedWeight]:
    scheme = method.groups[-1].scheme
    assert scheme is not None
    return [packed_weight(Plain(name, shape), scheme) for name, shape in shapes.items()]


def saved(data: dict[str, Any], shapes: dict[str, tuple[int, ...]], folder: Path) -> dict[str, torch.Tensor]:
    """A folder with such weights; what they stand for."""
    torch.manual_seed(0)
    state, plain = {}, {}
    for weight in weights_of(method_of(data), shapes):
        parts, beside = _nested(weight, random_parts(weight))
        plain[weight.name] = dequantise(weight, parts, weight.shape).reshape(weight.shape)
        state |= {f"{weight.owner}.{name}": part.contiguous() for name, part in parts.items()}
        state |= _quant_state(weight) | beside
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": data}))
    return plain


def tiny(data: dict[str, Any], **sizes: int) -> Any:
    from transformers import LlamaConfig

    base = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 96}  # fmt: skip
    config = LlamaConfig(**(base | sizes), architectures=["LlamaForCausalLM"])
    config.quantization_config = data
    return config


def experts(data: dict[str, Any]) -> Any:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, num_experts=4, num_experts_per_tok=2, vocab_size=96,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    config._experts_implementation = "eager"
    config.quantization_config = data
    return config


def latent(data: dict[str, Any]) -> Any:
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, q_lora_rank=32,
        kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, first_k_dense_replace=1,
        vocab_size=96, architectures=["DeepseekV3ForCausalLM"],
    )  # fmt: skip
    config._experts_implementation = "eager"
    config.quantization_config = data
    return config


def turned(data: dict[str, Any]) -> Any:
    """Stacks of experts that have inputs before outputs, and no conversion of the library's."""
    from transformers import Llama4TextConfig

    config = Llama4TextConfig(
        hidden_size=64, intermediate_size=64, intermediate_size_mlp=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, num_local_experts=8, num_experts_per_tok=1, vocab_size=96,
        interleave_moe_layer_step=2, pad_token_id=0, architectures=["Llama4ForCausalLM"],
    )  # fmt: skip
    config.quantization_config = data
    return config


def fused(data: dict[str, Any]) -> Any:
    """Query, key and value in one matrix, gate and up in one."""
    from transformers import Phi3Config

    config = Phi3Config(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        head_dim=32, vocab_size=96, pad_token_id=0, architectures=["Phi3ForCausalLM"],
    )  # fmt: skip
    config.quantization_config = data
    return config


def built(config: Any, device: str = "cpu") -> Any:
    import transformers

    torch.manual_seed(0)
    with torch.device(device):
        return getattr(transformers, config.architectures[0])._from_config(config, dtype=torch.float32).eval()


def checkpoint(config: Any, made: autoplan.Plan, folder: Path, listed: bool = True) -> dict[str, torch.Tensor]:
    """A quantised checkpoint of a model as public ones are (an entry for each expert); the plain numbers by name.

    With `listed` False stacks of experts are stored as stacks.
    """
    torch.manual_seed(1)
    whole, plain = built(config), dict[str, torch.Tensor]()
    buffers = {name for name, _ in whole.named_buffers()}
    state = {name: tensor for name, tensor in whole.state_dict().items() if name in buffers}
    names = {name: parameter for name, parameter in whole.named_parameters()}
    described = {name: weight for weight in made.packed for name in names if matches(weight.name, name)}
    for name, parameter in names.items():
        if name not in described:
            state[name] = plain[name] = parameter.detach()
        elif len(parameter.shape) == 2 or not listed:
            own = described[name]
            transposed, segments = own.rows > own.contracted, own.segments
            state |= _stored(Plain(name, tuple(parameter.shape), transposed, segments), own, plain)
        else:
            state |= _listed(name, described[name], plain)
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config.quantization_config}))
    return plain


def _stored(plain: Plain, described: PackedWeight, numbers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weight = packed_weight(plain, described.scheme)
    parts = random_parts(weight)
    scales = {n for n, p in parts.items() if n.endswith(("scale_inv", "_scale", "scales")) and p.dtype.itemsize > 1}
    scaled = {name: part / 16 if name in scales else part for name, part in parts.items()}
    scaled, beside = _nested(weight, scaled)
    numbers[plain.name] = dequantise(weight, scaled, weight.shape)
    return {f"{weight.owner}.{name}": part for name, part in scaled.items()} | _quant_state(weight) | beside


def _nested(
    weight: PackedWeight, parts: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Where the largest numbers of blocks are stored in blocks themselves: those numbers, and how they are stored."""
    if weight.scheme.id != "bnb-4bit" or not weight.scheme.value("nested"):
        return parts, {}
    count = len(parts["weight.absmax"])
    codes = torch.randint(256, (count,), dtype=torch.uint8)
    values, largest = torch.linspace(-1, 1, 256), 0.01 + torch.rand(-(-count // 256))
    numbers = values[codes.int()] * largest.repeat_interleave(256)[:count] + 0.5
    stored = {"absmax": codes, "nested_absmax": largest, "nested_quant_map": values}
    return parts | {"weight.absmax": numbers}, {f"{weight.name}.{name}": value for name, value in stored.items()}


def _quant_state(weight: PackedWeight) -> dict[str, torch.Tensor]:
    """What bitsandbytes says of a weight in a tensor of bytes."""
    if weight.scheme.id != "bnb-4bit":
        return {}
    text = json.dumps({"shape": weight.shape, "blocksize": 64, "nested_offset": 0.5}).encode()
    return {f"{weight.name}.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8)}


def _listed(name: str, described: PackedWeight, numbers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    owner, parameter = name.rsplit(".", 1)
    count, rows, columns = (described.shape[dim] for dim in (0, described.rows, described.contracted))
    apart = ("gate_proj", "up_proj") if parameter == "gate_up_proj" else ("down_proj",)
    state: dict[str, torch.Tensor] = {}
    for expert in range(count):
        for one in apart:
            plain = Plain(f"{owner}.{expert}.{one}.weight", (rows // len(apart), columns))
            state |= _stored(plain, described, numbers)
    pieces = [torch.cat([numbers.pop(f"{owner}.{e}.{one}.weight") for one in apart]) for e in range(count)]
    whole = torch.stack(pieces)
    numbers[name] = whole.transpose(1, 2) if described.rows > described.contracted else whole
    return state


MODELS = {"dense": tiny, "experts": experts, "latent": latent, "fused": fused, "turned": turned}


class Adapted(nn.Module):
    """A frozen layer with a low-rank update next to it, as adapter libraries write it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def adapted(config: Any, device: str) -> Any:
    model = built(config, device).requires_grad_(False)
    with torch.device(device):
        for block in model.model.layers:
            for owner, names in ((block.self_attn, ("q_proj", "o_proj")), (block.mlp, ("up_proj", "down_proj"))):
                for name in names:
                    setattr(owner, name, Adapted(getattr(owner, name)))
    return model


def random_state(model: Any) -> dict[str, torch.Tensor]:
    """Numbers for a packed model on meta."""
    state = {}
    for name, tensor in model.state_dict().items():
        if tensor.dtype == torch.float32 and "scale" not in name:
            state[name] = torch.randn(tensor.shape) / 8
        elif name.endswith("g_idx"):
            state[name] = (torch.arange(tensor.numel()) // 32).to(tensor.dtype)
        elif "scale" in name:
            state[name] = ((0.5 + torch.rand(tensor.shape)) / 64).to(tensor.dtype)
        elif tensor.dtype == torch.float8_e4m3fn:
            state[name] = torch.randn(tensor.shape).to(tensor.dtype)
        else:
            state[name] = torch.randint(-(2**31), 2**31 - 1, tensor.shape).to(tensor.dtype)
    return state

"""Quantised weights at run time: what ranks read of a packed checkpoint is, put together, the whole, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from packing import random_parts
from safetensors.torch import save_file

from autoplan.common.errors import SourceError
from autoplan.common.layout import Layout
from autoplan.execute.quantised.files import DequantisedFiles
from autoplan.execute.quantised.formats import dequantise
from autoplan.hf.quantised.groups import Method
from autoplan.hf.quantised.methods import method_of
from autoplan.hf.quantised.schemes import Plain, packed_weight
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
    "mxfp8": {"quant_method": "mxfp8"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "gptq": GPTQ,
    "gptq 2 bits": GPTQ | {"bits": 2},
    "gptq 3 bits": GPTQ | {"bits": 3},
    "gptq 8 bits, one group": GPTQ | {"bits": 8, "group_size": -1},
    "gptq act order": GPTQ | {"desc_act": True},
    "gptq v2": GPTQ | {"checkpoint_format": "gptq_v2"},
    "bnb nf4": NF4,
    "bnb int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "ct fp8 channel": compressed("float-quantized", 8, "float", "channel"),
    "ct fp8 tensor": compressed("float-quantized", 8, "float", "tensor"),
    "ct fp8 block": compressed("float-quantized", 8, "float", "block", block_structure=[32, 32]),
    "ct int8 zero points": compressed("int-quantized", 8, "int", "channel"),
    "ct packed": compressed("pack-quantized", 4, "int", "group", group_size=32),
    "ct packed, zero points": compressed("pack-quantized", 4, "int", "group", group_size=32, symmetric=False),
    "ct packed 8 bits": compressed("pack-quantized", 8, "int", "channel"),
    "ct nvfp4": compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16),
    "ct mxfp4": compressed("mxfp4-pack-quantized", 4, "float", "group", group_size=32),
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao float8": torchao("Float8WeightOnlyConfig"),
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
        parts = random_parts(weight)
        plain[weight.name] = dequantise(weight, parts, weight.shape).reshape(weight.shape)
        state |= {f"{weight.owner}.{name}": part.contiguous() for name, part in parts.items()}
        if "bnb-4bit" in weight.scheme.id:
            text = json.dumps({"shape": weight.shape, "blocksize": 64}).encode()
            state[f"{weight.name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": data}))
    return plain


SHAPES = {"model.layers.0.q_proj.weight": (256, 128), "model.layers.0.down_proj.weight": (128, 512)}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_pieces_are_the_whole(name: str, tp: int, tmp_path: Path) -> None:
    plain = saved(METHODS[name], SHAPES, tmp_path)
    files = DequantisedFiles(tmp_path)
    assert sorted(files.keys) == sorted(SHAPES)
    for key, whole in plain.items():
        assert files.shape(key) == SHAPES[key]
        assert torch.isfinite(whole).all() and torch.equal(files.read(key), whole)
        for dim in (0, 1):
            size = whole.shape[dim]
            for text in (f"{size}!", f"8!*{size // 8}", f"{size // 2}!|{size // 2}!", f"2*{size // 2}!"):
                held = [Layout.parse(text).rows(rank, tp) for rank in range(tp)]
                pieces = [files.read(key, {dim: rows}) for rows in held]
                order = torch.tensor([row for rows in held for row in rows])
                assert torch.equal(torch.cat(pieces, dim), whole.index_select(dim, order)), (key, dim, text)


def test_blocks_of_ragged_size(tmp_path: Path) -> None:
    plain = saved(METHODS["fp8 blocks"], {"a.weight": (72, 40)}, tmp_path)
    files = DequantisedFiles(tmp_path)
    assert torch.equal(files.read("a.weight"), plain["a.weight"])
    assert torch.equal(files.read("a.weight", {0: range(50, 72)}), plain["a.weight"][50:])


def test_as_transformers_dequantises_float8(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    (weight,) = weights_of(method_of(METHODS["fp8 blocks"]), {"a.weight": (64, 96)})
    parts = random_parts(weight)
    theirs = Fp8Dequantize(None)._dequantize_one(parts["weight"], parts["weight_scale_inv"], torch.bfloat16)
    assert torch.equal(dequantise(weight, parts, weight.shape).bfloat16(), theirs)


def test_as_transformers_dequantises_mxfp4() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    scheme = method_of({"quant_method": "mxfp4"}).groups[0].of(True)
    assert scheme is not None
    weight = packed_weight(Plain("experts.down_proj", (3, 64, 32), transposed=True), scheme)
    parts = random_parts(weight)
    theirs = convert_moe_packed_tensors(parts["down_proj_blocks"], parts["down_proj_scales"])
    assert torch.equal(dequantise(weight, parts, weight.shape).bfloat16(), theirs)


# ---------------------------------------------------------------------------------------------------------- bad input


def stored(folder: Path) -> Any:
    return DequantisedFiles(folder)


def test_scales_of_another_shape(tmp_path: Path) -> None:
    saved(METHODS["fp8 blocks"], SHAPES, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": METHODS["fp8 blocks"] | {
        "weight_block_size": [64, 64]}}))  # fmt: skip
    with pytest.raises(SourceError, match=r"weight_scale_inv has the shape \[8, 4\], where \[4, 2\]"):
        stored(tmp_path)


def test_files_of_another_method(tmp_path: Path) -> None:
    saved(METHODS["awq"], SHAPES, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": METHODS["fp8 blocks"]}))
    with pytest.raises(SourceError, match="hold none of its tensors"):
        stored(tmp_path)


def test_files_that_no_config_announces(tmp_path: Path) -> None:
    saved(METHODS["awq"], SHAPES, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(SourceError, match="no quantization_config"):
        stored(tmp_path)


def test_a_companion_is_absent(tmp_path: Path) -> None:
    saved(METHODS["gptq"], SHAPES, tmp_path)
    from safetensors.torch import load_file

    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.0.q_proj.scales"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match="q_proj.scales is absent"):
        stored(tmp_path)

"""Quantised weights at run time: what ranks read of a packed checkpoint is, put together, the whole, bit for bit."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from packing import random_parts
from quantised_models import METHODS, MODELS, adapted, built, checkpoint, random_state, saved, tiny, weights_of
from safetensors.torch import load_file, save_file
from slow_cases import marked
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import PlanMismatchError, SourceError
from autoplan.common.layout import Layout
from autoplan.execute.quantised.formats import dequantise
from autoplan.execute.quantised.modules import DequantisedFiles
from autoplan.hf.quantised.methods import method_of
from autoplan.hf.quantised.schemes import Plain, packed_weight

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


@pytest.mark.parametrize("scales", ["float32", "float8_e8m0fnu"])
@pytest.mark.parametrize("shape", [(64, 96), (3, 64, 96)])
def test_as_transformers_dequantises_float4_experts(shape: tuple[int, ...], scales: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    said = METHODS["fp4 experts"] | ({"scale_fmt": "ue8m0"} if "e8m0" in scales else {})
    scheme = method_of(said).groups[0].of(True)
    assert scheme is not None and scheme.id == "fp4-experts"
    weight = packed_weight(Plain("experts.down_proj", shape), scheme)
    assert weight.tensors[1].dtype == scales
    packed = torch.randint(-128, 128, weight.tensors[0].shape, dtype=torch.int8)
    numbers = torch.randint(-6, 3, weight.tensors[1].shape).float().exp2().to(getattr(torch, scales))
    theirs = Fp8Dequantize(None)._dequantize_one(packed, numbers, torch.bfloat16)
    parts = {weight.tensors[0].name: packed, weight.tensors[1].name: numbers}
    assert torch.equal(dequantise(weight, parts, shape).bfloat16(), theirs)


def _quantised(bits: int, group: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """A matrix of 64 inputs by 96 outputs as integers, and their scales and zero points for each group of inputs."""
    torch.manual_seed(0)
    integers = torch.randint(2**bits, (64, 96))
    zeros = (
        torch.full((64 // group, 96), 2 ** (bits - 1)) if symmetric else torch.randint(1, 2**bits, (64 // group, 96))
    )
    scales = (0.5 + torch.rand(64 // group, 96)).half()
    plain = (integers - zeros.repeat_interleave(group, 0)) * scales.repeat_interleave(group, 0)
    return integers, zeros, scales, plain.t()


def _packed(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Rows of 32-bit words, bit by bit: number n of a word (or the n-th of `order`) has the bits from n * bits on."""
    words = torch.zeros(numbers.shape[0] * bits // 32, numbers.shape[1], dtype=torch.int64)
    for row in range(numbers.shape[0]):
        place = row if order is None else row // 8 * 8 + order[row % 8]
        for bit in range(bits):
            at = row * bits + bit
            words[at // 32] |= (numbers[place] >> bit & 1) << (at % 32)
    return torch.where(words >= 2**31, words - 2**32, words).int()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_what_gptq_packs(bits: int) -> None:
    """Packed here bit by bit, as its tools do: zero points one less than they are, inputs in 32-bit words."""
    integers, zeros, scales, plain = _quantised(bits, 32, symmetric=False)
    (weight,) = weights_of(method_of(METHODS["gptq"] | {"bits": bits}), {"a.weight": (96, 64)})
    parts = {"qweight": _packed(integers, bits), "qzeros": _packed((zeros - 1).t(), bits).t(), "scales": scales,
             "g_idx": (torch.arange(64) // 32).int()}  # fmt: skip
    assert torch.equal(dequantise(weight, parts, (96, 64)), plain)


def test_what_awq_packs() -> None:
    """Outputs in 32-bit words, the first, third, fifth and seventh before the others."""
    integers, zeros, scales, plain = _quantised(4, 32, symmetric=False)
    (weight,) = weights_of(method_of(METHODS["awq"]), {"a.weight": (96, 64)})
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": _packed(integers.t(), 4, order).t(), "qzeros": _packed(zeros.t(), 4, order).t(),
             "scales": scales}  # fmt: skip
    assert torch.equal(dequantise(weight, parts, (96, 64)), plain)


def test_what_torchao_packs_in_four_bits() -> None:
    """Signed numbers, two to a byte, the lower half first; zero points are added after the scale."""
    torch.manual_seed(0)
    numbers, scales = torch.randint(-8, 8, (96, 64)), torch.rand(2, 96).bfloat16()
    zeros = torch.randn(2, 96).bfloat16()
    (weight,) = weights_of(method_of(METHODS["torchao int4"]), {"a.weight": (96, 64)})
    stored = (numbers[:, ::2] & 15 | (numbers[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    parts = {"_weight_qdata": stored, "_weight_scale": scales, "_weight_zero_point": zeros}
    wide = [one.t().float().repeat_interleave(32, 1) for one in (scales, zeros)]
    assert torch.equal(dequantise(weight, parts, (96, 64)), numbers * wide[0] + wide[1])


# ---------------------------------------------------------------------------------------------------------- bad input


def stored(folder: Path) -> Any:
    return DequantisedFiles(folder)


def test_scales_of_another_shape(tmp_path: Path) -> None:
    saved(METHODS["fp8 blocks"], SHAPES, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": METHODS["fp8 blocks"] | {
        "weight_block_size": [64, 64]}}))  # fmt: skip
    with pytest.raises(SourceError, match=r"weight_scale_inv has shape \[4, 16\].* needs \[2, 8\]"):
        stored(tmp_path)


def test_files_of_another_method(tmp_path: Path) -> None:
    saved(METHODS["awq"], SHAPES, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": METHODS["fp8 blocks"]}))
    with pytest.raises(SourceError, match="contain none of its tensors"):
        stored(tmp_path)


def test_files_that_no_config_announces(tmp_path: Path) -> None:
    saved(METHODS["awq"], SHAPES, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(SourceError, match="no quantization_config"):
        stored(tmp_path)


@pytest.mark.parametrize("dequantise", [False, True])
@pytest.mark.parametrize(
    ("text", "said"), [("[1]", "holds a list"), ('{"quantization_config": "fp8"}', "is 'fp8', no")]
)
def test_a_config_that_is_none(text: str, said: str, dequantise: bool, tmp_path: Path) -> None:
    saved(METHODS["fp8 blocks"], SHAPES, tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SourceError, match=said):
        autoplan.load_weights(torch.nn.Linear(2, 2), tmp_path, dequantise=dequantise)


def test_a_long_row_without_its_shape(tmp_path: Path) -> None:
    saved(METHODS["bnb nf4"], SHAPES, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({key: part for key, part in state.items() if "quant_state" not in key}, tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match="quant_state.*is missing"):
        stored(tmp_path)


def test_a_companion_is_absent(tmp_path: Path) -> None:
    saved(METHODS["gptq"], SHAPES, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.0.q_proj.scales"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match="q_proj.scales is missing"):
        stored(tmp_path)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"group_size": 64}, r"(qzeros|scales) is \[.*the model expects"),  # scales of another shape
        ({"bits": 8}, r"qweight is \[.*the model expects"),
        ({"quant_method": "gptq"}, r"g_idx|qweight is \["),
    ],
)
def test_a_packed_model_refuses_files_of_another_config(other: dict[str, Any], said: str, tmp_path: Path) -> None:
    """One error that names the tensor, before anything is changed."""
    config, wrong = tiny(METHODS["awq"]), METHODS["awq"] | other
    if other.get("bits") == 8:
        config, wrong = tiny(METHODS["gptq"]), METHODS["gptq"] | other
    checkpoint(tiny(wrong), autoplan.plan(tiny(wrong), 2, prove="none"), tmp_path)
    model = autoplan.packed_model(built(config, "meta"), autoplan.plan(config, 2, prove="none"))
    with pytest.raises(PlanMismatchError, match=said):
        autoplan.load_weights(model, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("dequantise", [False, True])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gptq", {"mlp.up_proj.bias": torch.zeros(256)}),
        ("bnb int8", {"mlp.up_proj.weight_format": torch.tensor(0, dtype=torch.uint8)}),
        ("ct fp8 channel", {"self_attn.k_scale": torch.ones(1), "self_attn.v_scale": torch.ones(1)}),
    ],
)
def test_what_tools_write_beside_weights(
    name: str, more: dict[str, torch.Tensor], dequantise: bool, tmp_path: Path
) -> None:
    """A bias of zeros for a layer without one, how rows are ordered, scales of the cache: no part of a weight."""
    config = tiny(METHODS[name])
    made = autoplan.plan(config, 2, prove="none")
    checkpoint(config, made, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file(state | {f"model.layers.0.{key}": value for key, value in more.items()}, tmp_path / "model.safetensors")
    model = built(config, "meta")
    model = model if dequantise else autoplan.packed_model(model, made)
    result = autoplan.load_weights(model, tmp_path, dequantise=dequantise)
    assert not result.missing_keys and not result.unexpected_keys


@pytest.mark.parametrize("dequantise", [False, True])
def test_a_bias_that_the_model_lacks(dequantise: bool, tmp_path: Path) -> None:
    config = tiny(METHODS["gptq"])
    made = autoplan.plan(config, 2, prove="none")
    checkpoint(config, made, tmp_path)
    state = load_file(tmp_path / "model.safetensors") | {"model.layers.0.mlp.up_proj.bias": torch.ones(256)}
    save_file(state, tmp_path / "model.safetensors")
    model = built(config, "meta")
    model = model if dequantise else autoplan.packed_model(model, made)
    with pytest.raises(PlanMismatchError, match="1 unexpected: model.layers.0.mlp.up_proj.bias"):
        autoplan.load_weights(model, tmp_path, dequantise=dequantise)


@pytest.mark.parametrize(("scale", "act"), [("scale", None), ("qscale_weight", "qscale_act")])
def test_scales_by_other_names(scale: str, act: str | None, tmp_path: Path) -> None:
    """DeepSeek-V4's own files, and Mistral's, have other names for scales."""
    method = METHODS["fp8 tensor"] | {"activation_scheme": "static"} if act else METHODS["fp8 blocks"]
    config = tiny(method)
    made = autoplan.plan(config, 2, prove="none")
    plain = checkpoint(config, made, tmp_path)
    names = {"weight_scale_inv": scale, "activation_scale": act or ""}
    state = {f"{key.rpartition('.')[0]}.{names.get(key.rpartition('.')[2], key.rpartition('.')[2])}": value
             for key, value in load_file(tmp_path / "model.safetensors").items()}  # fmt: skip
    assert any(key.endswith(f".{scale}") for key in state)
    save_file(state, tmp_path / "model.safetensors")
    whole = autoplan.packed_model(built(config, "meta"), made)
    autoplan.load_weights(whole, tmp_path)
    assert torch.equal(whole.model.layers[0].mlp.up_proj.weight, plain["model.layers.0.mlp.up_proj.weight"].float())
    model = built(config, "meta")
    autoplan.load_weights(model, tmp_path, dequantise=True)
    assert all(torch.equal(model.get_parameter(key), value.float()) for key, value in plain.items())


def test_packed_numbers_whose_scales_are_absent(tmp_path: Path) -> None:
    saved(METHODS["fp8 blocks"], SHAPES, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.0.q_proj.weight_scale_inv"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        SourceError, match=r"q_proj.weight holds float8_e4m3fn.* but the scales that the config announces are missing"
    ):
        stored(tmp_path)


# ----------------------------------------------------------------------------------------------- models, on ranks


LOADED = ["fp8 blocks", "awq", "gptq", "gptq act order", "ct packed, zero points", "ct fp8 channel"]
RUN = [
    *(("dense", name) for name in LOADED),
    ("experts", "fp8 blocks"),
    ("latent", "fp8 blocks"),
    ("experts", "fp8 rows"),
]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("tp", "name"),
    marked(product((2, 4), ("fp8 blocks", "awq", "ct packed")), long=[(4, "ct packed")], slow=[(4, "fp8 blocks")]),
)
def test_a_plain_model_is_filled_from_a_quantised_checkpoint(kind: str, name: str, tp: int, tmp_path: Path) -> None:
    config = MODELS[kind](METHODS[name])
    made = autoplan.plan(config, tp_size=tp, prove="none")
    plain = checkpoint(config, made, tmp_path)

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
        model = autoplan.parallelize(built(config, "meta"), mesh, made)
        result = autoplan.load_weights(model, tmp_path, dequantise=True)
        assert not result.missing_keys and not result.unexpected_keys
        found = autoplan.full_tensors(model)
        for key, value in plain.items():
            assert torch.equal(found[key], value.float()), key

    run_ranks(rank_body, tp)


@pytest.mark.parametrize(("kind", "name"), marked(RUN, slow=[("dense", "gptq"), ("experts", "fp8 rows")]))
def test_a_packed_model_runs_sharded(kind: str, name: str, tmp_path: Path) -> None:
    """Every rank holds its packed pieces, computes what the whole computes, and saves what it loaded."""
    config = MODELS[kind](METHODS[name])
    made = autoplan.plan(config, tp_size=2, prove="none")
    checkpoint(config, made, tmp_path)
    whole = autoplan.packed_model(built(config, "meta"), made)
    autoplan.load_weights(whole, tmp_path)
    ids = torch.arange(12).view(2, 6)
    expected, stored = whole(ids).logits.detach(), load_file(tmp_path / "model.safetensors")
    assert torch.isfinite(expected).all()

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = autoplan.packed_model(built(config, "meta"), made)
        model = autoplan.parallelize(model, mesh, made, gather_logits=True)
        result = autoplan.load_weights(model, tmp_path)
        assert not result.missing_keys and not result.unexpected_keys
        torch.testing.assert_close(model(ids).logits.detach(), expected, rtol=1e-4, atol=1e-4)
        for key, value in autoplan.full_tensors(model).items():
            if ".experts." not in key:
                assert value.dtype == stored[key].dtype and torch.equal(value.float(), stored[key].float()), key

    run_ranks(rank_body, 2)


def test_only_a_method_that_can_be_computed_is_packed() -> None:
    config = tiny({"quant_method": "nvfp4"})
    with pytest.raises(PlanMismatchError, match="stored as NVFP4.*, which needs its own package"):
        autoplan.packed_model(built(config, "meta"), autoplan.plan(config, 2, prove="none"))
    config.quantization_config = None
    with pytest.raises(PlanMismatchError, match="no quantised weights"):
        autoplan.packed_model(built(config, "meta"), autoplan.plan(config, 2, prove="none"))


# ------------------------------------------------------------------------------------------------- adapters on top


@pytest.mark.parametrize("name", ["awq", "fp8 blocks", "ct packed"])
def test_adapters_on_a_packed_base(name: str, tmp_path: Path) -> None:
    """The base is frozen and packed, adapters plain, their gradients those of the unsharded model."""
    config = tiny(METHODS[name])
    made = autoplan.plan(adapted(config, "meta"), tp_size=2, prove="none")
    assert made.packed and not any("lora" in weight.name for weight in made.packed)
    torch.manual_seed(3)
    whole = autoplan.packed_model(adapted(config, "meta"), made)
    save_file(random_state(whole), tmp_path / "model.safetensors")
    ids = torch.arange(12).view(2, 6)

    def step(model: Any) -> dict[str, torch.Tensor]:
        autoplan.load_weights(model, tmp_path)
        assert all(p.requires_grad == ("lora_" in n) for n, p in model.named_parameters())
        model(ids, labels=ids).loss.backward()
        return {n: g for n, g in autoplan.full_tensors(model, grads=True).items() if g is not None}

    expected = step(whole)
    assert expected and all("lora_" in name and gradient.abs().max() > 0 for name, gradient in expected.items())

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = step(autoplan.parallelize(autoplan.packed_model(adapted(config, "meta"), made), mesh, made))
        assert found.keys() == expected.keys()
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-3, atol=1e-5)

    run_ranks(rank_body, 2)


# ------------------------------------------------------------------------------------------- the library's own modules


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_the_librarys_float8_modules_get_whole_blocks(kind: str) -> None:
    """Their kernels need a GPU; what they would be given is checked by shape."""
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.utils.quantization_config import FineGrainedFP8Config

    config = MODELS[kind](METHODS["fp8 blocks"])
    made = autoplan.plan(config, tp_size=2, prove="none")

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        own = FineGrainedFP8Config(weight_block_size=(32, 32))
        model = replace_with_fp8_linear(built(config, "meta"), ["lm_head"], own, pre_quantized=True)
        autoplan.parallelize(model, mesh, made)
        cut = 0
        for module in model.modules():
            held = {n: p.to_local() for n, p in module._parameters.items() if p is not None and hasattr(p, "to_local")}
            for name, scale in held.items():
                if name.endswith("_scale_inv"):
                    weight = held[name.removesuffix("_scale_inv")]
                    assert tuple(-(-size // 32) for size in weight.shape[-2:]) == tuple(scale.shape[-2:]), name
                    whole = module._parameters[name]
                    cut += whole is not None and whole.shape != scale.shape
        assert cut >= 8

    run_ranks(rank_body, 2)


@pytest.mark.parametrize("strict", [True, False])
def test_packed_numbers_are_not_taken_for_plain_ones(strict: bool, tmp_path: Path) -> None:
    config = tiny(METHODS["fp8 blocks"])
    checkpoint(config, autoplan.plan(config, 2, prove="none"), tmp_path)
    with pytest.raises(PlanMismatchError, match="dequantise=True"):
        autoplan.load_weights(built(config, "meta"), tmp_path, strict=strict)


# ------------------------------------------------------------------------------------------- ranks that are processes


def _packed_rank(rank: int, folder: Path, name: str) -> None:
    """Logits and stored tensors of a rank's uneven pieces, held against the whole model's."""
    config = tiny(METHODS[name], intermediate_size=160)
    made = autoplan.plan(config, tp_size=2, prove="none", uneven="blocks")
    whole = autoplan.packed_model(built(config, "meta"), made)
    autoplan.load_weights(whole, folder)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = autoplan.packed_model(built(config, "meta"), made)
    model = autoplan.parallelize(model, mesh, made, gather_logits=True)
    autoplan.load_weights(model, folder)
    ids = torch.arange(12).view(2, 6)
    torch.testing.assert_close(model(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-4)
    stored = dict(whole.named_parameters())
    for key, value in autoplan.full_tensors(model).items():
        assert value.dtype == stored[key].dtype and torch.equal(value.float(), stored[key].float()), key


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8 blocks", "awq", "ct packed"])
def test_packed_on_two_processes(name: str, tmp_path: Path) -> None:
    config = tiny(METHODS[name], intermediate_size=160)
    made = autoplan.plan(config, tp_size=2, prove="none", uneven="blocks")
    checkpoint(config, made, tmp_path)
    run_ranks(partial(_packed_rank, folder=tmp_path, name=name), 2, engine="gloo")

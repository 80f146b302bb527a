"""What the packages of quantisation methods write is read as they read it; peft trains on packed bases."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import METHODS, built, compressed, random_state, tiny, torchao
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from slow_cases import marked
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import AutoplanError, SourceError
from autoplan.execute.quantised.formats import dequantise
from autoplan.execute.quantised.modules import DequantisedFiles
from autoplan.hf.quantised.methods import method_of
from autoplan.hf.quantised.schemes import Plain, packed_weight

pytestmark = pytest.mark.hosts


def needs(package: str) -> pytest.MarkDecorator:
    absent = find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"NOT TRIED: {package} is absent; pip install it to run this")


def _adapted(config: Any, options: Any) -> Any:
    """With adapters of zeros: threads draw in no order, and what is loaded counts."""
    from peft import get_peft_model

    model = get_peft_model(built(config), options)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.zeros_(parameter)
    return model


@needs("bitsandbytes")
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_four_bits(kind: str, nested: bool, tmp_path: Path) -> None:
    """Its own CPU path, bit for bit, whole and by the rows and columns of ranks."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit

    torch.manual_seed(0)
    module = Linear4bit(256, 128, bias=False, quant_type=kind, compress_statistics=nested)
    how: dict[str, Any] = {"requires_grad": False, "quant_type": kind, "compress_statistics": nested}
    module.weight = Params4bit(torch.randn(128, 256), **how)
    module = module.to("cpu")
    theirs = dequantize_4bit(module.weight.data, module.weight.quant_state).float()
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    said["bnb_4bit_use_double_quant"] = nested
    _same_as(theirs, module.state_dict(), said, tmp_path)


@needs("bitsandbytes")
def test_bitsandbytes_eight_bits(tmp_path: Path) -> None:
    from bitsandbytes.functional import int8_vectorwise_dequant
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    torch.manual_seed(0)
    module = Linear8bitLt(256, 128, bias=False, has_fp16_weights=False)
    module.weight = Int8Params(torch.randn(128, 256), requires_grad=False, has_fp16_weights=False)
    state = module.to("cpu").state_dict()
    theirs = int8_vectorwise_dequant(state["weight"], state["SCB"])
    assert {"weight", "SCB", "weight_format"} <= state.keys()
    _same_as(theirs, state, {"quant_method": "bitsandbytes", "load_in_8bit": True}, tmp_path)


def _same_as(theirs: torch.Tensor, state: dict[str, Any], said: dict[str, Any], folder: Path) -> None:
    save_file({f"a.{key}": value.contiguous() for key, value in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
    files = DequantisedFiles(folder)
    assert files.keys == ("a.weight",) and torch.equal(files.read("a.weight"), theirs)
    for tp in (2, 4, 8):
        for dim in (0, 1):
            pieces = theirs.chunk(tp, dim)
            size = theirs.shape[dim] // tp
            for rank, piece in enumerate(pieces):
                rows = range(rank * size, (rank + 1) * size)
                assert torch.equal(files.read("a.weight", {dim: rows}), piece), (tp, dim, rank)


@needs("bitsandbytes")
@needs("peft")
@pytest.mark.parametrize(
    ("nested", "tp", "wrapped"), [(True, 2, False), (True, 4, False), (False, 2, False), (True, 2, True)]
)
def test_qlora(nested: bool, tp: int, wrapped: bool, tmp_path: Path) -> None:
    """A model of bitsandbytes' own modules with peft's adapters: its loss, and its gradients of A and B, on ranks.

    Its checkpoint has the names of the model inside, and no adapters, or those that the wrapped model has.
    """
    from peft import LoraConfig, get_peft_model

    said = METHODS["bnb nf4"] | {"bnb_4bit_use_double_quant": nested, "llm_int8_skip_modules": ["lm_head"]}
    config = tiny(said)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    options = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=names)
    torch.manual_seed(0)
    base = _four_bits(built(config), nested)
    state = {key: value.contiguous() for key, value in base.state_dict().items()}
    whole = get_peft_model(base, options)
    for name, parameter in whole.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    ids = torch.arange(12).view(2, 6)
    loss = whole(input_ids=ids, labels=ids).loss
    loss.backward()
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert len(expected) == 28 and all("lora_" in name for name in expected)
    if wrapped:
        state = {key: value.contiguous() for key, value in whole.state_dict().items()}
    assert any("nested_absmax" in key for key in state) == nested
    assert any(".base_layer." in key for key in state) == wrapped
    save_file(state, tmp_path / "model.safetensors")

    def adapted() -> Any:
        model = _adapted(config, options)
        if not wrapped:
            model.load_state_dict({name: value for name, value in whole.state_dict().items() if "lora_" in name}, False)
        return model

    made = autoplan.plan(adapted(), tp_size=tp, prove="none")
    assert made.packed and all(weight.scheme.id == "bnb-4bit" for weight in made.packed)

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
        model = autoplan.parallelize(autoplan.packed_model(adapted(), made), mesh, made)
        autoplan.load_weights(model, tmp_path)
        assert all(p.requires_grad == ("lora_" in n) for n, p in model.named_parameters())
        found = model(input_ids=ids, labels=ids).loss
        found.backward()
        torch.testing.assert_close(found.detach(), loss.detach(), rtol=1e-5, atol=1e-6)
        gradients = {n: g for n, g in autoplan.full_tensors(model, grads=True).items() if g is not None}
        assert gradients.keys() == expected.keys()
        for key, gradient in gradients.items():
            assert (gradient - expected[key]).abs().max() <= 1e-4 * expected[key].abs().max(), key

    run_ranks(rank_body, tp)


def _four_bits(model: Any, nested: bool) -> Any:
    """Its projections as bitsandbytes' modules."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and path != "lm_head":
            how: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": nested}
            own = Linear4bit(module.in_features, module.out_features, bias=False, compute_dtype=torch.float32, **how)
            own.weight = Params4bit(module.weight.detach(), requires_grad=False, **how)
            model.set_submodule(path, own.to("cpu"))
    return model


@needs("torchao")
def test_weights_of_a_package_are_refused_by_name() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = built(tiny(METHODS["bnb nf4"]))
    quantize_(model, Int8WeightOnlyConfig(version=2))
    with pytest.raises(SourceError, match=r"(?s)q_proj.weight is a \w+ of torchao.*packed_model"):
        autoplan.plan(model, tp_size=2, prove="none")


@needs("bitsandbytes")
def test_modules_of_a_package_are_refused_by_name() -> None:
    """What to do instead is said where such a model is planned, and where it is sharded."""
    config = tiny(METHODS["bnb nf4"])
    whole = _four_bits(built(config), nested=False)
    with pytest.raises(SourceError, match=r"(?s)q_proj is a Linear4bit of bitsandbytes.*packed_model"):
        autoplan.plan(whole, tp_size=2, prove="none")
    made = autoplan.plan(config, tp_size=2, prove="none")

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(AutoplanError, match=r"(?s)q_proj.weight is a Params4bit.*packed_model"):
            autoplan.parallelize(whole, mesh, made)

    run_ranks(rank_body, 2)


@needs("bitsandbytes")
def test_what_is_saved_of_four_bits_is_read_by_bitsandbytes(tmp_path: Path) -> None:
    """From its own checkpoint in double quantisation, sharded, saved: its modules hold the same numbers again."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Params4bit

    config = tiny(METHODS["bnb nf4"] | {"bnb_4bit_use_double_quant": True})
    torch.manual_seed(0)
    whole = _four_bits(built(config), nested=True)
    save_file({key: value.contiguous() for key, value in whole.state_dict().items()}, tmp_path / "model.safetensors")
    made = autoplan.plan(config, tp_size=2, prove="none")

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = autoplan.parallelize(autoplan.packed_model(built(config, "meta"), made), mesh, made)
        autoplan.load_weights(model, tmp_path)
        model.save_pretrained(tmp_path / "saved")

    run_ranks(rank_body, 2)
    state, own = (load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", tmp_path))
    assert state.keys() == own.keys()
    assert all(torch.equal(state[key], value) for key, value in own.items())
    for path, module in whole.named_modules():
        if hasattr(getattr(module, "weight", None), "quant_state"):
            mine = {key.removeprefix(f"{path}."): value for key, value in state.items() if key.startswith(f"{path}.")}
            stats = {key.removeprefix("weight."): value for key, value in mine.items() if key != "weight"}
            read = Params4bit.from_prequantized(mine["weight"], stats, device="cpu")
            theirs = dequantize_4bit(module.weight.data, module.weight.quant_state).float()
            assert torch.equal(dequantize_4bit(read.data, read.quant_state).float(), theirs), path


@needs("torchao")
@pytest.mark.parametrize(
    "kind",
    ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig",
     "Int8DynamicActivationIntxWeightConfig"],
)  # fmt: skip
def test_torchao(kind: str) -> None:
    import torchao.quantization as library
    from torchao.core.config import config_to_dict

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128, bias=False, dtype=torch.bfloat16))
    how = getattr(library, kind)()
    library.quantize_(model, how)
    weight: Any = model[0].weight
    said = config_to_dict(how)
    scheme = method_of(torchao(said["_type"], **said["_data"])).groups[0].scheme
    assert scheme is not None
    described = packed_weight(Plain("a.weight", (128, 256)), scheme)
    stored = {f"_weight_{name}": getattr(weight, name) for name in weight.tensor_data_names}
    stored |= {
        f"_weight_{n}": x
        for n in getattr(weight, "optional_tensor_data_names", ())
        if (x := getattr(weight, n)) is not None
    }
    assert {t.name: t.shape for t in described.tensors} == {name: tuple(x.shape) for name, x in stored.items()}
    ours = dequantise(described, stored, (128, 256)).bfloat16()
    torch.testing.assert_close(ours, weight.dequantize().bfloat16(), rtol=2**-7, atol=0)  # its scale is rounded first


@needs("torchao")
def test_what_is_saved_of_torchao_is_read_by_it(tmp_path: Path) -> None:
    """Which class a tensor is of stands in the headers of its files: they are written again."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict, unflatten_tensor_state_dict
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    config = tiny(METHODS["torchao int8"])
    theirs = built(config).to(torch.bfloat16)
    quantize_(theirs, Int8WeightOnlyConfig(), filter_fn=lambda module, name: "proj" in name)
    state, headers = flatten_tensor_state_dict(theirs.state_dict())
    save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "model.safetensors", headers)
    made = autoplan.plan(config, tp_size=2, prove="none")

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = autoplan.parallelize(autoplan.packed_model(built(config, "meta"), made), mesh, made)
        autoplan.load_weights(model, tmp_path)
        autoplan.save_weights(model, tmp_path / "saved")

    run_ranks(rank_body, 2)
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as saved:
        read = {key: saved.get_tensor(key) for key in saved.keys()}  # noqa: SIM118 - it is no dict
        back, rest = unflatten_tensor_state_dict(read, saved.metadata())
    assert not rest and back.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert type(back[name]) is type(tensor), name
        plain = [one.dequantize() if hasattr(one, "qdata") else one for one in (tensor, back[name])]
        assert torch.equal(*plain), name


FORMATS = {
    "pack-quantized": compressed("pack-quantized", 4, "int", "group", group_size=32),
    "int-quantized": compressed("int-quantized", 8, "int", "channel"),
    "float-quantized": compressed("float-quantized", 8, "float", "channel"),
    "nvfp4-pack-quantized": compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16),
}


@needs("compressed_tensors")
@pytest.mark.parametrize("format", FORMATS)
def test_compressed_tensors(format: str) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(0)
    said = FORMATS[format]["config_groups"]["a"]["weights"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**said), format=format)
    columns = 256 // said["group_size"] if "group_size" in said else 1
    state = {"weight": torch.randn(128, 256), "weight_scale": torch.rand(128, columns) / 16 + 0.01}
    if "nvfp4" in format:
        state |= {"weight_scale": 256 * state["weight_scale"], "weight_global_scale": torch.tensor([256.0])}
    packed = BaseCompressor.get_value_from_registry(format).compress(dict(state), scheme)
    theirs = BaseCompressor.get_value_from_registry(format).decompress(dict(packed), scheme)["weight"]
    own = method_of(FORMATS[format]).groups[0].scheme
    assert own is not None
    described = packed_weight(Plain("a.weight", (128, 256)), own)
    stored = {t.name: packed[t.name] for t in described.tensors if t.name in packed}
    assert {t.name: t.shape for t in described.tensors} == {name: tuple(x.shape) for name, x in stored.items()}
    assert torch.equal(dequantise(described, stored, (128, 256)).float(), theirs.float())


@needs("peft")
@pytest.mark.parametrize("name", marked(["awq", "gptq", "fp8 blocks", "ct packed"], slow=["gptq", "ct packed"]))
def test_lora_on_a_packed_base(name: str, tmp_path: Path) -> None:
    """peft's own modules: the base packed and frozen, A and B plain, their gradients those of the unsharded model."""
    from peft import LoraConfig

    config = tiny(METHODS[name], intermediate_size=160)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    options = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=names)

    adapted = partial(_adapted, config, options)
    made = autoplan.plan(adapted(), tp_size=2, prove="none", uneven="blocks")
    assert made.packed and made.uneven == "blocks" and not any("lora" in weight.name for weight in made.packed)
    torch.manual_seed(3)
    whole = autoplan.packed_model(adapted(), made)
    save_file(random_state(whole), tmp_path / "model.safetensors")
    ids = torch.arange(12).view(2, 6)

    def step(model: Any) -> dict[str, torch.Tensor]:
        autoplan.load_weights(model, tmp_path)
        assert all(p.requires_grad == ("lora_" in n) for n, p in model.named_parameters())
        model(input_ids=ids, labels=ids).loss.backward()
        return {n: g for n, g in autoplan.full_tensors(model, grads=True).items() if g is not None}

    expected = step(whole)
    assert len(expected) == 28 and all(gradient.abs().max() > 0 for gradient in expected.values())

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = step(autoplan.parallelize(autoplan.packed_model(adapted(), made), mesh, made))
        assert found.keys() == expected.keys()
        for key, gradient in found.items():
            assert (gradient - expected[key]).abs().max() <= 1e-4 * expected[key].abs().max(), key

    run_ranks(rank_body, 2)

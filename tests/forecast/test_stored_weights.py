"""Weights are counted in the dtype and format that they are stored in, and the header says who says so."""

from __future__ import annotations

import json
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

import autoplan
from autoplan.forecast.dry_run import dry_run
from autoplan.forecast.sharded import Held
from autoplan.forecast.trained import OPTIMIZERS
from autoplan.hf.source import resolve

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def llama(**sizes: Any) -> LlamaConfig:
    known = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8,
             "num_key_value_heads": 8, "vocab_size": 1024, "tie_word_embeddings": False}  # fmt: skip
    return LlamaConfig(**known | sizes, architectures=["LlamaForCausalLM"])


def folder_of(where: Path, config: LlamaConfig, **said: Any) -> str:
    data = {name: value for name, value in config.to_dict().items() if name not in ("dtype", "torch_dtype")} | said
    (where / "config.json").write_text(json.dumps(data))
    return str(where)


@pytest.mark.parametrize(
    ("stored", "said", "dtype", "origin"),
    [
        (torch.float16, {"dtype": "bfloat16"}, torch.bfloat16, "from the config"),
        (torch.float16, {}, torch.float16, "from the checkpoint"),
        (None, {"quantization_config": FP8}, torch.bfloat16, "assumed: a quantised checkpoint"),
        (None, {}, torch.float32, "the library's default: the config sets no dtype"),
    ],
)
def test_the_header_says_who_says_the_dtype(
    tmp_path: Path, stored: torch.dtype | None, said: dict[str, Any], dtype: torch.dtype, origin: str
) -> None:
    if stored is not None:
        save_file({"a": torch.zeros(8, 8, dtype=stored), "b": torch.zeros(2)}, tmp_path / "model.safetensors")
    source = resolve(folder_of(tmp_path, llama(), **said))
    assert next(source.module().parameters()).dtype == dtype
    found = autoplan.estimate(str(tmp_path), mesh="tp=2", sequence=64, train="inference")
    assert f"{str(dtype).removeprefix('torch.')} ({origin}" in " ".join(str(found).split())
    assert found.to_dict()["dtype_origin"].startswith(origin)


def test_a_checkpoint_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(autoplan.AutoplanError, match="cannot read .*, and"):
        resolve(folder_of(tmp_path, llama()))


def test_adapters_beside_quantised_weights_leave_these_as_stored() -> None:
    """Full training of the same checkpoint computes, and counts, plain numbers."""
    config = llama(dtype=torch.bfloat16)
    keywords: dict[str, Any] = {"mesh": "dp_shard=2", "sequence": 64, "weights": "nf4"}
    full = autoplan.estimate(config, train="full", **keywords)
    adapters = autoplan.estimate(config, train="lora", lora_targets=("q_proj", "v_proj"), **keywords)
    linears = 3 * (4 * 512 * 512 + 3 * 512 * 1024)
    assert full.parts.weights - adapters.parts.weights == pytest.approx(linears * (2 - 0.5 - 4 / 64) / 2, rel=0.15)
    assert "nf4" in str(adapters) and "nf4" not in full.weights_text


def test_weights_that_a_format_leaves_as_they_are_are_said() -> None:
    """bitsandbytes quantises linear layers: experts in one parameter are none."""
    sizes = {"hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(**sizes, num_hidden_layers=2, num_local_experts=8, vocab_size=160, dtype=torch.bfloat16)
    found = autoplan.estimate(config, mesh="tp=1", sequence=64, train="inference", weights="nf4")
    assert any("not quantised by this format" in note and "experts.gate_up_proj" in note for note in found.notes)


def test_a_plain_config_is_asked_about_in_other_formats() -> None:
    config = llama(dtype=torch.bfloat16, num_hidden_layers=8)
    keywords: dict[str, Any] = {"mesh": "tp=1", "sequence": 64, "train": "inference"}
    formats = ("float32", "bfloat16", "fp8", "nf4", "nvfp4")
    wide, half, fp8, nf4, nvfp4 = (autoplan.estimate(config, **keywords, weights=one).parts.weights for one in formats)
    assert wide == pytest.approx(2 * half, rel=0.01) and half > 1.8 * fp8 > 2.8 * nf4
    assert nvfp4 == pytest.approx(nf4, rel=0.05)
    with pytest.raises(autoplan.AutoplanError, match="weights='fp7'"):
        autoplan.estimate(config, mesh="tp=1", weights="fp7")
    with pytest.raises(autoplan.AutoplanError, match="without a config"):
        autoplan.choose(nn.Linear(8, 8), gpus=1, weights="fp8")


def test_each_optimizer_keeps_what_its_own_code_keeps() -> None:
    """Those of torch are run; the others are held against what their documents say of a number."""
    config = llama(dtype=torch.float32, num_hidden_layers=2)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trained = sum(parameter.numel() for parameter in model.parameters())
    found = {name: autoplan.estimate(config, mesh="tp=1", sequence=64, optimizer=name).parts.optimizer
             for name in ("adamw", "adafactor", "adagrad", "adamw8bit", "paged_adamw8bit", "muon")}  # fmt: skip
    kinds = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor, "adagrad": torch.optim.Adagrad}
    for name, kind in kinds.items():
        optimizer = kind(model.parameters(), lr=0.0)
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        kept = sum(value.nbytes for value in states if isinstance(value, torch.Tensor) and value.dim())
        assert found[name] == pytest.approx(kept, rel=0.02), name
    assert found["adamw8bit"] == pytest.approx(2 * trained, rel=0.02) and found["paged_adamw8bit"] == 0
    assert found["adamw"] / 2 < found["muon"] < found["adamw"]


class MadeMeanwhile(TorchDispatchMode):
    """The most bytes that ops allocated and had not freed."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and (at := tensor.untyped_storage().data_ptr()) not in self.known:
                self.known.add(at)
                self.live += tensor.nbytes
                weakref.finalize(tensor.untyped_storage(), self.freed, at, tensor.nbytes)
                self.peak = max(self.peak, self.live)
        return made

    def freed(self, at: int, size: int) -> None:
        self.known.discard(at)
        self.live -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adamw", partial(torch.optim.AdamW, foreach=True)),
        ("adam", partial(torch.optim.Adam, foreach=True)),
        ("adamw_fused", partial(torch.optim.AdamW, fused=True)),
        ("adagrad", partial(torch.optim.Adagrad, foreach=True)),
        ("rmsprop", partial(torch.optim.RMSprop, foreach=True)),
        ("momentum", partial(torch.optim.SGD, momentum=0.9, foreach=True)),
        ("sgd", partial(torch.optim.SGD, foreach=True)),
        ("adafactor", torch.optim.Adafactor),
        ("muon", torch.optim.Muon),
    ],
)
def test_each_optimizer_makes_what_its_own_step_makes(name: str, kind: Any, dtype: torch.dtype) -> None:
    weights = [nn.Parameter(torch.randn(512, 512, dtype=dtype)) for _ in range(6)]
    optimizer = kind(weights, lr=1e-3)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    with MadeMeanwhile(*weights, *gradients, *states) as made:
        optimizer.step()
    row, size = OPTIMIZERS[name], dtype.itemsize
    said = max(6 * row.together * size, row.alone(Held("", (512, 512), size, trained=True, stack=False)))
    assert made.peak == pytest.approx(512 * 512 * said, rel=0.02, abs=4096)


def test_a_fused_optimizer_makes_nothing() -> None:
    config = llama(dtype=torch.float32)
    foreach, fused = (
        autoplan.estimate(config, mesh="tp=1", sequence=8, optimizer=one) for one in ("adamw", "adamw_fused")
    )
    assert foreach.parts.temporary == foreach.parts.gradients and fused.parts.temporary < foreach.parts.temporary
    assert fused.parts.optimizer == foreach.parts.optimizer


def test_a_dtype_that_nothing_is_computed_in_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(autoplan.SourceError, match="sets the dtype float8_e4m3fn") as raised:
        resolve(folder_of(tmp_path, llama(), dtype="float8_e4m3fn"))
    assert "quantization_config" in str(raised.value)


def test_the_dtype_of_weights_is_not_that_of_adapters() -> None:
    """Of rank 4,096 these have more bytes than what they adapt."""
    config, lora = llama(dtype=torch.bfloat16), {"lora_rank": 4096, "lora_targets": ("q_proj", "v_proj")}
    found = autoplan.estimate(config, mesh="tp=1", sequence=64, train="lora", **lora)
    assert (found.dtype, found.dtype_origin) == ("bfloat16", "from the config")


def test_a_dry_run_says_that_the_checkpoint_is_quantised() -> None:
    config = llama(dtype=torch.bfloat16)
    config.quantization_config = FP8
    for one, notes in ((config, ["the checkpoint is quantised"]), (llama(dtype=torch.bfloat16), [])):
        ran = dry_run(one, mesh="tp=2", sequence=16)
        assert [note.partition(" (")[0] for note in ran.notes] == notes

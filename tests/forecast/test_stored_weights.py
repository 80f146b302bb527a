"""Weights are counted in the dtype and format that they are stored in, and the header says who says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig

import autoplan
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
        (None, {}, torch.float32, "the library's default: the config says no dtype"),
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
    with pytest.raises(autoplan.AutoplanError, match="cannot be read, and"):
        resolve(folder_of(tmp_path, llama()))


def test_adapters_beside_quantised_weights_leave_these_as_stored() -> None:
    """Full training of the same checkpoint computes, and counts, plain numbers."""
    config = llama(dtype=torch.bfloat16)
    keywords: dict[str, Any] = {"mesh": "dp_shard=2", "sequence": 64, "weights": "nf4"}
    full, adapters = (autoplan.estimate(config, train=train, **keywords) for train in ("full", "lora"))
    linears = 3 * (4 * 512 * 512 + 3 * 512 * 1024)
    assert full.parts.weights - adapters.parts.weights == pytest.approx(linears * (2 - 0.5 - 4 / 64) / 2, rel=0.15)
    assert "nf4" in str(adapters) and "nf4" not in full.weights_text


def test_a_plain_config_is_asked_about_in_other_formats() -> None:
    config = llama(dtype=torch.bfloat16, num_hidden_layers=8)
    keywords: dict[str, Any] = {"mesh": "tp=1", "sequence": 64, "train": "inference"}
    formats = ("float32", "bfloat16", "fp8", "nf4")
    wide, half, fp8, nf4 = (autoplan.estimate(config, **keywords, weights=one).parts.weights for one in formats)
    assert wide == pytest.approx(2 * half, rel=0.01) and half > 1.8 * fp8 > 2.8 * nf4
    with pytest.raises(autoplan.AutoplanError, match="weights='fp7'"):
        autoplan.estimate(config, mesh="tp=1", weights="fp7")
    with pytest.raises(autoplan.AutoplanError, match="no config describes"):
        autoplan.choose(nn.Linear(8, 8), gpus=1, weights="fp8")

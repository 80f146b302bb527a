"""A config that nothing can be built from is refused before anything is built, in one error and at once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoplan
from autoplan.common.errors import AutoplanError, SourceError
from autoplan.hf import configs as limits
from autoplan.hf.configs import check_config, limited_modules
from autoplan.hf.source import resolve

LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96},
}
VISION = {"model_type": "clip_vision_model", "image_size": 16_000_001, "patch_size": 8, "num_hidden_layers": 2}
LLAVA = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_head": 4, "n_layer": 2, "vocab_size": 96}
CASES: dict[str, tuple[Any, str]] = {
    "a list": ([], "holds a list"),
    "a type that is a list": ({**LLAMA, "model_type": ["llama"]}, "model_type must be text"),
    "no type": ({"hidden_size": 3}, "names no model_type"),
    "classes in a mapping": ({**LLAMA, "architectures": {"x": "LlamaForCausalLM"}}, "architectures must be a list"),
    "a class that is a number": ({**LLAMA, "architectures": [3]}, r"architectures\[0\]"),
    "a negative width": ({**LLAMA, "hidden_size": -32}, "hidden_size is -32"),
    "a billion layers": ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers is 1,000,000,000"),
    "a million experts": ({**LLAMA, "model_type": "mixtral", "num_local_experts": 10**6}, "num_local_experts"),
    "two million heads": ({**LLAMA, "num_key_value_heads": 2 * 10**6}, "num_key_value_heads"),
    "a wide model": ({**LLAMA, "hidden_size": 10**12}, "hidden_size is 1,000,000,000,000"),
    "two thousand layers": ({**LLAMA, "num_hidden_layers": 2000}, "at most 1,024 are built"),
    "many of both": ({**LLAMA, "num_hidden_layers": 1000, "num_local_experts": 8000}, "8,000,000 modules"),
    "no heads": ({**LLAMA, "num_attention_heads": 0, "num_key_value_heads": 0}, "cannot be"),
    "a text config that is text": ({**LLAVA, "text_config": "llama"}, "text_config must be a mapping"),
    "a number of many digits": ('{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "5,000 digits"),
    "nested": ("[" * 10_000, "nested"),
    "layers of a part": (
        {**LLAVA, "text_config": {**LLAMA, "num_hidden_layers": 10**9}},
        "text_config.num_hidden_layers",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_error_at_once(case: str, tmp_path: Path) -> None:
    data, said = CASES[case]
    (tmp_path / "config.json").write_text(data if isinstance(data, str) else json.dumps(data))
    resolve("llama")  # what is imported on first use is no part of the time
    start = time.process_time()
    with pytest.raises(AutoplanError, match=said) as caught:
        resolve(str(tmp_path)).module()
    assert time.process_time() - start < 2
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({**LLAMA, "vocab_size": 0}, "no values to choose example ids from"),
        ({**LLAVA, "text_config": LLAMA, "vision_config": VISION}, "numbers; at most"),
        (GPT2 | {"n_embd": 32_000_000}, "numbers; at most"),
    ],
)
def test_inputs_that_cannot_be_drawn_are_one_error(data: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(SourceError, match=said):
        autoplan.plan(str(tmp_path), 2, prove="none")


def test_default_configs_are_let_through() -> None:
    from transformers import AutoConfig

    for name in ("llama", "mixtral", "deepseek_v3", "gpt2", "phi4_multimodal", "doge", "llava"):
        check_config(AutoConfig.for_model(name).to_dict(), name)


def test_modules_are_counted_while_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a smaller limit: to register a million takes seconds."""
    assert limits.MOST_REGISTERED == 1_000_000
    monkeypatch.setattr(limits, "MOST_REGISTERED", 20_000)

    class Endless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number in range(limits.MOST_REGISTERED + 1):
                self.register_parameter("weight", None)
                self.weight = SAME
                self.number = number

    SAME = nn.Parameter(torch.zeros(1))
    with limited_modules("Small"):
        nn.Linear(2, 2)
    with pytest.raises(SourceError, match="more than 20,000 modules"), limited_modules("Endless"):
        Endless()

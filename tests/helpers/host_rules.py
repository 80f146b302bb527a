"""How vLLM and DeepSpeed look a module up in a plan, read off their sources and written anew: neither installs here.

`vllm_styles`: vllm/model_executor/models/transformers (`recursive_replace`, `replace_linear_class`).
`deepspeed_kinds`: deepspeed/module_inject/autotp_config.py (`AutoTPConfig`, `TPLayerSpec`).
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PretrainedConfig

__all__ = ["deepspeed_kinds", "vllm_styles"]

_VLLM = ("colwise", "colwise_rep", "rowwise", "rowwise_rep", "replicate")


def vllm_styles(config: PretrainedConfig, plan: dict[str, str], emptied: bool = True) -> dict[str, str]:
    """The style of each linear layer of the model that vLLM builds, by a walk as vLLM's.

    `plan` is set as the config's, and transformers puts the model's together as it does for vLLM; `emptied`: those of
    the configs inside have been emptied, as an export may ask. What vLLM fuses (query, key and value; gate and up) it
    cuts by itself, whatever the plan says: that is not read here.
    """
    config = copy.deepcopy(config)
    for name in config.sub_configs if emptied else ():
        getattr(config, name).base_model_tp_plan = {}
    config.base_model_tp_plan = plan
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    prefixed = {f"model.{key}": style for key, style in (model.tp_plan or {}).items()}
    found: dict[str, str] = {}

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            here = f"{path}.{name}"
            if isinstance(child, nn.Linear):
                key = next((k for k in prefixed if re.match(k, here)), None)
                style = "replicate" if key is None else prefixed[key]
                found[here.removeprefix("model.")] = style if style in _VLLM else "replicate"
            else:
                walk(child, here)

    walk(model, "model")
    return found


def deepspeed_kinds(config: dict[str, Any], parameters: list[str]) -> dict[str, str]:
    """How each parameter is cut: "column", "row", "skip", or "none" where no spec matches. Raises on a bad config."""
    section = config["partition_config"]
    known = {
        "layer_specs",
        "use_default_specs",
        "strict_mode",
        "lm_head_patterns",
        "embedding_partition_dim",
        "tp_size",
    }
    assert set(section) <= known, set(section) - known
    for spec in section["layer_specs"]:
        assert set(spec) <= {"patterns", "partition_type", "shape", "partition_dim", "model_types"}, spec
        assert spec["partition_type"] in ("column", "row", "skip") and all(map(re.compile, spec["patterns"]))
        if "shape" in spec:
            _check_shape(spec["shape"], spec.get("partition_dim", 0 if spec["partition_type"] == "column" else 1))
    found = {}
    for name in parameters:
        matching = [s for s in section["layer_specs"] if any(re.match(e, name) for e in s["patterns"])]
        assert len(matching) < 2, f"AutoTP warns: {name} matches {matching}"
        found[name] = matching[0]["partition_type"] if matching else "none"
    return found


def _check_shape(shape: list[Any], cut: int) -> None:
    """Whole numbers, -1 for one that follows, and nested sizes in the dim that is cut only."""
    assert isinstance(shape, list) and 0 <= cut < len(shape)
    for dim, size in enumerate(shape):
        if isinstance(size, list):
            assert dim == cut and size and all(isinstance(part, int) and part > 0 for part in size)
        else:
            assert isinstance(size, int) and (size == -1 or size > 0)

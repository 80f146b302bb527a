"""Which dtype weights have: what the config says, else the checkpoint beside it, else the library's default.

A config without a dtype is built in float32, which no released model is stored in: a figure must say where its dtype
is from. `stored_as` answers for a config how it would be stored otherwise.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

from autoplan.common.errors import AutoplanError, SourceError
from autoplan.hf.quantised.methods import USUAL_CONFIGS, quantization_config_of
from autoplan.hf.shrink import all_configs

__all__ = ["DTYPES", "settled_dtype", "stored_as"]

DTYPES = ("float32", "bfloat16", "float16")
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # as safetensors calls them


def settled_dtype(config: PretrainedConfig, where: str) -> tuple[PretrainedConfig, str]:
    """The config with a dtype, if anything says one, and who said it. `where`: the folder of the checkpoint, if any.

    Quantised checkpoints without one compute in bfloat16: no kernel for them takes float32.
    """
    parts = tuple(all_configs(config))
    dtype = next((part.dtype for part in parts if getattr(part, "dtype", None) is not None), None)
    origin = "from the config"
    if dtype is None:
        dtype = _of_checkpoint(Path(where)) if where else None
        origin = "from the checkpoint"
    if dtype is None and quantization_config_of(parts) is not None:
        dtype, origin = torch.bfloat16, "assumed: a quantised checkpoint whose config says no dtype"
    if dtype is None:
        return config, "the library's default: the config says no dtype"
    if getattr(config, "dtype", None) == dtype:
        return config, origin
    settled = copy.deepcopy(config)
    settled.dtype = dtype
    return settled, origin


def stored_as(config: PretrainedConfig | None, weights: str) -> PretrainedConfig:
    """A copy of `config` for a checkpoint whose weights are stored as `weights`: a dtype, or a quantised format."""
    known = (*DTYPES, *USUAL_CONFIGS)
    if weights not in known:
        raise AutoplanError(f"weights={weights!r}", hint=f"choose one of {', '.join(known)}")
    if config is None:
        raise AutoplanError(
            f"weights={weights!r} is asked of a model that no config describes",
            hint="give the config or the folder of the model, or the module in the dtype that is meant",
        )
    asked = copy.deepcopy(config)
    for part in all_configs(asked):
        if getattr(part, "quantization_config", None) is not None:
            part.quantization_config = None
    if weights in DTYPES:
        asked.dtype = getattr(torch, weights)
    else:
        said: dict[str, Any] = copy.deepcopy(USUAL_CONFIGS[weights])
        asked.quantization_config = said
    return asked


def _of_checkpoint(folder: Path) -> torch.dtype | None:
    """The floating dtype that takes the most bytes of the first file of weights; None where there is no file."""
    file = min(folder.glob("*.safetensors"), default=None) if folder.is_dir() else None
    if file is None:
        return None
    sizes: dict[torch.dtype, int] = {}
    try:
        with safe_open(str(file), framework="pt", device="cpu") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                entry = tensors.get_slice(key)
                dtype = _FLOATS.get(entry.get_dtype())
                if dtype is not None:
                    sizes[dtype] = sizes.get(dtype, 0) + torch.Size(entry.get_shape()).numel() * dtype.itemsize
    except (SafetensorError, OSError) as error:
        raise SourceError(
            f"{file} cannot be read, and {folder}/config.json says no dtype: {error}",
            hint="complete the download, or write the dtype into config.json",
        ) from error
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)

"""Read configs: attention, dtypes, limits of size."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn.modules import module as torch_modules
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from autoplan.common.errors import AutoplanError, SourceError
from autoplan.common.files.decode import misshapen
from autoplan.common.torch_internals import efficient_attention, flash_attention
from autoplan.hf.quantised.methods import USUAL_CONFIGS, quantization_config_of
from autoplan.hf.shrink import all_configs
from autoplan.hf.tiny_sizes import field_rule, is_layer_count, is_token_id

# A config is foreign data: its types and sizes are checked before anything is built from it, and modules are counted
# while it is built.

_OPEN = type(None)
_SHAPE = {
    **{"model_type": (str, _OPEN), "architectures": ([str], _OPEN)},
    "auto_map": ({"*": (str, [(str, _OPEN)], _OPEN)}, str, _OPEN),
}
MOST_LAYERS = 1024
MOST_PARALLEL = 1 << 14  # heads, experts
MOST_SIZE = 1 << 26
MOST_REGISTERED = 1_000_000  # modules and parameters of one model


def check_config(data: Any, where: str) -> None:
    """Raise SourceError on the first value that no model can be built from."""
    if not isinstance(data, Mapping):
        raise SourceError(f"{where} holds a {type(data).__name__}, not a config", hint="fetch the file again")
    for path, part in _configs(data):
        prefix = f"{where}: {path}" if path else f"{where}: "
        inner = {name: value for name, value in part.items() if isinstance(name, str) and name.endswith("_config")}
        wrong = (misshapen(value, ({}, _OPEN), name) for name, value in inner.items() if not isinstance(value, list))
        problem = misshapen(part, _SHAPE) or next(filter(None, wrong), "")
        problem = problem or next(filter(None, map(_absurd, part.items())), "")
        # Layers and experts may be few each, but too many in total.
        whole = {name: n for name, n in part.items() if isinstance(n, int) and not isinstance(n, bool)}
        layers = max((n for name, n in whole.items() if is_layer_count(str(name)) == "depth"), default=1)
        experts = max((n for name, n in whole.items() if field_rule(str(name))[0] == "experts"), default=1)
        if not problem and layers * experts > MOST_REGISTERED:
            problem = f"{layers:,} layers of {experts:,} experts are {layers * experts:,} modules, too many to build"
        if problem:
            raise SourceError(f"{prefix}{problem}", hint="fix the config, or fetch the file again")


def _configs(data: Mapping[str, Any], path: str = "", depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a config and those inside it, each with the path to it."""
    yield path, data
    for name, value in data.items():
        if isinstance(value, Mapping) and str(name).endswith("config") and depth < 8:
            yield from _configs(value, f"{path}{name}.", depth + 1)


def _absurd(field: tuple[str, Any]) -> str:
    name, value = field
    listed = isinstance(value, (list, tuple))
    sizes = [n for n in (value if listed else (value,)) if isinstance(n, int) and not isinstance(n, bool)]
    if not isinstance(name, str) or is_token_id(name) or not sizes:
        return ""
    kind, layers = field_rule(name)[0], is_layer_count(name)
    limit = MOST_PARALLEL if kind == "experts" or kind.endswith("heads") else MOST_SIZE if kind else 1 << 53
    limit = MOST_LAYERS if layers else limit
    counts = layers == "depth" or (bool(kind) and kind != "chunk")  # -1: no chunks
    for size in sizes:
        if size > limit:
            return f"{name} is {size:,}; at most {limit:,} are built"
        if size < 0 and not listed and counts:
            return f"{name} is {size}; a size is not negative"
    return ""


@contextmanager
def limited_modules(name: str) -> Iterator[None]:
    """Raise SourceError if a model is built of more modules and parameters than any real one has."""
    thread, registered = threading.get_ident(), 0

    def count(*_: Any) -> None:
        nonlocal registered
        if threading.get_ident() == thread:
            registered += 1
            if registered > MOST_REGISTERED:
                hint = "check the counts in its config"
                raise SourceError(f"{name} would have more than {MOST_REGISTERED:,} modules and parameters", hint=hint)

    with (
        torch_modules.register_module_module_registration_hook(count),
        torch_modules.register_module_parameter_registration_hook(count),
    ):
        yield


# Models without a path through scaled_dot_product_attention (gpt-oss: learned sinks) are built with eager attention,
# which keeps all scores, but run with a flash kernel on a GPU. On tensors without storage, torch's flash op stands for
# that kernel.

_NAME = "autoplan_flash"
_WIDEST = 256  # largest head dim of the flash kernel


def attention_of(model: Any) -> str | None:
    """Return the name of a model's attention implementation; None for a model of another library."""
    return getattr(model.config, "_attn_implementation", None)


def take_flash_attention(model: nn.Module) -> bool:
    """Switch a copy without storage to the flash kernel where its class has that but not SDPA; return if any has."""
    changed = False
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or part._supports_sdpa or not part._supports_flash_attn:
            continue
        if part.config._attn_implementation == "eager":
            AttentionInterface.register(_NAME, _flash)
            part.config._attn_implementation = _NAME
        changed = changed or part.config._attn_implementation == _NAME
    return changed


def _flash(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    scaling: float | None = None, dropout: float = 0.0, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    if query.shape[-1] == value.shape[-1] <= _WIDEST:
        mixed = flash_attention(query, key, value, dropout, True, scale=scaling)[0]
    else:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = efficient_attention(query, key, value, None, query.requires_grad, dropout, True, scale=scaling)[0]
    return mixed.transpose(1, 2), None


# The dtype of weights: the config's, else that of the checkpoint beside it, else the library's default.

DTYPES = ("float32", "bfloat16", "float16")
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # as safetensors calls them


def settled_dtype(config: PretrainedConfig, where: str) -> tuple[PretrainedConfig, str]:
    """Return the config with a dtype, and its origin. `where`: the folder of the checkpoint. A quantised checkpoint
    without a dtype computes in bfloat16: no kernel for it takes float32."""
    parts = tuple(all_configs(config))
    dtype = next((part.dtype for part in parts if getattr(part, "dtype", None) is not None), None)
    origin = "from the config"
    if dtype is None:
        dtype = _of_checkpoint(Path(where)) if where else None
        origin = "from the checkpoint"
    if dtype is None and quantization_config_of(parts) is not None:
        dtype, origin = torch.bfloat16, "assumed: a quantised checkpoint whose config sets no dtype"
    if dtype is None:
        return config, "the library's default: the config sets no dtype"
    if isinstance(dtype, torch.dtype) and (dtype.itemsize < 2 or not dtype.is_floating_point):
        name = str(dtype).removeprefix("torch.")
        raise SourceError(
            f"{where or type(config).__name__}: the config sets the dtype {name}, in which torch builds no model",
            hint=f"set it to one of {', '.join(DTYPES)}; how weights are stored is said in quantization_config",
        )
    if getattr(config, "dtype", None) == dtype:
        return config, origin
    settled = copy.deepcopy(config)
    settled.dtype = dtype
    return settled, origin


def stored_as(config: PretrainedConfig | None, weights: str) -> PretrainedConfig:
    """Return a copy of `config` for a checkpoint with weights stored as `weights`: a dtype, or a quantised format."""
    choices = (*DTYPES, *USUAL_CONFIGS)
    if weights not in choices:
        raise AutoplanError(f"weights={weights!r}", hint=f"choose one of {', '.join(choices)}")
    if config is None:
        hint = "pass the config or the folder of the model, or the module in that dtype"
        raise AutoplanError(f"weights={weights!r} was requested for a model without a config", hint=hint)
    changed = copy.deepcopy(config)
    for part in all_configs(changed):
        if getattr(part, "quantization_config", None) is not None:
            part.quantization_config = None
    if weights in DTYPES:
        changed.dtype = getattr(torch, weights)
    else:
        changed.quantization_config = copy.deepcopy(USUAL_CONFIGS[weights])
    return changed


def _of_checkpoint(folder: Path) -> torch.dtype | None:
    """Return the floating dtype with most bytes in the first weight file; None without such a file."""
    file = min(folder.glob("*.safetensors"), default=None) if folder.is_dir() else None
    if file is None:
        return None
    sizes: Counter[torch.dtype] = Counter()
    try:
        with safe_open(str(file), framework="pt", device="cpu") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                entry = tensors.get_slice(key)
                if (dtype := _FLOATS.get(entry.get_dtype())) is not None:
                    sizes[dtype] += torch.Size(entry.get_shape()).numel() * dtype.itemsize
    except (SafetensorError, OSError) as error:
        hint = "complete the download, or set the dtype in config.json"
        raise SourceError(f"cannot read {file}, and {folder}/config.json sets no dtype: {error}", hint=hint) from error
    return max(sizes, key=sizes.__getitem__, default=None)

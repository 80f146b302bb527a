"""transformers' names and conventions, as the value that rooms below read (common/conventions.py).

Importing this loads neither torch nor transformers: functions look transformers up only if it is loaded.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoplan.common.conventions import Conventions
from autoplan.hf.own_sharding import from_config, no_plan_because, plan_parts, shipped_plan

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig


def _config_of(module: nn.Module) -> PretrainedConfig | None:
    """Return a module's transformers config; None if `.config` is anything else (a dataclass, a dict, argparse's)."""
    library = sys.modules.get("transformers.configuration_utils")
    config = getattr(module, "config", None)
    return config if library is not None and isinstance(config, library.PretrainedConfig) else None


def _builder_of(cls: Any, model: nn.Module) -> Callable[[], nn.Module] | None:
    config = _config_of(model)
    build = from_config(cls)
    return None if config is None or build is None else lambda: build(copy.deepcopy(config))


def _base_path(model: nn.Module) -> str:
    prefix = getattr(model, "base_model_prefix", "")
    return prefix if prefix and prefix in dict(model.named_children()) else ""


def _later(module: str, name: str) -> Callable[..., Any]:
    """Return a function of this room; its module is imported on the first call."""
    return lambda *args: getattr(import_module(f"autoplan.hf.{module}"), name)(*args)


def _saves(module: nn.Module) -> bool:
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def _adapters_of(module: nn.Module) -> tuple[str, ...]:
    wraps = "peft" in sys.modules and hasattr(module, "get_base_model") and not _saves(module)
    settings = getattr(module, "peft_config", None) if wraps else None
    return tuple(settings) if isinstance(settings, dict) else ()


def _base_of(module: nn.Module) -> nn.Module:
    return module.get_base_model() if _adapters_of(module) else module


def _parts_to_save(model: nn.Module, options: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the tensors of adapters that peft would save, for a model that wraps another or has adapters itself."""
    names = options.get("selected_adapters") or _adapters_of(model)
    if not names and not getattr(model, "_hf_peft_config_loaded", False):
        return None
    from peft import get_peft_model_state_dict

    state = model.state_dict()
    layers = {key: value for key, value in options.items() if key == "save_embedding_layers"}
    saved: set[int] = set()
    for name in names:
        own_state = get_peft_model_state_dict(model, state_dict=state, adapter_name=name, **layers)
        saved |= {id(tensor) for tensor in own_state.values()}
    if not names:
        own: Any = model
        saved = {id(tensor) for tensor in own.get_adapter_state_dict(state_dict=state).values()}
    return tuple(name for name, tensor in state.items() if id(tensor) in saved)


def _is_transposed_linear(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's Conv1D, a linear layer with a transposed weight."""
    kind = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return kind is not None and isinstance(module, kind) and type(module).forward is kind.forward


TRANSFORMERS = Conventions(
    targets="labels",
    target_words=("label", "target"),
    loss="loss",
    logits="logits",
    hidden="last_hidden_state",
    cache_switch="use_cache",
    last_logits="logits_to_keep",
    rate_words=("drop", "noise", "jitter"),
    rate_suffix="dropout",
    idle_words=("token_id", "label2id", "id2label"),
    saving="save_pretrained",
    resizing="resize_token_embeddings",
    adding=(("add_adapter", 0), ("load_adapter", 1)),
    own_checkpointing=("gradient_checkpointing", "gradient_checkpointing_disable"),
    ends=("get_input_embeddings", "get_output_embeddings"),
    hook_marks=("_output_capturing_hooks_installed",),
    kernel_settings=(("_experts_implementation", "batched_mm"),),
    kernels_on_gpu=(("_experts_implementation", "grouped_mm"),),
    trusted=("transformers", "peft", "accelerate"),
    idle_settings=(
        "_", "architectures", "auto_map", "dtype", "gradient_checkpointing", "name_or_path", "output_", "return_dict",
        "torch_dtype", "tp_", "transformers_version", "use_cache", "warnings_issued",
    ),
    config_of=_config_of,
    builder_of=_builder_of,
    base_path=_base_path,
    checkpoint_names=lambda model: _later("checkpoints", "checkpoint_names")(_base_of(model)),
    checkpoint_writer=_later("checkpoints", "checkpoint_writer"),
    shipped_plan=shipped_plan,
    shipped_parts=lambda model: plan_parts(model, _config_of),
    is_base=lambda cls: cls is getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None),
    is_transposed_linear=_is_transposed_linear,
    stored_aliases=_later("quantised.weights", "stored_aliases"),
    stored_weights=_later("quantised.weights", "stored_weights"),
    saves=_saves,
    adapters_of=_adapters_of,
    base_of=_base_of,
    base_names=lambda module: _later("adapters", "base_names")(module) if "peft" in sys.modules else {},
    adapted_as=_later("adapters", "adapted_as"),
    parts_to_save=_parts_to_save,
    no_plan_because=no_plan_because,
)  # fmt: skip

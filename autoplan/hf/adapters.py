"""A tiny clone of a model that peft wrapped: the tiny clone of the model inside, wrapped by the same settings.

The class and config of the model inside still say how to build it; what was added to it stands in `peft_config`.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from autoplan.common.errors import SourceError
from autoplan.hf.shrink import all_configs

__all__ = ["settings_of", "usual_targets", "wrap"]


def settings_of(model: nn.Module) -> dict[str, Any] | None:
    """The settings of each adapter by name; None for a model that peft did not wrap."""
    settings = getattr(model, "peft_config", None)
    wrapped = isinstance(settings, dict) and settings and hasattr(model, "get_base_model")
    return settings if wrapped and not isinstance(model, PreTrainedModel) else None


def wrap(model: nn.Module, settings: dict[str, Any]) -> nn.Module:
    """Put adapters of the same settings on `model`."""
    from peft import get_peft_model

    (first, *others) = settings
    try:
        wrapped: nn.Module = get_peft_model(model, copy.deepcopy(settings[first]), adapter_name=first)
        for name in others:
            wrapped.add_adapter(name, copy.deepcopy(settings[name]))
    except ValueError as error:  # settings that name layers which a tiny clone does not have
        raise SourceError(
            f"a tiny clone cannot take the adapters of this model: {error}",
            hint="plan with prove='none', or verify a small model of the same class with the same adapters",
        ) from error
    return wrapped


def usual_targets(model_type: str, config: PretrainedConfig | None) -> tuple[str, ...] | str:
    """The layers that peft's LoRA is put beside where none are named, for this type of model or a part of it.

    Raises SourceError where peft has no answer: what would be trained is then for the user to say.
    """
    hint = "name them: --lora-targets q_proj,v_proj (lora_targets=), or all-linear"
    try:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as usual
    except ImportError as error:
        raise SourceError("peft, which knows the usual layers for adapters, is not installed", hint=hint) from error
    parts = [] if config is None else all_configs(config)
    types = dict.fromkeys((model_type, *(getattr(part, "model_type", "") for part in parts)))
    targets = next((usual[name] for name in types if name in usual), None)
    if targets is None:
        raise SourceError(f"peft knows no usual layers for adapters of model type {model_type!r}", hint=hint)
    return targets if isinstance(targets, str) else tuple(targets)

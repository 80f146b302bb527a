"""Models that peft changed: put the same adapters on another model, and map names to those of the model inside."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from autoplan.common.conventions import BaseName
from autoplan.common.errors import SourceError
from autoplan.common.torch_internals import own_buffers, own_modules, own_parameters
from autoplan.hf.shrink import all_configs


def settings_of(model: nn.Module) -> dict[str, Any] | None:
    """Return the settings of each adapter by name; None for a model that peft did not wrap."""
    settings = getattr(model, "peft_config", None)
    wrapped = isinstance(settings, dict) and settings and hasattr(model, "get_base_model")
    return settings if wrapped and not isinstance(model, PreTrainedModel) else None


def wrap(model: nn.Module, settings: dict[str, Any]) -> nn.Module:
    """Put adapters with the same settings on `model`."""
    from peft import get_peft_model

    (first, *others) = settings
    try:
        wrapped: nn.Module = get_peft_model(model, copy.deepcopy(settings[first]), adapter_name=first)
        for name in others:
            wrapped.add_adapter(name, copy.deepcopy(settings[name]))
    except ValueError as error:  # settings may name layers that a tiny clone does not have
        hint = "plan with prove='none', or verify a small model of the same class with the same adapters"
        raise SourceError(f"the adapters of this model cannot be added to a tiny clone: {error}", hint=hint) from error
    return wrapped


def adapted_as(model: nn.Module, base: nn.Module) -> nn.Module:
    """Put the adapters of `model` on `base`, a new model of the class inside it, as peft makes them."""
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft has warned already, when the model was made
        wrapper = settings_of(model)
        if wrapper is not None:
            return wrap(base, wrapper)
        for name, settings in (getattr(model, "peft_config", None) or {}).items():
            inject_adapter_in_model(copy.deepcopy(settings), base, name)
    return base


def base_names(model: nn.Module) -> dict[str, BaseName]:
    """Return each parameter's and buffer's name in the model inside; empty if peft changed nothing."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    changed = (PeftModel, BaseTunerLayer, AuxiliaryTrainingWrapper)
    return dict(_base_names(model, "", "")) if any(isinstance(module, changed) for module in model.modules()) else {}


def _base_names(module: nn.Module, path: str, base: str, copied: bool = False) -> Iterator[tuple[str, BaseName]]:
    """Yield the names below a module at `path` in `model`, and at `base` in the model inside; both end with a dot."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    kinds: dict[type, tuple[str, ...]] = {  # class -> children that are, or contain, the original
        PeftModel: ("base_model",),
        BaseTuner: ("model",),
        BaseTunerLayer: ("base_layer",),
        AuxiliaryTrainingWrapper: ("original_module", "token_adapter"),
    }
    originals = next((names for kind, names in kinds.items() if isinstance(module, kind)), None)
    for name in (*own_parameters(module), *own_buffers(module)):
        yield path + name, BaseName(base + name, copied) if originals is None else BaseName(None)
    for name, child in own_modules(module).items():
        if child is None:
            continue
        if originals is None:
            yield from _base_names(child, f"{path}{name}.", f"{base}{name}.", copied)
        elif name in originals:
            yield from _base_names(child, f"{path}{name}.", base, copied)
        elif name in ("modules_to_save", "ln_tuning_layers"):  # one copy of the original per adapter
            for adapter, copy_ in child.named_children():
                yield from _base_names(copy_, f"{path}{name}.{adapter}.", base, True)
        else:
            tensors = (*child.named_parameters(remove_duplicate=False), *child.named_buffers(remove_duplicate=False))
            yield from ((f"{path}{name}.{own}", BaseName(None)) for own, _ in tensors)


def usual_targets(model_type: str, config: PretrainedConfig | None) -> tuple[str, ...] | str:
    """Return the layers that peft's LoRA adapts by default in this type of model; raise SourceError without any."""
    hint = "pass their names: lora_targets='q_proj,v_proj', or all-linear"
    try:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as usual
    except ImportError as error:
        raise SourceError("peft, which knows the default target layers, is not installed", hint=hint) from error
    parts = [] if config is None else all_configs(config)
    types = dict.fromkeys((model_type, *(getattr(part, "model_type", "") for part in parts)))
    targets = next((usual[name] for name in types if name in usual), None)
    if targets is None:
        raise SourceError(f"peft has no default target layers for model type {model_type!r}", hint=hint)
    return targets if isinstance(targets, str) else tuple(targets)

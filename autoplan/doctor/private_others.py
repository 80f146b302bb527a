"""The undocumented parts of transformers, and of Python, that autoplan uses, with their canaries."""

from __future__ import annotations

import importlib.util
import inspect
import threading
from collections.abc import Callable
from typing import Any

from autoplan.common.requirements import OWN_SHARDING, older_than
from autoplan.doctor.examine import Private, Table

OTHERS = Table()
_TP, _LOADING, _MODEL = "transformers.distributed", "transformers.core_model_loading", "transformers.PreTrainedModel"
_NAMES = "checkpoint keys are mapped as transformers maps them"
_PIECE = "a rank's shard equals the one that transformers would load"
_RUN = "plans in transformers' dialect are run by transformers"


def _config_keeps(name: str, value: str) -> Callable[[], bool]:
    """Return a check that a config returns the value that was set under this name."""

    def check() -> bool:
        from transformers import LlamaConfig

        config = LlamaConfig()
        present = hasattr(config, name)
        setattr(config, name, value)
        return present and getattr(config, name) == value

    return check


@OTHERS.hold("a thread interrupted while releasing a lock must still release it", "threading.RLock._is_owned")
def _owned() -> bool:
    """Return whether only the owning thread says that it owns the lock."""
    lock: Any = threading.RLock()
    free = lock._is_owned()
    with lock:
        return (free, lock._is_owned()) == (False, True)


@OTHERS.hold(
    "a model's intermediate outputs in another process",
    f"{_MODEL}._can_record_outputs",
    "transformers.utils.output_capturing._CAN_RECORD_REGISTRY",
)
def _record_registry() -> bool:
    """Return whether models register what may be collected while they are built."""
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    return hasattr(_CAN_RECORD_REGISTRY, "__setitem__") and hasattr(PreTrainedModel, "_can_record_outputs")


@OTHERS.hold("the plan that ships with a model is audited, and replaced by an export", f"{_MODEL}._tp_plan")
def _plans() -> bool:
    from transformers import LlamaConfig, LlamaForCausalLM

    return isinstance(LlamaForCausalLM._tp_plan, dict) and isinstance(LlamaConfig.base_model_tp_plan, dict)


@OTHERS.hold("a class's claim of expert parallelism is audited", f"{_MODEL}._ep_plan")
@OTHERS.hold("the blocks that a class names are compared with the model", f"{_MODEL}._no_split_modules")
@OTHERS.hold("a class's claim of pipeline parallelism is audited", f"{_MODEL}._pp_plan")
def _claims() -> bool:
    from transformers import LlamaForCausalLM

    named = LlamaForCausalLM._no_split_modules, LlamaForCausalLM._pp_plan
    experts = getattr(LlamaForCausalLM, "_ep_plan", None)  # older versions set it on instances only
    return all(named) and (experts is None or isinstance(experts, dict))


@OTHERS.hold("a stage of a split model runs without its messages", f"{_MODEL}._pp_stage")
def _pipeline_stage() -> bool:
    """Return whether a model that transformers splits over stages holds its own. (Older versions split none.)"""
    home = "transformers.distributed.pipeline_parallel"
    return importlib.util.find_spec(home) is None or "model._pp_stage = " in inspect.getsource(
        importlib.import_module(home)
    )


@OTHERS.hold(
    "a claim of context parallelism is run as accelerate runs it",
    "accelerate.big_modeling._attach_context_parallel_hooks",
)
def _context_hooks() -> bool:
    """Return whether it registers hooks, which remove the mask from attention."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from autoplan.hf.own_sharding import context_hooks

    attach = context_hooks()
    if attach is None:  # not installed, or too old: the claim is not tested then
        return True
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "head_dim"), 8)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1))
    attach(model)
    return any(module._forward_pre_hooks for module in model.modules())


@OTHERS.hold(
    "a step of a model without SDPA is priced with the flash kernel",
    f"{_MODEL}._supports_flash_attn",
    f"{_MODEL}._supports_sdpa",
)
def _attention_paths() -> bool:
    from transformers import PreTrainedModel

    return not (PreTrainedModel._supports_sdpa or PreTrainedModel._supports_flash_attn)


@OTHERS.hold("a copy of a model has none of its hooks", f"{_MODEL}._output_capturing_hooks_installed")
def _hook_flag() -> bool:
    source = inspect.getsource(importlib.import_module("transformers.utils.output_capturing"))
    return "_output_capturing_hooks_installed" in source


@OTHERS.hold("layers of different sizes are shrunk alike", "transformers.PretrainedConfig._heterogeneity_spec")
def _single_layers() -> bool:
    """Return whether the config holds fields of single layers, by layer; older versions have none."""
    from transformers import LlamaConfig

    if not hasattr(LlamaConfig, "per_layer_config"):
        return True
    config = LlamaConfig(num_hidden_layers=2, per_layer_config={1: {"intermediate_size": 8}})
    return bool(vars(config)["_heterogeneity_spec"].per_layer_overrides == {1: {"intermediate_size": 8}})


@OTHERS.hold("key changes made when a model was loaded are reversed when it is saved", f"{_MODEL}._weight_conversions")
def _reversed_conversions() -> bool:
    """Return whether saving reads the attribute, before the conversions of the model's type."""
    from transformers.core_model_loading import revert_weight_conversion

    return "_weight_conversions" in revert_weight_conversion.__code__.co_consts


OTHERS.extend(
    Private(f"transformers.PretrainedConfig.{name}", why, _config_keeps(name, value))
    for name, value, why in (
        ("_attn_implementation", "eager", "both attention implementations are checked"),
        ("_experts_implementation", "batched_mm", "experts are recorded in a form that runs without storage"),
    )
)
OTHERS.there(
    {
        "transformers.conversion_mapping.get_model_conversion_mapping(model, …)": _NAMES,
        f"{_LOADING}.rename_source_key(source_key, …)": _NAMES,
        f"{_LOADING}.WeightTransform._original_source_patterns": _NAMES,
        f"{_LOADING}.WeightTransform._original_target_patterns": _NAMES,
        f"{_LOADING}.revert_weight_conversion(model, …)": "tensors are saved as transformers would save them",
        f"{_LOADING}.WeightConverter:rename_source_key(self, source_key)": "tensors of a conversion are saved together",
        f"{_MODEL}._hf_peft_config_loaded": "a model with adapters of its own saves only these",
        f"{_MODEL}._keys_to_ignore_on_save": "tensors that transformers does not save",
        f"{_MODEL}._keys_to_ignore_on_load_missing": "keys that a checkpoint may lack",
        f"{_MODEL}._keys_to_ignore_on_load_unexpected": "checkpoint keys that belong to no parameter",
        f"{_MODEL}._from_config": "buffers of a model without storage are recomputed",
        f"{_MODEL}._keep_in_fp32_modules": "modules that are never quantised",
    }
)
# Older versions shard by other code, and audits of their own plans are refused.
OTHERS.there(
    {
        f"{_TP}.mixin.DistributedMixin._expand_parallel_plan(self, plan, …)": _RUN,
        f"{_TP}.tensor_parallel.apply_tensor_parallelism": _RUN,
        f"{_TP}.tensor_parallel.ALL_PARALLEL_STYLES": "the styles of the installed version",
        f"{_TP}.sharding_utils.DtensorShardOperation:shard_tensor(self, …)": _PIECE,
    },
    needed=not older_than("transformers", OWN_SHARDING),
)

"""The undocumented parts of transformers, and of Python, that autoplan uses, with their canaries."""

from __future__ import annotations

import importlib.util
import inspect
import threading
from collections.abc import Callable
from typing import Any

from autoplan.common.requirements import OWN_SHARDING, older_than
from autoplan.doctor.private import Private


def _has(path: str, *parameters: str) -> Callable[[], bool]:
    """Is there such a member of a module or of a class in one, and does it take these parameters?"""

    def check() -> bool:
        found = _member(path)
        return not parameters or set(parameters) <= set(inspect.signature(found).parameters)

    return check


def _member(path: str) -> Any:
    home, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(home), name)
    except ModuleNotFoundError:
        return getattr(_member(home), name)


def _config_keeps(name: str, value: str) -> Callable[[], bool]:
    """Is what is chosen there what the config says afterwards?"""

    def check() -> bool:
        from transformers import LlamaConfig

        config = LlamaConfig()
        known = hasattr(config, name)
        setattr(config, name, value)
        return known and getattr(config, name) == value

    return check


def _owned() -> bool:
    """Only the thread that has it says so."""
    lock: Any = threading.RLock()
    free = lock._is_owned()
    with lock:
        return (free, lock._is_owned()) == (False, True)


def _record_registry() -> bool:
    """What may be collected is noted for each model while it is built."""
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    return hasattr(_CAN_RECORD_REGISTRY, "__setitem__") and hasattr(PreTrainedModel, "_can_record_outputs")


def _plans() -> bool:
    from transformers import LlamaConfig, LlamaForCausalLM

    return isinstance(LlamaForCausalLM._tp_plan, dict) and isinstance(LlamaConfig.base_model_tp_plan, dict)


def _claims() -> bool:
    from transformers import LlamaForCausalLM

    named = LlamaForCausalLM._no_split_modules, LlamaForCausalLM._pp_plan
    experts = getattr(LlamaForCausalLM, "_ep_plan", None)  # older ones give it to instances only
    return all(named) and (experts is None or isinstance(experts, dict))


def _pipeline_stage() -> bool:
    """A model that transformers splits over stages holds its own. (Older ones split none: nothing is claimed then.)"""
    home = "transformers.distributed.pipeline_parallel"
    return importlib.util.find_spec(home) is None or "model._pp_stage = " in inspect.getsource(
        importlib.import_module(home)
    )


def _attention_paths() -> bool:
    from transformers import PreTrainedModel

    return not (PreTrainedModel._supports_sdpa or PreTrainedModel._supports_flash_attn)


def _missing_keys() -> bool:
    from transformers import PreTrainedModel

    names = ("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected")
    return all(hasattr(PreTrainedModel, name) for name in names)


_TP = "transformers.distributed"


def _operation() -> bool:
    return _has("transformers.distributed.sharding_utils.DtensorShardOperation.shard_tensor", "self")()


def _of_own_sharding(holds: Callable[[], bool]) -> Callable[[], bool]:
    """Older versions shard by other code, and audits of their own plans are refused."""
    return (lambda: True) if older_than("transformers", OWN_SHARDING) else holds


def _hook_flag() -> bool:
    source = inspect.getsource(importlib.import_module("transformers.utils.output_capturing"))
    return "_output_capturing_hooks_installed" in source


def _single_layers() -> bool:
    """Fields of single layers stand in the config, by layer; before there were any, there is nothing to find."""
    from transformers import LlamaConfig

    if not hasattr(LlamaConfig, "per_layer_config"):
        return True
    config = LlamaConfig(num_hidden_layers=2, per_layer_config={1: {"intermediate_size": 8}})
    return bool(vars(config)["_heterogeneity_spec"].per_layer_overrides == {1: {"intermediate_size": 8}})


def _reversed_conversions() -> bool:
    """Is the attribute what saving reads, before the conversions of the model's type?"""
    from transformers.core_model_loading import revert_weight_conversion

    return "_weight_conversions" in revert_weight_conversion.__code__.co_consts


OTHERS = (
    Private(
        f"{_TP}.mixin.DistributedMixin._expand_parallel_plan",
        "a plan in transformers' words is run by transformers",
        _of_own_sharding(_has(f"{_TP}.mixin.DistributedMixin._expand_parallel_plan", "plan")),
    ),
    Private(
        f"{_TP}.tensor_parallel.apply_tensor_parallelism",
        "a plan in transformers' words is run by transformers",
        _of_own_sharding(_has(f"{_TP}.tensor_parallel.apply_tensor_parallelism")),
    ),
    Private(
        f"{_TP}.tensor_parallel.ALL_PARALLEL_STYLES",
        "which styles the installed version knows",
        _of_own_sharding(_has(f"{_TP}.tensor_parallel.ALL_PARALLEL_STYLES")),
    ),
    Private(
        f"{_TP}.sharding_utils.DtensorShardOperation",
        "a rank's piece is what transformers would load",
        _of_own_sharding(_operation),
    ),
    Private(
        "transformers.conversion_mapping.get_model_conversion_mapping",
        "names in checkpoints are those that transformers would read",
        _has("transformers.conversion_mapping.get_model_conversion_mapping", "model"),
    ),
    Private(
        "transformers.core_model_loading.rename_source_key",
        "names in checkpoints are those that transformers would read",
        _has("transformers.core_model_loading.rename_source_key", "source_key"),
    ),
    Private(
        "transformers.core_model_loading.WeightConverter",
        "tensors that one conversion takes together are saved together",
        _has("transformers.core_model_loading.WeightConverter.rename_source_key", "source_key"),
    ),
    Private(
        "transformers.core_model_loading.revert_weight_conversion",
        "tensors are saved as transformers would save them",
        _has("transformers.core_model_loading.revert_weight_conversion", "model"),
    ),
    Private(
        "transformers.PreTrainedModel._weight_conversions",
        "what changed names when a model was loaded is reversed when it is saved",
        _reversed_conversions,
    ),
    Private(
        "transformers.PreTrainedModel._hf_peft_config_loaded",
        "a model with adapters of its own saves these alone",
        _has("transformers.PreTrainedModel._hf_peft_config_loaded"),
    ),
    Private(
        "transformers.PreTrainedModel._keys_to_ignore_on_save",
        "tensors that transformers does not save",
        _has("transformers.PreTrainedModel._keys_to_ignore_on_save"),
    ),
    Private(
        "transformers.PreTrainedModel._from_config",
        "buffers of a model without storage are computed again",
        _has("transformers.PreTrainedModel._from_config"),
    ),
    Private("transformers.PreTrainedModel._ep_plan", "what a class claims of expert parallelism is audited", _claims),
    Private(
        "transformers.PreTrainedModel._no_split_modules",
        "the blocks that a class names are held against the model",
        _claims,
    ),
    Private("transformers.PreTrainedModel._pp_plan", "what a class claims of pipelines is audited", _claims),
    Private(
        "transformers.PreTrainedModel._pp_stage",
        "a stage of a split model is run without its messages",
        _pipeline_stage,
    ),
    Private(
        "transformers.PreTrainedModel._tp_plan",
        "the plan that ships with a model is audited, and replaced by an export",
        _plans,
    ),
    Private(
        "transformers.PreTrainedModel._can_record_outputs",
        "inner outputs of a model in another process",
        _record_registry,
    ),
    Private(
        "transformers.utils.output_capturing._CAN_RECORD_REGISTRY",
        "inner outputs of a model in another process",
        _record_registry,
    ),
    Private(
        "transformers.PreTrainedModel._output_capturing_hooks_installed",
        "a copy of a model has none of its hooks",
        _hook_flag,
    ),
    Private(
        "transformers.PreTrainedModel._keys_to_ignore_on_load_missing",
        "which keys a checkpoint may lack",
        _missing_keys,
    ),
    Private(
        "transformers.PreTrainedModel._keys_to_ignore_on_load_unexpected",
        "which keys of a checkpoint belong to no parameter",
        _missing_keys,
    ),
    Private(
        "transformers.PreTrainedModel._supports_flash_attn",
        "a step of a model without SDPA is priced with the flash kernel",
        _attention_paths,
    ),
    Private(
        "transformers.PreTrainedModel._supports_sdpa",
        "a step of a model without SDPA is priced with the flash kernel",
        _attention_paths,
    ),
    Private(
        "transformers.PretrainedConfig._attn_implementation",
        "both ways of attention are checked",
        _config_keeps("_attn_implementation", "eager"),
    ),
    Private(
        "transformers.PretrainedConfig._experts_implementation",
        "experts are recorded in a form that runs without storage",
        _config_keeps("_experts_implementation", "batched_mm"),
    ),
    Private(
        "transformers.PretrainedConfig._heterogeneity_spec",
        "layers whose sizes differ are shrunk alike",
        _single_layers,
    ),
    Private(
        "threading.RLock._is_owned",
        "a lock is given back also by a thread that was interrupted while it gave it back",
        _owned,
    ),
    *(
        Private(
            f"transformers.core_model_loading.WeightTransform.{name}",
            "names in checkpoints are those that transformers would read",
            _has(f"transformers.core_model_loading.WeightTransform.{name}"),
        )
        for name in ("_original_source_patterns", "_original_target_patterns")
    ),
    Private(
        "transformers.PreTrainedModel._keep_in_fp32_modules",
        "modules that no method quantises",
        _has("transformers.PreTrainedModel._keep_in_fp32_modules"),
    ),
)

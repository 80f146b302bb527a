"""The undocumented parts of modules, parameters, checkpointed blocks and transformers in use, with a canary each."""

from __future__ import annotations

import importlib.util
import inspect
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn

from autoplan.common.requirements import OWN_SHARDING, older_than
from autoplan.doctor.examine import Private, Table

MODULES = Table()


@MODULES.hold(
    "a head with backward hooks must return full logits",
    "torch.nn.Module._backward_hooks",
    "torch.nn.Module._backward_pre_hooks",
    "torch.nn.modules.module._global_backward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
)
def _hooks_of_backward() -> bool:
    module, calls = nn.Identity(), import_module("torch.nn.modules.module")
    of_all = (calls._global_backward_hooks, calls._global_backward_pre_hooks)
    before = bool(module._backward_hooks or module._backward_pre_hooks or any(of_all))
    handles = [module.register_full_backward_hook(print), module.register_full_backward_pre_hook(print)]
    handles += [calls.register_module_full_backward_hook(print), calls.register_module_full_backward_pre_hook(print)]
    registered = bool(module._backward_hooks and module._backward_pre_hooks and all(of_all))
    for handle in handles:
        handle.remove()
    return registered and not before


@MODULES.hold("what a load returns, as torch does", "torch.nn.modules.module._IncompatibleKeys")
def _incompatible() -> bool:
    from torch.nn.modules.module import _IncompatibleKeys

    return tuple(_IncompatibleKeys(["a"], ["b"])) == (["a"], ["b"])


@MODULES.hold(
    "FSDP2's state of a module is removed if fully_shard fails halfway",
    "torch.distributed._composable_state._module_state_mapping",
)
def _states() -> bool:
    from torch.distributed import _composable_state as states

    module, state = nn.Identity(), states._State()
    states._insert_module_state(module, state)
    inserted = states._get_module_state(module) is state
    states._module_state_mapping.pop(module, None)
    return inserted and states._get_module_state(module) is None


@MODULES.hold(
    "a checkpointed block reruns its hooks, and those of neighbouring dictionaries",
    "torch.nn.Module._forward_hooks",
    "torch.nn.Module._forward_pre_hooks",
)
def _hooks() -> bool:
    """Return whether a module's hooks are in these dictionaries, under one number each."""
    module = nn.Identity()
    before = module.register_forward_pre_hook(lambda *_: None, with_kwargs=True).id
    after = module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True).id
    pre, post = (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs), module._forward_hooks
    flags = (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)
    return all(before in hooks for hooks in pre) and after in post and all(after in flag for flag in flags)


@MODULES.hold("a block that converts itself in its forward must keep its DTensors", "torch.nn.Module._apply")
def _converted() -> bool:
    """Return whether `module.to` calls `_apply` of each module, which may be an instance attribute."""
    module, seen = nn.Linear(1, 1), []
    module.__dict__["_apply"] = lambda function, *rest: seen.append(function(module.weight).dtype)
    module.to(torch.float64)
    return seen == [torch.float64]


@MODULES.hold(
    "recurrent layers compute with a list of their weights",
    "torch.nn.RNNBase._flat_weights",
    "torch.nn.RNNBase._flat_weights_names",
)
def _flat() -> bool:
    lstm = nn.LSTM(1, 1)
    weights = [lstm._parameters[name] for name in lstm._flat_weights_names]
    return all(a is b for a, b in zip(weights, lstm._flat_weights, strict=True)) and callable(lstm._update_flat_weights)


@MODULES.hold(
    "the few recorded blocks are found by their original indices", "torch.nn.ModuleList._get_abs_string_index"
)
def _places_of_blocks() -> bool:
    """Return whether a module list looks up its own `_get_abs_string_index` for a number."""
    blocks = nn.ModuleList([nn.Identity(), nn.Linear(1, 1)])
    vars(blocks)["_get_abs_string_index"] = lambda index: "1"
    return blocks[0] is blocks._modules["1"]


@MODULES.hold("torch.compile adds a name level that checkpoints do not have", "torch._dynamo.OptimizedModule._orig_mod")
def _compiled_name() -> bool:
    linear = nn.Linear(1, 1)
    return torch.compile(linear)._orig_mod is linear


@MODULES.hold(
    "tensors saved by a checkpointed block are copied before they are changed in place",
    "torch.utils.checkpoint._VersionWrapper",
)
def _kept_of_ops() -> bool:
    """Return whether the first run keeps results in a readable storage, each with its version."""
    context = torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.mm.default])
    first: Any = context[0]
    with first:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    of_mm = first.storage[torch.ops.aten.mm.default]
    (saved,) = of_mm.values() if isinstance(of_mm, dict) else of_mm
    saved.val, saved.version = torch.zeros(2, 2), 0
    with context[1]:
        again = torch.ones(2, 2) @ torch.ones(2, 2)
    return bool(product.all()) and not again.any()


@MODULES.hold(
    "checkpoint_wrapper adds a name level that checkpoints do not have",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper._checkpoint_wrapped_module",
)
def _checkpointed_name() -> bool:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    linear = nn.Linear(1, 1)
    return checkpoint_wrapper(linear)._checkpoint_wrapped_module is linear


def _state_of_module(name: str, kind: type) -> Callable[[], bool]:
    return lambda: isinstance(vars(nn.BatchNorm1d(1))[name], kind)


@MODULES.hold(
    "a DTensor becomes a module's parameter without going through DTensor's dispatcher", "torch.nn.Parameter._is_param"
)
def _marked_as_parameters() -> bool:
    """Return whether the mark makes a tensor of another class a parameter."""

    class Own(torch.Tensor):
        pass

    tensor: Any = torch.ones(1).as_subclass(Own)
    tensor._is_param = True
    return isinstance(tensor, torch.nn.Parameter)


@MODULES.hold("the path guard skips modules that run compiled", "torch.nn.Module._compiled_call_impl")
def _compiles_its_call() -> bool:
    module = nn.Identity()
    before = module._compiled_call_impl
    module.compile(backend="eager")
    return before is None and module._compiled_call_impl is not None


_PARAMETRIZED = "a parametrized module is sent to another process"
MODULES.there(
    {
        "torch.nn.utils.parametrize._inject_new_class(module)": _PARAMETRIZED,
        "torch.nn.utils.parametrize._inject_property(module, tensor_name)": _PARAMETRIZED,
    }
)
MODULES.extend(
    Private(f"torch.nn.Module.{name}", why, _state_of_module(name, kind))
    for name, kind, why in (
        ("_parameters", dict, "parameters are replaced in torch's own dict"),
        ("_buffers", dict, "buffers are replaced in torch's own dict"),
        ("_modules", dict, "blocks are left out of the copy that is recorded"),
        ("_non_persistent_buffers_set", set, "buffers that are not in checkpoints"),
        ("_load_state_dict_post_hooks", dict, "FSDP2 re-examines its parameters after load_weights"),
        ("_load_state_dict_pre_hooks", dict, "FSDP2 frees gathered parameters before a load reads them"),
    )
)
MODULES += [
    Private(
        "torch.nn.Module._call_impl",
        "the path guard reads a module's call arguments there",
        lambda: torch.nn.Module._call_impl.__code__.co_filename == inspect.getfile(torch.nn.Module),
    )
]


# The undocumented parts of transformers, and of Python, that autoplan uses, with their canaries.

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
    absent = importlib.util.find_spec(home) is None
    return absent or "model._pp_stage = " in inspect.getsource(import_module(home))


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

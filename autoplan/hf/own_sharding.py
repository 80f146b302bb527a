"""Read how transformers shards a model: the plans and claims of its classes, and its own code that applies them.

A plan is read part by part: where a key was written (a class, a config, an instance) decides what it means.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from autoplan.common.conventions import PlanPart
from autoplan.common.requirements import OWN_SHARDING, VersionError, older_than
from autoplan.hf.names import SHIPPED_PLAN, not_known

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

_IDS, _POSITIONS = "input_ids", "position_ids"
_OTHER_MESHES = ("_ep_plan", "_fsdp_plan")


def from_config(cls: Any) -> Callable[[Any], nn.Module] | None:
    """Return the function that makes a model of this class from a config; None for a class of another library."""
    return getattr(cls, "_from_config", None)


def shipped_plan(model: object) -> Mapping[str, str]:
    """Return a model's plan with all its keys, as transformers combines them."""
    return dict(getattr(model, "_tp_plan", None) or {})


def no_plan_because() -> str:
    """Say why a model ships no plan, or that the installed version may keep plans elsewhere."""
    return not_known(SHIPPED_PLAN) or "neither its classes nor its configs have one"


def plan_parts(
    model: nn.Module, config_of: Callable[[nn.Module], PretrainedConfig | None]
) -> tuple[tuple[PlanPart, ...], tuple[str, ...]]:
    """Return the same plan part by part, and notes on what else the model ships. Keys are relative to a part's prefix:
    those of a module's class, of its config if it is the base, and its own."""
    parts: list[PlanPart] = []
    for prefix, module in model.named_modules():
        cls, config = type(module), config_of(module)
        of_class = dict(cls.__dict__.get("_tp_plan") or getattr(cls, "_tp_plan", None) or {})
        of_config: dict[str, str] = {}
        if config is not None and getattr(module, "base_model", None) is module:
            of_config = dict(getattr(config, "base_model_tp_plan", None) or {})
        own = module.__dict__.get("_tp_plan") or {}
        # Keys that only the instance has: set by hand; those of inner models come with their own plans.
        with_plans = tuple(
            f"{name}."
            for name, child in (module.named_children() if own else ())
            if any(m.__dict__.get("_tp_plan") or getattr(type(m), "_tp_plan", None) for m in child.modules())
        )
        shipped = of_class | of_config
        beyond = {k: style for k, style in own.items() if shipped.get(k) != style and not k.startswith(with_plans)}
        origins = {f"{cls.__name__}._tp_plan": of_class, f"{type(config).__name__}.base_model_tp_plan": of_config,
                   f"the {cls.__name__} instance": beyond}  # fmt: skip
        parts += [PlanPart(prefix, origin, plan) for origin, plan in origins.items() if plan]
    others = {attribute: len(getattr(model, attribute, None) or ()) for attribute in _OTHER_MESHES}
    text = "transformers' {} ({} rules) is for other mesh dims and is not used"
    return tuple(parts), tuple(text.format(attribute, rules) for attribute, rules in others.items() if rules)


def known_styles() -> frozenset[str]:
    """Return the styles of the installed transformers."""
    name = "transformers.distributed.tensor_parallel"
    module = importlib.import_module(name if find_spec(name) else "transformers.integrations.tensor_parallel")
    return frozenset(module.ALL_PARALLEL_STYLES.keys())


def slice_of(tensor: Any, whole: Any) -> Any:
    """Return what the loader would read from the full tensor `whole` for this rank; `tensor` is the DTensor to fill."""
    from transformers.distributed.sharding_utils import DtensorShardOperation

    return DtensorShardOperation(tensor).shard_tensor(whole)


def refuse_old_sharding() -> None:
    """Raise VersionError for versions that shard by older code, which no audit runs."""
    if older_than("transformers", OWN_SHARDING):
        raise VersionError("transformers", "shards models in an older way that the audit cannot run", OWN_SHARDING)


def shard_as_transformers(model: Any, mesh: Any, *, plan: dict[str, str]) -> Any:
    """Untie, shard, slice, tie: the order in which a checkpoint is loaded."""
    import torch
    from transformers.distributed.mixin import DistributedMixin
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    from autoplan.common.torch_internals import own_parameters  # loads torch

    # Every further name of a tied parameter gets a parameter of its own.
    seen: dict[int, str] = {}
    ties: list[tuple[str, str]] = []  # the name, and the first name
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        first = seen.setdefault(id(parameter), name)
        if first != name:
            owner, _, leaf = name.rpartition(".")
            own = torch.nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            own_parameters(model.get_submodule(owner))[leaf] = own
            ties.append((name, first))
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expanded = DistributedMixin._expand_parallel_plan(model, plan)
    if "ep_dispatch_experts" in expanded.values():
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        apply_expert_parallelism(model, mesh, mesh, expanded)
    else:
        apply_tensor_parallelism(model, mesh, expanded)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "placements"):
            # the slice that the library's loader would read for this rank
            with torch.no_grad():
                parameter.to_local().copy_(slice_of(parameter, whole[name]))
    for name, first in ties:
        owner, _, leaf = name.rpartition(".")
        holder, _, theirs = first.rpartition(".")
        own_parameters(model.get_submodule(owner))[leaf] = own_parameters(model.get_submodule(holder))[theirs]
    return model


# Modules that transformers divides among pipeline stages; all other modules run on each of them.
_HANDED_OUT = ("embed_tokens", "layers", "norm")


@dataclass(frozen=True)
class Claims:
    """A class's claims about parallelism; empty or None where it makes none."""

    expert_plan: Mapping[str, str] = field(default_factory=dict)
    pipeline_plan: Mapping[str, Any] = field(default_factory=dict)
    context_parallel: bool | None = None
    no_split: tuple[str, ...] = ()
    checkpointing: bool | None = None


def claims_of(model: nn.Module) -> Claims:
    """Return all claims of a model; keys are paths from the model."""
    return Claims(
        expert_plan=dict(getattr(model, "_ep_plan", None) or {}),
        pipeline_plan=dict(getattr(model, "_pp_plan", None) or {}),
        context_parallel=getattr(model, "supports_context_parallel", None),
        no_split=tuple(sorted(getattr(model, "_no_split_modules", None) or ())),
        checkpointing=getattr(model, "supports_gradient_checkpointing", None),
    )


def splits_pipelines() -> bool:
    """Return whether the installed transformers splits models into pipeline stages."""
    return find_spec("transformers.distributed.pipeline_parallel") is not None


def as_pipeline_stage(model: Any, mesh: Any, pass_on: Callable[..., Any]) -> Any:
    """Return this rank's stage, made by transformers. `pass_on` sends and receives: (send?, rank, tensor) -> tensor."""
    from transformers.distributed.pipeline_parallel import apply_pipeline_parallelism

    model = apply_pipeline_parallelism(model, mesh)
    stage = model._pp_stage

    def communicate(operation: str, *, tensor: Any = None, **_: Any) -> Any:
        return pass_on(operation.startswith("send"), stage.pp_rank, tensor)

    stage.communicate = communicate
    return model


def lacks_for_stages(model: Any) -> str:
    """Return the path of the layers that transformers divides among stages, if the model has none there; else ""."""
    base, path = model, ""
    for name in (model.base_model_prefix, _HANDED_OUT[1]):
        path = f"{path}.{name}".strip(".")
        if (base := getattr(base, name, None)) is None:
            return path
    return ""


def unsplit_children(model: Any) -> tuple[str, ...]:
    """Return modules with weights that transformers does not assign to a stage: each stage runs them."""
    base = getattr(model, model.base_model_prefix, model)
    return tuple(
        f"{model.base_model_prefix}.{name}"
        for name, child in base.named_children()
        if name not in _HANDED_OUT and any(True for _ in child.parameters())
    )


def context_hooks() -> Callable[[Any], None] | None:
    """Return accelerate's preparation of a model for context parallelism, which refuses some models and drops masks;
    None if the installed version has none."""
    if find_spec("accelerate") is None:
        return None
    return getattr(importlib.import_module("accelerate.big_modeling"), "_attach_context_parallel_hooks", None)


def with_all_positions(model: Any, feed: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return a call with position ids, as transformers' Trainer passes them, if the model takes them."""
    import torch

    ids: Any = feed.get(_IDS)
    takes = ids is not None and _POSITIONS in inspect.signature(model.forward).parameters
    return {**feed, **({_POSITIONS: torch.arange(length).expand(len(ids), -1)} if takes else {})}


def checkpoint_its_blocks(model: Any) -> None:
    """Switch transformers' own activation checkpointing on, under its name in this version."""
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()

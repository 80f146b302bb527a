"""What a class of transformers claims of itself besides its tensor-parallel plan, and transformers' own code for it.

Claims are read as they stand; whether they hold is tried elsewhere (check/audit/claims.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


# The modules that transformers hands out to pipeline stages; whatever else a model holds runs on each of them.
_HANDED_OUT = ("embed_tokens", "layers", "norm")


@dataclass(frozen=True)
class Claims:
    """Empty or None: the class says nothing of it."""

    expert_plan: Mapping[str, str] = field(default_factory=dict)
    pipeline_plan: Mapping[str, Any] = field(default_factory=dict)
    context_parallel: bool | None = None
    no_split: tuple[str, ...] = ()
    checkpointing: bool | None = None


def claims_of(model: nn.Module) -> Claims:
    """All claims of a model; keys are paths from the model."""
    return Claims(
        expert_plan=dict(getattr(model, "_ep_plan", None) or {}),
        pipeline_plan=dict(getattr(model, "_pp_plan", None) or {}),
        context_parallel=getattr(model, "supports_context_parallel", None),
        no_split=tuple(sorted(getattr(model, "_no_split_modules", None) or ())),
        checkpointing=getattr(model, "supports_gradient_checkpointing", None),
    )


def splits_pipelines() -> bool:
    """Does the installed transformers split models over pipeline stages?"""
    return find_spec("transformers.distributed.pipeline_parallel") is not None


def as_pipeline_stage(model: Any, mesh: Any, pass_on: Callable[..., Any]) -> Any:
    """This rank's stage, made by transformers. `pass_on` stands for its messages: (send?, rank, tensor) -> tensor."""
    from transformers.distributed.pipeline_parallel import apply_pipeline_parallelism

    model = apply_pipeline_parallelism(model, mesh)
    stage = model._pp_stage

    def communicate(operation: str, *, tensor: Any = None, **_: Any) -> Any:
        return pass_on(operation.startswith("send"), stage.pp_rank, tensor)

    stage.communicate = communicate
    return model


def unsplit_children(model: Any) -> tuple[str, ...]:
    """Modules with weights beside those that transformers hands out to stages: each stage runs them again."""
    base = getattr(model, model.base_model_prefix, model)
    return tuple(
        f"{model.base_model_prefix}.{name}"
        for name, child in base.named_children()
        if name not in _HANDED_OUT and any(True for _ in child.parameters())
    )


def checkpoint_its_blocks(model: Any) -> None:
    """Switch transformers' own activation checkpointing on, under its name in this version."""
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()

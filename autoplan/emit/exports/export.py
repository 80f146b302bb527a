"""`autoplan export MODEL --to …`: a plan in the words of another system, as text for a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from autoplan.emit.exports.configs import to_accelerate, to_deepspeed, to_megatron_fsdp, to_vllm
from autoplan.emit.exports.expressible import ExportError
from autoplan.emit.exports.hf import to_hf
from autoplan.emit.exports.torch_code import automodel_module, torch_module
from autoplan.values import Plan

__all__ = ["TARGETS", "Surroundings", "export"]


@dataclass(frozen=True)
class Surroundings:
    """What an export must know of the model besides its plan: the keys it ships, the classes of its blocks."""

    shipped: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()


def _json(data: Any) -> str:
    return json.dumps(data, indent=2) + "\n"


_Exporter = Callable[[Plan, Surroundings, bool], str]
TARGETS: dict[str, _Exporter] = {
    "torch": lambda plan, around, drop: torch_module(plan),
    "hf": lambda plan, around, drop: _json(to_hf(plan, shipped=around.shipped, drop=drop)),
    "hf-old": lambda plan, around, drop: _json(to_hf(plan, old=True, drop=drop)),
    "automodel": lambda plan, around, drop: automodel_module(plan),
    "deepspeed": lambda plan, around, drop: _json(to_deepspeed(plan, drop=drop)),
    "accelerate": lambda plan, around, drop: yaml.safe_dump(to_accelerate(plan, around.blocks), sort_keys=False),
    "megatron-fsdp": lambda plan, around, drop: _json(to_megatron_fsdp(plan, around.blocks)),
    "vllm": lambda plan, around, drop: _json(to_vllm(plan, shipped=around.shipped, drop=drop)),
}


def export(plan: Plan, target: str, around: Surroundings = Surroundings(), *, drop: bool = False) -> str:
    """The text. Raises ExportError on what the target cannot say; with `drop` that stays whole there."""
    if target not in TARGETS:
        raise ExportError(f"there is no export to {target!r}", hint=f"choose one of {', '.join(TARGETS)}")
    return TARGETS[target](plan, around, drop)

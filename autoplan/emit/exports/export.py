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
from autoplan.emit.exports.reach import Exported, Finds, by_entries, by_key, by_specs, exported, vllm_finds
from autoplan.emit.exports.torch_code import automodel_module, torch_module
from autoplan.values import Plan

__all__ = ["TARGETS", "Surroundings", "export"]


@dataclass(frozen=True)
class Surroundings:
    """What an export must know of the model besides its plan: the keys it ships, the classes of its blocks.

    `linears`: the names of its linear layers. `base`: where the model without its head stands in it.
    """

    shipped: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    linears: tuple[str, ...] = ()
    base: str = ""


def _json(data: Any) -> str:
    return json.dumps(data, indent=2) + "\n"


Written = tuple[str, Finds | None]  # the text, and which linear layers its host finds by it


def _hf(plan: Plan, around: Surroundings, drop: bool) -> Written:
    written = to_hf(plan, shipped=around.shipped, drop=drop)
    return _json(written), by_key(written)


def _hf_old(plan: Plan, around: Surroundings, drop: bool) -> Written:
    written = to_hf(plan, old=True, drop=drop)
    return _json(written), by_key(written)


def _deepspeed(plan: Plan, around: Surroundings, drop: bool) -> Written:
    written = to_deepspeed(plan, drop=drop)
    return _json(written), by_specs(written)


def _vllm(plan: Plan, around: Surroundings, drop: bool) -> Written:
    written = to_vllm(plan, shipped=around.shipped, base=around.base, drop=drop)
    return _json(written), vllm_finds(written, around.linears, around.base)


_Exporter = Callable[[Plan, Surroundings, bool], Written]
TARGETS: dict[str, _Exporter] = {
    "torch": lambda plan, around, drop: (torch_module(plan), by_entries(plan)),
    "hf": _hf,
    "hf-old": _hf_old,
    "automodel": lambda plan, around, drop: (automodel_module(plan), by_entries(plan)),
    "deepspeed": _deepspeed,
    "accelerate": lambda plan, around, drop: (
        yaml.safe_dump(to_accelerate(plan, around.blocks), sort_keys=False),
        None,
    ),
    "megatron-fsdp": lambda plan, around, drop: (_json(to_megatron_fsdp(plan, around.blocks)), None),
    "vllm": _vllm,
}


def export(plan: Plan, target: str, around: Surroundings = Surroundings(), *, drop: bool = False) -> Exported:
    """The text. Raises ExportError on what the target cannot say; with `drop` that stays whole there."""
    if target not in TARGETS:
        raise ExportError(f"there is no export to {target!r}", hint=f"choose one of {', '.join(TARGETS)}")
    text, finds = TARGETS[target](plan, around, drop)
    return exported(text, around.linears, finds)

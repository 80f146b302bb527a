"""`autoplan export MODEL --to …`: a plan in the words of another system, as text for a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from autoplan.emit.exports.configs import to_accelerate, to_deepspeed, to_megatron_fsdp, to_vllm
from autoplan.emit.exports.expressible import ExportError
from autoplan.emit.exports.hf import to_hf
from autoplan.emit.exports.reach import (
    Exported,
    Finds,
    by_entries,
    by_key,
    by_specs,
    exported,
    vllm_besides,
    vllm_finds,
)
from autoplan.emit.exports.torch_code import automodel_module, torch_module
from autoplan.values import Plan

__all__ = ["TARGETS", "Surroundings", "export"]


@dataclass(frozen=True)
class Surroundings:
    """What an export must know of the model besides its plan: the keys it ships, the classes of its blocks.

    `linears`: the names of its linear layers. `base`: where the model without its head stands in it. `inner`: what the
    models inside that one ship themselves, keys from there on.
    """

    shipped: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    linears: tuple[str, ...] = ()
    base: str = ""
    inner: tuple[tuple[str, str], ...] = ()


def _json(data: Any) -> str:
    return json.dumps(data, indent=2) + "\n"


class Written(NamedTuple):
    """The text, which linear layers its host finds by it, and what must be done besides for the host to find that."""

    text: str
    finds: Finds | None = None
    besides: str = ""


def _hf(plan: Plan, around: Surroundings, drop: bool) -> Written:
    written = to_hf(plan, shipped=around.shipped, drop=drop)
    return Written(_json(written), by_key(written))


def _hf_old(plan: Plan, around: Surroundings, drop: bool) -> Written:
    written = to_hf(plan, old=True, drop=drop)
    return Written(_json(written), by_key(written))


def _deepspeed(plan: Plan, around: Surroundings, drop: bool) -> Written:
    written = to_deepspeed(plan, drop=drop)
    return Written(_json(written), by_specs(written))


def _vllm(plan: Plan, around: Surroundings, drop: bool) -> Written:
    written = to_vllm(plan, shipped=around.shipped, base=around.base, drop=drop)
    finds = vllm_finds(written, around.linears, around.base)
    return Written(_json(written), finds, vllm_besides(written, around.linears, around.base, dict(around.inner)))


_Exporter = Callable[[Plan, Surroundings, bool], Written]
TARGETS: dict[str, _Exporter] = {
    "torch": lambda plan, around, drop: Written(torch_module(plan), by_entries(plan)),
    "hf": _hf,
    "hf-old": _hf_old,
    "automodel": lambda plan, around, drop: Written(automodel_module(plan), by_entries(plan)),
    "deepspeed": _deepspeed,
    "accelerate": lambda plan, around, drop: Written(
        yaml.safe_dump(to_accelerate(plan, around.blocks), sort_keys=False)
    ),
    "megatron-fsdp": lambda plan, around, drop: Written(_json(to_megatron_fsdp(plan, around.blocks))),
    "vllm": _vllm,
}


def export(plan: Plan, target: str, around: Surroundings = Surroundings(), *, drop: bool = False) -> Exported:
    """The text. Raises ExportError on what the target cannot say; with `drop` that stays whole there."""
    if target not in TARGETS:
        raise ExportError(f"there is no export to {target!r}", hint=f"choose one of {', '.join(TARGETS)}")
    written = TARGETS[target](plan, around, drop)
    return exported(written.text, around.linears, written.finds, written.besides)

"""Export a plan: the targets, and how much of it each target can carry out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from autoplan.common.patterns import fold_names, matches, starred
from autoplan.emit.exports.configs import (
    automodel_module,
    to_accelerate,
    to_deepspeed,
    to_megatron_fsdp,
    to_vllm,
    torch_module,
)
from autoplan.emit.exports.expressible import ExportError
from autoplan.emit.exports.hf import to_hf
from autoplan.values import Plan

# What a host matches of an export by its own rules, on the model as it builds it. An export that would match nothing,
# or something else than intended, is refused: hosts silently accept such plans, and split nothing.

Finds = Callable[[str], bool]  # whether the host cuts the linear layer of this name
_WHOLE = ("replicate", "replicated_with_grad_allreduce")


class Exported(str):
    """The text of an export, with the number of the model's `linears` that its host cuts (`reached`; None: unknown),
    patterns of the others (`whole`), and other necessary changes (`besides`)."""

    linears: int | None = None
    reached: int | None = None
    whole: tuple[str, ...] = ()
    besides: str = ""

    @property
    def note(self) -> str:
        """Return a line of text for people."""
        if self.linears is None:
            return ""
        rest = f"; replicated: {', '.join(self.whole)}" if self.whole else ""
        besides = f"; {self.besides}" if self.besides else ""
        return f"shards {self.reached} of {self.linears} linear layers{rest}{besides}"


def by_entries(plan: Plan) -> Finds:
    """Return a matcher as in torch and Automodel: each segment of a path by itself, as in our patterns."""
    patterns = [e.pattern for e in plan.entries if e.style not in _WHOLE]
    return lambda name: any(matches(pattern, name) for pattern in patterns)


def by_key(written: Mapping[str, str]) -> Finds:
    """Return a matcher as in transformers: the name with its numbers replaced by `*` is a key."""
    return lambda name: written.get(starred(name), "replicate") not in _WHOLE


def by_specs(config: Mapping[str, Any]) -> Finds:
    """Return a matcher as in DeepSpeed: the first spec with an expression that matches from the name's start."""
    specs = config["tensor_parallel"]["partition_config"]["layer_specs"]

    def finds(name: str) -> bool:
        kinds = (s["partition_type"] for s in specs if any(re.match(e, f"{name}.weight") for e in s["patterns"]))
        return next(kinds, "skip") != "skip"

    return finds


def vllm_style(written: Mapping[str, str], name: str) -> str:
    """Return the style of the first key that matches, from the start, a name of the base model, as vLLM's backend looks
    it up."""
    key = next((key for key in written if re.match(f"model.{key}", f"model.{name}")), None)
    return "replicate" if key is None else written[key]


def vllm_finds(written: Mapping[str, str], linears: Iterable[str], base: str) -> Finds:
    """Return a matcher as in vLLM; raise unless vLLM reads each key as intended."""
    inside = f"{base}." if base else ""
    names = [name.removeprefix(inside) for name in linears if name.startswith(inside)]
    for name in names:
        meant, reads = written.get(starred(name), "replicate"), vllm_style(written, name)
        if meant != reads:
            raise ExportError(
                f"vLLM treats keys as regular expressions, and would match {name} to {reads}, not {meant}",
                hint="choose which of the keys to drop with overrides={key: 'replicate'}",
            )
    cut = any(style not in _WHOLE for style in written.values())
    if names and cut and all(vllm_style(written, name) in _WHOLE for name in names):
        raise ExportError(
            f"none of the {len(names)} linear layers of vLLM's base model match the keys of this plan",
            hint=f"keys begin inside the base model, {base!r}",
        )
    return lambda name: name.startswith(inside) and vllm_style(written, name.removeprefix(inside)) not in _WHOLE


def vllm_besides(written: Mapping[str, str], linears: Iterable[str], base: str, inner: Mapping[str, str]) -> str:
    """Name inner configs whose own plans (`inner`) would win in vLLM over what the outer config says."""
    inside = f"{base}." if base else ""
    names = [name.removeprefix(inside) for name in linears if name.startswith(inside)]
    both = {**written, **inner}
    differ = {name.partition(".")[0] for name in names if vllm_style(both, name) != vllm_style(written, name)}
    if not differ:
        return ""
    return f"also empty the plans in the configs of {', '.join(sorted(differ))}, which take precedence over these keys"


# `autoplan export MODEL --to …`: a plan in the format of another system, as text for a file.


@dataclass(frozen=True)
class Surroundings:
    """The parts of a model that exports need: `shipped` keys, classes of `blocks`, names of `linears`, the path of the
    model without its head (`base`), and the plans that models inside that one ship (`inner`)."""

    shipped: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    linears: tuple[str, ...] = ()
    base: str = ""
    inner: tuple[tuple[str, str], ...] = ()


def _json(data: Any) -> str:
    return json.dumps(data, indent=2) + "\n"


Written = tuple[str, Finds | None, str]  # the text, which linear layers its host matches, other necessary changes


def _by_key(written: Mapping[str, str]) -> Written:
    return _json(written), by_key(written), ""


def _deepspeed(plan: Plan, around: Surroundings, drop: bool) -> Written:
    written = to_deepspeed(plan, drop=drop)
    return _json(written), by_specs(written), ""


def _vllm(plan: Plan, around: Surroundings, drop: bool) -> Written:
    written = to_vllm(plan, shipped=around.shipped, base=around.base, drop=drop)
    finds = vllm_finds(written, around.linears, around.base)
    return _json(written), finds, vllm_besides(written, around.linears, around.base, dict(around.inner))


_Exporter = Callable[[Plan, Surroundings, bool], Written]
TARGETS: dict[str, _Exporter] = {
    "torch": lambda plan, around, drop: (torch_module(plan), by_entries(plan), ""),
    "hf": lambda plan, around, drop: _by_key(to_hf(plan, shipped=around.shipped, drop=drop)),
    "hf-old": lambda plan, around, drop: _by_key(to_hf(plan, old=True, drop=drop)),
    "automodel": lambda plan, around, drop: (automodel_module(plan), by_entries(plan), ""),
    "deepspeed": _deepspeed,
    "accelerate": lambda plan, around, drop: (
        yaml.safe_dump(to_accelerate(plan, around.blocks), sort_keys=False),
        None,
        "",
    ),
    "megatron-fsdp": lambda plan, around, drop: (_json(to_megatron_fsdp(plan, around.blocks)), None, ""),
    "vllm": _vllm,
}


def export(plan: Plan, target: str, around: Surroundings = Surroundings(), *, drop: bool = False) -> Exported:
    """Return the text. Raise ExportError on what the target cannot express; with `drop` it stays replicated there."""
    if target not in TARGETS:
        raise ExportError(f"there is no export to {target!r}", hint=f"choose one of {', '.join(TARGETS)}")
    (text, finds, besides), names = TARGETS[target](plan, around, drop), around.linears
    result = Exported(text)
    result.besides = besides
    if finds is not None and names:
        whole = [name for name in names if not finds(name)]
        result.linears, result.reached, result.whole = len(names), len(names) - len(whole), fold_names(whole, names)
    return result

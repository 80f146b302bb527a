"""Export a plan: the targets, and how much of it each target can carry out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from autoplan.common.patterns import fold_names, matches
from autoplan.decide.plan.folding import starred
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

# What a host finds of an export by its own matching rule, on the model as it builds it. An export that would find
# nothing, or something else than it means, is refused: hosts accept such plans in silence, and split nothing.

Finds = Callable[[str], bool]  # does the host cut the linear layer of this name?
_WHOLE = ("replicate", "replicated_with_grad_allreduce")


class Exported(str):
    """The text of an export, with how many of the model's `linears` its host cuts (`reached`; None: not known),
    patterns of the others (`whole`), and what else must be done for that (`besides`)."""

    linears: int | None = None
    reached: int | None = None
    whole: tuple[str, ...] = ()
    besides: str = ""

    @property
    def note(self) -> str:
        """In a line, for people."""
        if self.linears is None:
            return ""
        rest = f"; whole: {', '.join(self.whole)}" if self.whole else ""
        besides = f"; {self.besides}" if self.besides else ""
        return f"cuts {self.reached} of {self.linears} linear layers{rest}{besides}"


def exported(text: str, linears: Iterable[str], finds: Finds | None, besides: str = "") -> Exported:
    """The text with what its host will find among the linear layers of the model."""
    made, known = Exported(text), list(linears)
    made.besides = besides
    if finds is not None and known:
        whole = [name for name in known if not finds(name)]
        made.linears, made.reached, made.whole = len(known), len(known) - len(whole), fold_names(whole, known)
    return made


def by_entries(plan: Plan) -> Finds:
    """torch and Automodel: each segment of a path by itself, as our patterns are meant."""
    patterns = [e.pattern for e in plan.entries if e.style not in _WHOLE]
    return lambda name: any(matches(pattern, name) for pattern in patterns)


def by_key(written: Mapping[str, str]) -> Finds:
    """transformers: the name with its numbers replaced by `*`, as a key."""
    return lambda name: written.get(starred(name), "replicate") not in _WHOLE


def by_specs(config: Mapping[str, Any]) -> Finds:
    """DeepSpeed: the first spec with an expression that matches the parameter's name from its start."""
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
    """What vLLM cuts, once it is certain that it reads each key as it is meant."""
    inside = f"{base}." if base else ""
    names = [name.removeprefix(inside) for name in linears if name.startswith(inside)]
    for name in names:
        meant, reads = written.get(starred(name), "replicate"), vllm_style(written, name)
        if meant != reads:
            raise ExportError(
                f"vLLM takes keys for regular expressions, and would read {reads} for {name}, not {meant}",
                hint="say which of the keys may go with overrides={key: 'replicate'}",
            )
    cut = any(style not in _WHOLE for style in written.values())
    if names and cut and all(vllm_style(written, name) in _WHOLE for name in names):
        raise ExportError(
            f"vLLM would find none of the {len(names)} linear layers of the base model by the keys of this plan",
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
    return f"empty the plans in the configs of {', '.join(sorted(differ))} too: they would win over these keys"


# `autoplan export MODEL --to …`: a plan in the words of another system, as text for a file.


@dataclass(frozen=True)
class Surroundings:
    """What an export needs of the model: `shipped` keys, classes of `blocks`, names of `linears`, where the model
    without its head stands (`base`), and what the models inside that one ship (`inner`)."""

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

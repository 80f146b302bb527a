"""Export a plan: the targets, and how much of it each target can carry out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from autoplan.common.patterns import fold_names, matches, starred
from autoplan.common.templates import template
from autoplan.decide.rulebook.read import exported_as
from autoplan.decide.written_plans.dialects import COUNTS
from autoplan.emit.exports.expressible import (
    HEADS,
    ExportError,
    Part,
    Refused,
    check_nothing_lost,
    is_end,
    layout_of,
    parts_of,
)
from autoplan.emit.exports.hf import OLD_NAMES, hf_entries, to_hf
from autoplan.values import Entry, Plan

# Write plans for DeepSpeed, vLLM, accelerate and Megatron-FSDP, and as a Python module for torch.
#
# The torch module needs torch alone where every split is a column or row layer and nothing else is done; otherwise it
# contains the plan and passes it to autoplan, since a dict of stock styles would run and be wrong.

_WITHOUT_VIEWS = ("read", "shape")  # DeepSpeed and vLLM replace modules, whose outputs may be changed in place
_GATHERED = {"packed_colwise": "colwise_rep", "colwise": "colwise_rep", "rowwise": "rowwise_rep"}
_VLLM = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "replicate")


def to_deepspeed(plan: Plan, *, drop: bool = False) -> dict[str, Any]:
    """Return the `tensor_parallel` section of a DeepSpeed config."""
    specs: list[dict[str, Any]] = []
    refused: list[Refused] = []
    for part in parts_of(plan, obstacles=_WITHOUT_VIEWS):
        why = _not_for_deepspeed(plan, part)
        if why:
            refused += part.refused(why)
            continue
        for entry in part.entries:
            pieces = f"{entry.pattern}.weight".split("*")
            spec: dict[str, Any] = {
                "patterns": ["^" + "[^.]+".join(map(re.escape, pieces)) + "$"],
                "partition_type": "row" if entry.style == "rowwise" else "column",
            }
            if entry.style == "packed_colwise":
                spec |= {"shape": packed_shape(entry), "partition_dim": 0}
            specs.append(spec)
    check_nothing_lost(refused, "DeepSpeed", drop)
    config = {"use_default_specs": False, "layer_specs": specs}
    return {"tensor_parallel": {"autotp_size": plan.tp_size, "partition_config": config}}


def _not_for_deepspeed(plan: Plan, part: Part) -> str:
    if part.kind == "end":
        return "AutoTP shards neither the token table nor the head"
    packed_only = part.needs and all(need.packed for need in part.needs)
    if part.needs and not packed_only:
        return str(part.needs[0])
    if len(part.gathered) < len(part.entries):
        return "AutoTP shards only linear layers, and does not sum gradients of replicated parameters"
    if any(e.style not in ("colwise", "rowwise", "packed_colwise") for e in part.entries):
        return "AutoTP supports only column and row layers"
    if any(e.style == "packed_colwise" and packed_shape(e) is None for e in part.entries):
        return "AutoTP supports only packing in whole segments"
    for obstacle in plan.obstacles:  # AutoTP divides attributes by name, also where the plan must keep them
        above = f"{starred(obstacle.pattern)}."
        if obstacle.attribute in COUNTS and any(starred(e.pattern).startswith(above) for e in part.entries):
            return f"AutoTP would divide {obstacle.attribute} of {obstacle.pattern}, which must not change"
    return ""


def packed_shape(entry: Entry) -> list[Any] | None:
    """Return packed segments in DeepSpeed's notation: [3, -1] for equal ones, [[q, k, v], -1] for others."""
    layout = layout_of(entry)
    if layout is None or layout.kind != "concatenation" or not all(part.is_split for part in layout.parts):
        return None
    sizes = [part.size for part in layout.parts]
    return [len(sizes), -1] if len(set(sizes)) == 1 else [sizes, -1]


def to_vllm(plan: Plan, *, shipped: Iterable[str] = (), base: str = "", drop: bool = False) -> dict[str, str]:
    """Return vLLM's `base_model_tp_plan`: keys begin inside the model without its head (`base`), longer ones first."""
    styles, refused = hf_entries(plan, obstacles=_WITHOUT_VIEWS)
    ends = {e.pattern for e in plan.entries if is_end(e)}
    # vLLM has no gradients, so replicated layers need no style. Packed layers are gathered, which is exact too.
    styles = {k: s for k, s in styles.items() if k not in ends and s != "replicated_with_grad_allreduce"}
    inside = f"{base}." if base else ""
    outside = {key for key in styles if not key.startswith(inside)}
    packed = {key.rpartition(".")[0] for key, style in styles.items() if style == "packed_colwise"}
    odd = {key.rpartition(".")[0] for key, style in styles.items() if style not in (*_VLLM, "packed_colwise")}
    lines = {}
    for key, style in styles.items():
        container = key.rpartition(".")[0]
        if container not in odd and key not in odd and key not in outside:
            lines[key] = _GATHERED[style] if container in packed else OLD_NAMES.get(style, style)
    refused = [item for item in refused if item.pattern not in ends]
    for entry in plan.entries:
        if entry.pattern in styles and entry.pattern not in lines:
            why = f"vLLM has no {styles[entry.pattern]}, for it or its partner"
            if entry.pattern in outside:
                why = "it is not part of the headless base model, which vLLM builds"
            refused.append(Refused(entry.pattern, entry.bytes, why))
    check_nothing_lost(refused, "vLLM", drop)
    unused = {key: "replicate" for key in shipped if key not in lines and key not in ends and key.startswith(inside)}
    written = {key.removeprefix(inside): style for key, style in (lines | unused).items()}
    return dict(sorted(written.items(), key=lambda line: -len(line[0])))


def to_accelerate(plan: Plan, classes: Iterable[str]) -> dict[str, Any]:
    """Return accelerate's config for FSDP2. `classes` are those of the blocks."""
    names = _class_names(plan, classes)
    config = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": ",".join(name.rpartition(".")[2] for name in names),
        "fsdp_activation_checkpointing": False,
        "fsdp_reshard_after_forward": True,
    }
    return {"distributed_type": "FSDP", "fsdp_config": config}


def _class_names(plan: Plan, classes: Iterable[str]) -> list[str]:
    names = list(dict.fromkeys(classes))
    if not names:
        text = f"{plan.model} has no repeated blocks, so there is nothing to make units of"
        raise ExportError(text, hint="name the modules to wrap yourself")
    return names


_STOCK = {
    "colwise": "ColwiseParallel()",
    "rowwise": "RowwiseParallel()",
    "embedding_rowwise": "RowwiseParallel(input_layouts=Replicate())",
}


def needs_autoplan(plan: Plan) -> str:
    """Return why stock styles do not suffice, or an empty string."""
    if plan.sequence_parallel:
        return "sequence parallelism is applied to other modules than those that are sharded"
    # A split parameter that no entry has is another name of a tied one
    planned = {f"{e.pattern}.{name}" for e in plan.entries for name in e.parameters} | {e.pattern for e in plan.entries}
    for split in (rule.pattern for rule in plan.runtime.parameters if rule.dim is not None):
        if not any(matches(pattern, split) for pattern in planned):
            return f"{split} is tied to a planned parameter, and stock styles would untie them"
    for part in parts_of(plan):
        for entry in part.entries:
            if entry.style not in _STOCK:
                return f"{entry.pattern} is {entry.style}, which no stock style implements"
        if not part.is_plain:
            return str(part.needs[0]) if part.needs else f"{part.container} is more than column and row layers"
    return ""


def torch_module(plan: Plan) -> str:
    """Return the text of the module."""
    why = needs_autoplan(plan)
    more = "It needs torch alone. Every rank must hold the same weights before it is called."
    more = f"It needs autoplan: {why}." if why else more
    heading = f'"""Tensor-parallel plan of {plan.model} for {plan.tp_size} ranks, written by autoplan.\n\n{more}\n"""'
    heading += "\n\nfrom __future__ import annotations\n\n"
    if why:
        text = json.dumps(plan.to_dict(), ensure_ascii=True, indent=1)
        return heading + template("torch_plan.py.txt").format(text=text.replace("\\", "\\\\"))
    lines, again = [], ""
    table = next((entry.pattern for entry in plan.entries if exported_as(entry.rule) == "table"), None)
    for entry in plan.entries:
        style, word = _STOCK[entry.style], exported_as(entry.rule)
        if word in HEADS:
            style = "ColwiseParallel(output_layouts=logits, use_local_output=gather_logits)"
        lines.append(f'        "{entry.pattern}": {style},')
        if word == "tied_head" and table is not None:
            again += f'    model.get_submodule("{entry.pattern}").weight = model.get_submodule("{table}").weight\n'
    if again:
        note = "parallelize_module makes two parameters of a tied one: both ends share one layout, so tie them again."
        again = f"    # {note}\n{again}"
    return heading + template("torch_styles.py.txt").format(lines="\n".join(lines), tp=plan.tp_size, again=again)


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
        whole = f"replicated: {', '.join(self.whole)}" if self.whole else ""
        parts = (f"shards {self.reached} of {self.linears} linear layers", whole, self.besides)
        return "; ".join(filter(None, parts)) if self.linears is not None else ""


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
            text = f"vLLM treats keys as regular expressions, and would match {name} to {reads}, not {meant}"
            raise ExportError(text, hint="choose which of the keys to drop with overrides={key: 'replicate'}")
    cut = any(style not in _WHOLE for style in written.values())
    if names and cut and all(vllm_style(written, name) in _WHOLE for name in names):
        text = f"none of the {len(names)} linear layers of vLLM's base model match the keys of this plan"
        raise ExportError(text, hint=f"keys begin inside the base model, {base!r}")
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


Written = tuple[Any, Finds | None, str]  # text or plain data, which linear layers its host matches, other changes


def _by(written: Any, finds: Callable[[Any], Finds]) -> Written:
    return written, finds(written), ""


def _automodel(plan: Plan) -> str:
    """With entry points for Automodel and NeMo-RL: a dotted path to `plan`, and `register()`."""
    return torch_module(plan) + template("automodel.py.txt").format(model=plan.model)


def _vllm(plan: Plan, around: Surroundings, drop: bool) -> Written:
    written = to_vllm(plan, shipped=around.shipped, base=around.base, drop=drop)
    finds = vllm_finds(written, around.linears, around.base)
    return written, finds, vllm_besides(written, around.linears, around.base, dict(around.inner))


_Exporter = Callable[[Plan, Surroundings, bool], Written]
TARGETS: dict[str, _Exporter] = {
    "torch": lambda plan, around, drop: (torch_module(plan), by_entries(plan), ""),
    "hf": lambda plan, around, drop: _by(to_hf(plan, shipped=around.shipped, drop=drop), by_key),
    "hf-old": lambda plan, around, drop: _by(to_hf(plan, old=True, drop=drop), by_key),
    "automodel": lambda plan, around, drop: (_automodel(plan), by_entries(plan), ""),
    "deepspeed": lambda plan, around, drop: _by(to_deepspeed(plan, drop=drop), by_specs),
    "accelerate": lambda plan, around, drop: (
        yaml.safe_dump(to_accelerate(plan, around.blocks), sort_keys=False), None, "",
    ),
    "megatron-fsdp": lambda plan, around, drop: ({"fsdp_unit_modules": _class_names(plan, around.blocks)}, None, ""),
    "vllm": _vllm,
}  # fmt: skip


def export(plan: Plan, target: str, around: Surroundings = Surroundings(), *, drop: bool = False) -> Exported:
    """Return the text. Raise ExportError on what the target cannot express; with `drop` it stays replicated there."""
    if target not in TARGETS:
        raise ExportError(f"there is no export to {target!r}", hint=f"choose one of {', '.join(TARGETS)}")
    (written, finds, besides), names = TARGETS[target](plan, around, drop), around.linears
    result = Exported(written if isinstance(written, str) else json.dumps(written, indent=2) + "\n")
    result.besides = besides
    if finds is not None and names:
        whole = [name for name in names if not finds(name)]
        result.linears, result.reached, result.whole = len(names), len(names) - len(whole), fold_names(whole, names)
    return result

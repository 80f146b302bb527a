"""A plan in the configuration of systems that only take a part of it: DeepSpeed, accelerate, Megatron-FSDP, vLLM.

DeepSpeed's AutoTP cuts linear layers by regular expressions on parameter names. accelerate and Megatron-FSDP take the
classes of the blocks that become units; they do not split tensors. vLLM's transformers backend takes transformers' dict
without the table and the head, which it always splits itself.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any

from autoplan.decide.plan.folding import starred
from autoplan.decide.written_plans.foreign import COUNTS
from autoplan.emit.exports.expressible import (
    ExportError,
    Part,
    Refused,
    check_nothing_lost,
    is_end,
    layout_of,
    parts_of,
)
from autoplan.emit.exports.hf import OLD_NAMES, hf_entries
from autoplan.values import Entry, Plan

_WITHOUT_VIEWS = ("read", "shape")  # DeepSpeed and vLLM replace modules: what leaves may be changed in place
_GATHERED = {"packed_colwise": "colwise_rep", "colwise": "colwise_rep", "rowwise": "rowwise_rep"}
_VLLM = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "replicate")


def to_deepspeed(plan: Plan, *, drop: bool = False) -> dict[str, Any]:
    """The `tensor_parallel` section of a DeepSpeed config."""
    specs: list[dict[str, Any]] = []
    refused: list[Refused] = []
    for part in parts_of(plan, obstacles=_WITHOUT_VIEWS):
        why = _not_for_deepspeed(part) or _divides_too_much(plan, part)
        if why:
            refused += part.refused(why)
            continue
        for entry in part.entries:
            spec: dict[str, Any] = {
                "patterns": [_expression(f"{entry.pattern}.weight")],
                "partition_type": "row" if entry.style == "rowwise" else "column",
            }
            if entry.style == "packed_colwise":
                spec |= {"shape": packed_shape(entry), "partition_dim": 0}
            specs.append(spec)
    check_nothing_lost(refused, "DeepSpeed", drop)
    config = {"use_default_specs": False, "layer_specs": specs}
    return {"tensor_parallel": {"autotp_size": plan.tp_size, "partition_config": config}}


def _not_for_deepspeed(part: Part) -> str:
    if part.kind == "end":
        return "AutoTP splits neither the token table nor the head"
    packed_only = part.needs and all(need.packed for need in part.needs)
    if part.needs and not packed_only:
        return str(part.needs[0])
    if len(part.gathered) < len(part.entries):
        return "AutoTP splits linear layers only, and sums no gradient of whole parameters"
    if any(e.style not in ("colwise", "rowwise", "packed_colwise") for e in part.entries):
        return "AutoTP knows column and row layers only"
    if any(e.style == "packed_colwise" and packed_shape(e) is None for e in part.entries):
        return "AutoTP packs whole segments only"
    return ""


def _divides_too_much(plan: Plan, part: Part) -> str:
    """AutoTP divides whatever has such a name above a layer that it cuts, also where the plan must keep it."""
    for obstacle in plan.obstacles:
        above = f"{starred(obstacle.pattern)}."
        if obstacle.attribute in COUNTS and any(starred(e.pattern).startswith(above) for e in part.entries):
            return f"AutoTP would divide {obstacle.attribute} of {obstacle.pattern}, which must keep its value"
    return ""


def packed_shape(entry: Entry) -> list[Any] | None:
    """Packed segments as DeepSpeed writes them: [3, -1] for equal ones, [[q, k, v], -1] for others."""
    layout = layout_of(entry)
    if layout is None or layout.kind != "concatenation" or not all(part.is_split for part in layout.parts):
        return None
    sizes = [part.size for part in layout.parts]
    return [len(sizes), -1] if len(set(sizes)) == 1 else [sizes, -1]


def _expression(pattern: str) -> str:
    return "^" + "[^.]+".join(re.escape(piece) for piece in pattern.split("*")) + "$"


def to_vllm(plan: Plan, *, shipped: Iterable[str] = (), base: str = "", drop: bool = False) -> dict[str, str]:
    """The dict of vLLM's transformers backend, in the spelling that it has always taken: for `base_model_tp_plan`.

    vLLM builds the model without its head, so keys begin inside it (`base` is where it stands). A key matches whatever
    begins as it does, and the first that matches counts: longer ones come first.
    """
    found, refused = hf_entries(plan, obstacles=_WITHOUT_VIEWS)
    ends = {e.pattern for e in plan.entries if is_end(e)}
    # No gradients in vLLM: what is whole is whole. Packed layers are gathered, which is exact too.
    found = {k: s for k, s in found.items() if k not in ends and s != "replicated_with_grad_allreduce"}
    inside = f"{base}." if base else ""
    outside = {key for key in found if not key.startswith(inside)}
    packed = {key.rpartition(".")[0] for key, style in found.items() if style == "packed_colwise"}
    odd = {key.rpartition(".")[0] for key, style in found.items() if style not in (*_VLLM, "packed_colwise")}
    kept = {}
    for key, style in found.items():
        container = key.rpartition(".")[0]
        if container not in odd and key not in odd and key not in outside:
            kept[key] = _GATHERED[style] if container in packed else OLD_NAMES.get(style, style)
    refused = [item for item in refused if item.pattern not in ends]
    refused += [
        Refused(e.pattern, e.bytes, _not_for_vllm(e.pattern, found[e.pattern], outside))
        for e in plan.entries
        if e.pattern in found and e.pattern not in kept
    ]
    check_nothing_lost(refused, "vLLM", drop)
    unused = {key: "replicate" for key in shipped if key not in kept and key not in ends and key.startswith(inside)}
    written = {key.removeprefix(inside): style for key, style in (kept | unused).items()}
    return dict(sorted(written.items(), key=lambda line: -len(line[0])))


def _not_for_vllm(pattern: str, style: str, outside: Container[str]) -> str:
    if pattern in outside:
        return "it is no part of the model without its head, which is what vLLM builds"
    return f"vLLM has no {style}, for it or for its partner"


def to_accelerate(plan: Plan, classes: Iterable[str], *, activation_checkpointing: bool = False) -> dict[str, Any]:
    """accelerate's config for FSDP2. `classes` are those of the blocks."""
    names = _class_names(plan, classes)
    return {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": ",".join(name.rpartition(".")[2] for name in names),
            "fsdp_activation_checkpointing": activation_checkpointing,
            "fsdp_reshard_after_forward": True,
        },
    }


def to_megatron_fsdp(plan: Plan, classes: Iterable[str]) -> dict[str, Any]:
    """Megatron-FSDP's unit modules, by the path of their class."""
    return {"fsdp_unit_modules": _class_names(plan, classes)}


def _class_names(plan: Plan, classes: Iterable[str]) -> list[str]:
    names = list(dict.fromkeys(classes))
    if not names:
        raise ExportError(
            f"{plan.model} has no repeated blocks, so there is nothing to make units of",
            hint="name the modules to wrap yourself",
        )
    return names

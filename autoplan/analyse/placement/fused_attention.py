"""`multi_head_attention_forward`: one call that projects, attends and projects back, told its number of heads.

It cuts a packed weight into three by itself, so no rank could call it with a shard of the heads; but what it does is
known, and a rank can do it on its own heads (`execute/calls/fused_attention.py`). This says whether a split is just
that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoplan.analyse.shards import Shards
from autoplan.values import Call, Ref, Symbolic, refs
from autoplan.values.reasons import NotPlaced

__all__ = ["argument", "obstacle"]

_ORDER = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask"),
    *("need_weights", "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    *("static_k", "static_v", "average_attn_weights", "is_causal"),
)
_APART = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_PACKED = ("in_proj_weight", "in_proj_bias")
_LEARNT = ("bias_k", "bias_v")  # a key and a value that belong to no position
_CUT = (*_PACKED, *_APART, *_LEARNT, "out_proj_weight")
_ABSENT = ("static_k", "static_v")


def argument(call: Call, name: str, default: Any = None) -> Any:
    place = _ORDER.index(name)
    return call.args[place] if len(call.args) > place else call.kwargs.get(name, default)


def obstacle(call: Call, shards: Shards) -> NotPlaced | None:
    """Why ranks cannot run this call on their heads; None where they can."""
    given = [name for name in _ABSENT if argument(call, name) not in (None, False, 0, 0.0)]
    if given:
        return NotPlaced("attention-argument", argument=given[0])
    mask = argument(call, "attn_mask")
    if isinstance(mask, Ref) and len(shards.trace.tensors[mask.id].shape) > 2:
        return NotPlaced("mask-of-each-head")
    if argument(call, "average_attn_weights", True) is False:
        return NotPlaced("weights-of-each-head")
    cut = {name: given.id for name in _CUT if isinstance(given := argument(call, name), Ref)}
    others = {ref for ref in refs((call.args, call.kwargs, call.outputs))} - set(cut.values())
    if any(map(shards.is_split, others)):
        return NotPlaced("shards-given")
    width = shards.trace.tensors[cut["out_proj_weight"]].shape[1]
    heads = _number(argument(call, "num_heads"))
    for rank in range(shards.tp):
        own = _rows(shards, cut["out_proj_weight"], 1, rank)
        packed = [part * width + row for part in range(3) for row in own]
        wanted = [(name, 0, packed) for name in _PACKED] + [(name, 0, own) for name in _APART]
        wanted += [(name, 2, own) for name in _LEARNT]
        alike = all(_rows(shards, cut[name], dim, rank) == rows for name, dim, rows in wanted if name in cut)
        if not alike or not _whole(own, width // heads):
            return NotPlaced("cut-between-no-heads")
    return None


def _rows(shards: Shards, tensor: int, dim: int, rank: int) -> list[int]:
    layout = shards.layouts(tensor)[dim]
    return list(layout.rows(rank, shards.tp)) if layout is not None else []


def _whole(rows: Sequence[int], width: int) -> bool:
    """Do the rows come in whole heads?"""
    chunks = [list(rows[i : i + width]) for i in range(0, len(rows), width)]
    return bool(rows) and all(
        chunk[0] % width == 0 and chunk == list(range(chunk[0], chunk[0] + width)) for chunk in chunks
    )


def _number(value: Any) -> int:
    return value.value if isinstance(value, Symbolic) else int(value)

"""Attention as one op, and calls that do more at once."""

from __future__ import annotations

from typing import Any

from autoplan.axes.events import Event
from autoplan.axes.terms import find
from autoplan.ops.records.answers import NEVER, Drawn, Linear, Reduction, by_rate
from autoplan.ops.records.on_shards import Local, SplitOp
from autoplan.ops.records.record import op, python_call
from autoplan.ops.records.site import Answer, Dims, Site
from autoplan.ops.records.sizes import NO_SIZES
from autoplan.values import Ref
from autoplan.values.reasons import NotPlaced


def _widths(at: SplitOp) -> NotPlaced | None:
    """Refuse a split head width: scores sum over it within the op."""
    return NotPlaced("head-width") if at.is_split(0, 3) else None


def attended(local: Local) -> Any:
    """Run attention on local heads. Fused kernels need values as wide as the queries, so shards of them are padded."""
    if local.is_split(0, 3):
        raise ValueError("attention over a sharded head dim")
    query, values = local.args[0], local.args[2]
    width, missing = values.shape[-1], query.shape[-1] - values.shape[-1]
    if missing <= 0 or not local.is_split(2, 3):
        return local.call()
    local.args[2] = values.new_zeros((*values.shape[:-1], width + missing))
    local.args[2][..., :width] = values
    mixed, *statistics = local.call()
    return [mixed[..., :width], *statistics]


@op("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    sizes=NO_SIZES, reduces=_widths, linear=Linear.NO, random=by_rate(3, "dropout_p", 0.0, along=-1),
    runs=attended, drawn=Drawn.ATTENTION)  # fmt: skip
@op("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    sizes=NO_SIZES, reduces=_widths, linear=Linear.NO, random=by_rate(5, "dropout_p", 0.0, along=-1),
    runs=attended, drawn=Drawn.ATTENTION)  # fmt: skip
@op("_scaled_dot_product_attention_math", "_scaled_dot_product_attention_math_for_mps",
    "scaled_dot_product_attention", "_scaled_dot_product_fused_attention_overrideable",
    sizes=NO_SIZES, reduces=_widths, linear=Linear.NO, random=by_rate(4, "dropout_p", 0.0, along=-1),
    runs=attended, drawn=Drawn.ATTENTION)  # fmt: skip
def attention(site: Site) -> Answer:
    """Relate batch x heads x positions x width. With fewer key heads, each serves a run of query heads."""
    q, k, v = (site.terms(ref) for ref in site.inputs[:3])
    if not len(q) == len(k) == len(v) == 4:
        return None
    for other in (k, v):
        site.unify(q[0], other[0])
    site.unify(k[1], v[1])
    site.unify(k[2], v[2])
    site.unify(q[3], k[3])
    heads, shared = q[1], k[1]
    runs = site.algebra.split(heads, shared.size, heads.size // shared.size) if shared.size else None
    if runs is None:
        return None
    site.unify(runs[0], shared)
    site.contract(q[3], Event.CONTRACT_A)
    site.contract(k[2], Event.CONTRACT_A)
    site.mark(k[2], Event.SOFTMAX)
    site.mark(q[2], Event.FREE_A)
    site.mark(v[3], Event.FREE_A)
    site.mark(heads, Event.BATCH_A)
    scores = [q[0], heads, q[2], k[2]]
    mask = site.tensor(3, "attn_mask") or site.tensor(3, "attn_bias") or site.op.kwargs.get("attn_mask")
    if isinstance(mask, Ref):
        site.broadcast([scores, site.terms(mask)], [term.size for term in scores])
    return [[find(term) for term in (q[0], heads, q[2], v[3])], *_attention_extras(site, scores)]


def _attention_extras(site: Site, scores: Dims) -> list[Dims | None]:
    """Return the dims of further outputs: log-sums per query, weights, or the state of a random generator."""
    extras: list[Dims | None] = []
    for output in site.outputs[1:]:
        shape = site.shape(output)
        fits = len(shape) in (3, 4) and all(n == term.size for n, term in zip(shape, scores, strict=False))
        extras.append([find(term) for term in scores[: len(shape)]] if fits else None)
    return extras


python_call("scaled_dot_product_attention", becomes="scaled_dot_product_attention", causal=(5, "is_causal"))
# Takes its number of heads; a rank does the same on its own heads (`execute/calls/reductions.py`).
python_call("multi_head_attention_forward", sizes=NO_SIZES, linear=Linear.NO, random=by_rate(10, "dropout_p", 0.0),
            pays=Reduction.ATTENTION)  # fmt: skip
for _name in ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"):
    python_call(_name, sizes=NO_SIZES, linear=Linear.NO, random=NEVER,
                pays=NotPlaced("told-its-heads"))  # fmt: skip

"""Calls that do more at once, each as one op: attention; recurrent networks (all steps of all layers in one call, or
one step of a cell); a module that holds a stack of experts, whose op replaces the ops of its runs
(analyse/splits/experts.py).
"""

from __future__ import annotations

from typing import Any

from autoplan.axes.events import Event
from autoplan.axes.terms import find, product
from autoplan.ops.records.answers import NEVER, Drawn, Linear, Recurrent, Reduction, by_rate
from autoplan.ops.records.on_shards import NO_SIZES, Local, SplitOp, recorded
from autoplan.ops.records.record import call_record, op, python_call
from autoplan.ops.records.site import Answer, Dims, Site
from autoplan.values import Call, Ref, Trace
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
# Takes its number of heads; a rank does the same on its own heads (`execute/hooks/reductions.py`).
python_call("multi_head_attention_forward", sizes=NO_SIZES, linear=Linear.NO, random=by_rate(10, "dropout_p", 0.0),
            pays=Reduction.ATTENTION)  # fmt: skip
_ORDER = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask"),
    *("need_weights", "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    *("static_k", "static_v", "average_attn_weights", "is_causal"),
)


def argument(call: Call, name: str, default: Any = None) -> Any:
    place = _ORDER.index(name)
    return call.args[place] if len(call.args) > place else call.kwargs.get(name, default)


def mask_of_heads(call: Call, trace: Trace) -> int | None:
    """Return the mask of this call if it has one for each head: a rank takes those of its own heads from it."""
    mask = argument(call, "attn_mask") if call_record(call.name).pays is Reduction.ATTENTION else None
    return mask.id if isinstance(mask, Ref) and len(trace.tensors[mask.id].shape) > 2 else None


for _name in ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"):
    python_call(_name, sizes=NO_SIZES, linear=Linear.NO, random=NEVER,
                pays=NotPlaced("told-its-heads"))  # fmt: skip


for _name, _gates, _states in (("lstm", 4, 2), ("gru", 3, 1), ("rnn_tanh", 1, 1), ("rnn_relu", 1, 1)):
    python_call(_name, sizes=NO_SIZES, linear=Linear.NO, random=by_rate(-1, "dropout"),  # between layers
                recurrent=Recurrent(_gates, _states, one_step=False))  # fmt: skip
    python_call(f"{_name}_cell", sizes=NO_SIZES, linear=Linear.NO, random=NEVER,
                recurrent=Recurrent(_gates, _states, one_step=True))  # fmt: skip


BOX = "experts"  # args: (stacked weights, tokens, (indices, routing weights) or (), other tensors that are read)


def _expert_sum(at: SplitOp) -> Reduction | None:
    """Return SUM for routed tokens, whose results are summed over all experts; sorted ones stay apart by expert."""
    stack, _, routing, _ = at.op.args
    sharded = at.shards.layout_of(at.shards.axes.of(stack[0].id)[0]) is not None
    return Reduction.SUM if routing and sharded else None


# Each rank's experts get other tokens than the recorded ones, so only simulated ranks can verify their results.
@op(BOX,
    sizes=NO_SIZES, reduces=_expert_sum, linear=Linear.NO, random=NEVER, runs=recorded)  # fmt: skip
def experts(site: Site) -> Answer:
    """Unify the leading axis of all stacked weights. Dims inside an expert are opaque."""
    stack, tokens, routing, others = site.op.args
    first = site.terms(stack[0])[0]
    for ref in stack:
        leading, *inner = site.terms(ref)
        site.unify(first, leading)
        _close(site, inner)
    for ref in others:
        _close(site, site.terms(ref))
    site.mark(first, Event.BATCH_W)
    site.mark(first, Event.EXPERTS)
    return [site.terms(tokens) if routing else _sorted(site, tokens, first.size)]


def _close(site: Site, dims: Dims) -> None:
    for term in dims:
        site.mark(term, Event.OPAQUE)


def _sorted(site: Site, tokens: Ref, count: int) -> Dims | None:
    """Split the tokens by expert: inside, a rank has those of its experts; outside every rank has all."""
    major, *rest = site.terms(tokens)
    halves = site.algebra.split(major, count, major.size // count)
    if halves is None:
        return None
    return [product([site.terms(site.op.args[0][0])[0], halves[1]]), *rest]

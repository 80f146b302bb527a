"""Convolutions: channels are groups of channels; a rank may have whole groups, or a part of the sum over channels."""

from __future__ import annotations

from collections import Counter
from typing import Any

from autoplan.axes.events import Event
from autoplan.axes.terms import Term, find, is_data, leaf, product
from autoplan.ops.records.answers import NEVER, Drawn, Linear, Product, Reduction
from autoplan.ops.records.on_shards import Local, SplitOp
from autoplan.ops.records.record import op, python_call
from autoplan.ops.records.site import Answer, Site, told
from autoplan.ops.records.sizes import Groups
from autoplan.values import Op
from autoplan.values.reasons import NotPlaced


def _channel_sum(at: SplitOp) -> Reduction | NotPlaced | None:
    """Over channels in one group ranks have parts of the sum; several groups are sharded whole, each for itself."""
    groups = groups_of(at.op)
    if groups == 1:
        return Reduction.SUM if at.is_split(0, 1) else None
    if not transposed(at.op):
        return Reduction.SUM if at.is_split(1, 1) else None
    if _cut_inside(at, at.terms(1)[0], groups):
        return NotPlaced("inside-groups")
    return None


def _cut_inside(at: SplitOp, term: Term, groups: int) -> bool:
    """Does some rank hold a part of a group?"""
    layout, size, tp = at.shards.layout_of(term), term.size // groups, at.shards.tp
    if layout is None:
        return False
    held = (Counter(row // size for row in layout.rows(rank, tp)) for rank in range(tp))
    return any(count != size for of_rank in held for count in of_rank.values())


def transposed(op: Op) -> bool:
    return bool(told(op, 6, "transposed", False))


def groups_of(op: Op) -> int:
    return int(told(op, 8, "groups", 1))


def convolved(local: Local) -> Any:
    """A rank has its shard of the groups, or a part of the sum; what is added is added once, by the first rank."""
    groups, turned = groups_of(local.op), transposed(local.op)
    if groups > 1 and turned:
        local.args[8] = max(1, groups * local.args[0].shape[1] // local.size(0, 1))
    elif groups > 1:
        local.args[8] = max(1, local.args[0].shape[1] // local.args[1].shape[1])
    if local.is_split(0, 1) if groups == 1 else not turned and local.is_split(1, 1):
        local.reducing = True
        if local.rank:
            local.args[2] = None
    return local.call()


@op("convolution", "_convolution", "convolution_overrideable",
    sizes=Groups(8), reduces=_channel_sum, linear=Linear.NO, random=NEVER, runs=convolved,
    product=Product(0, 1, bias=2, out=(0, 1), inner=1), drawn=Drawn.CONVOLUTION)  # fmt: skip
def convolution(site: Site) -> Answer:
    """Channels are groups x channels of a group, on both sides; groups pass through, each for itself."""
    x, weight = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    turned, groups = transposed(site.op), groups_of(site.op)
    channels, rows = x[1], weight[0]
    incoming = site.algebra.split(channels, groups, channels.size // groups)
    grouped = site.algebra.split(rows, groups, rows.size // groups)
    if incoming is None or grouped is None:
        return None
    if groups > 1:
        site.unify(incoming[0], grouped[0])
        site.mark(incoming[0], Event.CONV_GROUP)
    inner = grouped[1] if turned else weight[1]
    site.unify(incoming[1], inner)
    site.contract(incoming[1], Event.CONTRACT_W)
    out = product([grouped[0], weight[1]]) if turned else find(rows)
    bias = site.tensor(2, "bias")
    if bias is not None:
        site.unify(out, site.terms(bias)[0])
    spatial = [slid(site, term, size) for term, size in zip(x[2:], site.out_shape[2:], strict=True)]
    for term in weight[2:]:
        site.mark(term, Event.CONV_K)
    return [[x[0], site.from_weight(find(out)), *spatial]]


def slid(site: Site, term: Term, size: int) -> Term:
    """A dim over which a window slides."""
    site.mark(term, Event.CONV_SP)
    if term.size == size:
        return term
    return leaf(size, data=True) if is_data(term) else site.fresh(size, Event.CONV_SP)


python_call("conv1d", "conv2d", "conv3d", becomes="convolution",
            sizes=Groups(6, weight=1))  # fmt: skip
python_call("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", becomes="convolution",
            sizes=Groups(6), product=Product(0, 1, bias=2, inner=0))  # fmt: skip

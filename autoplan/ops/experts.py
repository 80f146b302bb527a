"""A module that holds a stack of experts, as one op (analyse/splits/experts.py replaces the ops of its runs by it)."""

from __future__ import annotations

from autoplan.axes.events import Event
from autoplan.axes.terms import product
from autoplan.ops.records.answers import NEVER, Linear, Reduction
from autoplan.ops.records.on_shards import SplitOp, recorded
from autoplan.ops.records.record import op
from autoplan.ops.records.site import Answer, Dims, Site
from autoplan.ops.records.sizes import NO_SIZES
from autoplan.values import Ref

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

"""Ops that make tensors out of nothing: constant fills say nothing about an axis, ramps and noise do."""

from __future__ import annotations

from autoplan.axes.events import Event
from autoplan.axes.terms import leaf
from autoplan.ops.rules.site import Answer, Site, refs, rule
from autoplan.values import Ref, Trace

__all__: list[str] = []

_COPYING = ("alias", "clone", "detach", "_to_copy")


@rule("zeros", "ones", "full", "empty", "empty_strided", "empty_permuted", "new_zeros", "new_ones", "new_full",
      "new_empty", "new_empty_strided", "scalar_tensor", "_efficientzerotensor")  # fmt: skip
def filled(site: Site) -> Answer:
    """The same value everywhere."""
    return [[leaf(size) for size in site.out_shape]]


@rule("arange", "linspace", "logspace", "range", "tensor", "tril_indices", "triu_indices", "hann_window",
      "hamming_window", "blackman_window", "bartlett_window", "kaiser_window", "_sparse_coo_tensor_unsafe")  # fmt: skip
def ramp(site: Site) -> Answer:
    """Values differ along every dim, and depend on its length."""
    return [[site.fresh(size, Event.CREATED) for size in site.out_shape]]


@rule("eye")
def identity(site: Site) -> Answer:
    """Ones where row and column are the same. Times a matrix it is that matrix: a rank's share is an identity, too."""
    rows, columns = site.out_shape
    same = _copies(site.outputs[0], site.state.trace)
    if rows != columns or same is None:
        return ramp(site)
    axis = site.fresh(rows, Event.CREATED)
    site.state.identities |= same
    return [[axis, axis]]


def _copies(made: Ref, trace: Trace) -> set[int] | None:
    """The tensor and its copies, if all that is done with them is to multiply a matrix from the left."""
    copies = {made.id}
    for op in trace.ops:
        places = [place for place, item in enumerate(refs((op.args, op.kwargs))) if item.id in copies]
        if places and op.name in _COPYING:
            copies.update(item.id for item in refs(op.outputs))
        elif places and not (op.name == "mm" and places == [0]):
            return None
    return copies


@rule("rand", "randn", "randint", "randperm")
def noise(site: Site) -> Answer:
    """Random values: different along every dim, and different in every run."""
    dims = [site.fresh(size, Event.CREATED) for size in site.out_shape]
    for term in dims:
        site.mark(term, Event.RANDOM)
    return [dims]


@rule("zeros_like", "ones_like", "full_like", "empty_like")
def filled_like(site: Site) -> Answer:
    """The same value everywhere, with the dims of another tensor."""
    if site.shape(site.inputs[0]) != site.out_shape:
        return None
    return [site.terms(site.inputs[0])]


@rule("rand_like", "randn_like", "randint_like")
def noise_like(site: Site) -> Answer:
    dims = site.terms(site.inputs[0])
    for term in dims:
        site.mark(term, Event.CREATED)
        site.mark(term, Event.RANDOM)
    return [dims]

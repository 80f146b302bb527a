"""Ops that make tensors out of nothing: constant fills say nothing about an axis, ramps and noise do."""

from __future__ import annotations

from autoplan.analyse.events import Event
from autoplan.analyse.op_rules.site import Answer, Site, rule
from autoplan.analyse.terms import leaf

__all__: list[str] = []


@rule("zeros", "ones", "full", "empty", "empty_strided", "empty_permuted", "new_zeros", "new_ones", "new_full",
      "new_empty", "new_empty_strided", "scalar_tensor", "_efficientzerotensor")  # fmt: skip
def filled(site: Site) -> Answer:
    """The same value everywhere."""
    return [[leaf(size) for size in site.out_shape]]


@rule("arange", "linspace", "logspace", "range", "eye", "tensor", "tril_indices", "triu_indices", "hann_window",
      "hamming_window", "blackman_window", "bartlett_window", "kaiser_window", "_sparse_coo_tensor_unsafe")  # fmt: skip
def ramp(site: Site) -> Answer:
    """Values differ along every dim, and depend on its length."""
    return [[site.fresh(size, Event.CREATED) for size in site.out_shape]]


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

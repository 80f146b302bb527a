"""Ops that create tensors: constants, ranges, random numbers."""

from __future__ import annotations

from autoplan.axes.events import Event
from autoplan.axes.terms import leaf
from autoplan.ops.elementwise import elementwise
from autoplan.ops.records.answers import ALWAYS, NEVER, Linear, Random, Supposed, by_rate
from autoplan.ops.records.on_shards import NO_SIZES, Filled, Identity, MadeWhole, as_written, recorded
from autoplan.ops.records.record import INDEPENDENT, kept_whole, nothing, op, op_record, python_call, unknown
from autoplan.ops.records.site import Answer, Site
from autoplan.values import Ref, Trace

# Ops without tensor inputs: a constant fill puts no constraint on an axis, a ramp does.

_COPYING = ("alias", "clone", "detach", "_to_copy")


@op("zeros", "ones", "full",
    sizes=Filled(), reduces=nothing, linear=Linear.NO, random=NEVER, runs=as_written, alike=True)  # fmt: skip
@op("empty",
    sizes=Filled(), reduces=nothing, linear=Linear.NO, random=NEVER, runs=recorded)  # fmt: skip
@op("new_zeros", "new_ones", "new_full",
    sizes=Filled(1), reduces=nothing, linear=Linear.NO, random=NEVER, runs=recorded, alike=True)  # fmt: skip
@op("new_empty",
    sizes=Filled(1), reduces=nothing, linear=Linear.NO, random=NEVER, runs=recorded)  # fmt: skip
@op("empty_strided", "empty_permuted", "new_empty_strided",
    sizes=MadeWhole(), reduces=nothing, linear=Linear.NO, random=NEVER, runs=recorded)  # fmt: skip
@op("scalar_tensor", "_efficientzerotensor", **INDEPENDENT)
def filled(site: Site) -> Answer:
    """Return fresh dims for a value that is the same everywhere."""
    return [[leaf(size) for size in site.out_shape]]


@op("arange", "linspace", "logspace", "range", "tensor", "tril_indices", "triu_indices", "hann_window",
    "hamming_window", "blackman_window", "bartlett_window", "kaiser_window", "_sparse_coo_tensor_unsafe",
    sizes=MadeWhole(), reduces=nothing, linear=Linear.NO, random=NEVER, runs=as_written)  # fmt: skip
def ramp(site: Site) -> Answer:
    """Return dims for values that vary along every dim and depend on its length."""
    return [[site.fresh(size, Event.CREATED) for size in site.out_shape]]


@op("eye",
    sizes=Identity(), reduces=nothing, linear=Linear.NO, random=NEVER, runs=as_written)  # fmt: skip
def identity(site: Site) -> Answer:
    """Return one axis for both dims, if only products with it follow: a rank's shard of it is an identity, too."""
    rows, columns = site.out_shape
    same = _copies(site.outputs[0], site.state.trace)
    if rows != columns or same is None:
        return ramp(site)
    axis = site.fresh(rows, Event.CREATED)
    site.state.identities |= same
    return [[axis, axis]]


def _copies(constant: Ref, trace: Trace) -> set[int] | None:
    """Return the tensor and its copies, if they are only used to multiply a matrix from the left."""
    copies = {constant.id}
    for each in trace.ops:
        places = [place for place, item in enumerate(each.reads) if item in copies]
        if places and each.name in _COPYING:
            copies.update(each.results)
        elif places and not (each.name == "mm" and places == [0]):
            return None
    return copies


@op("zeros_like", "ones_like", "full_like", **INDEPENDENT)
@op("empty_like",
    sizes=NO_SIZES, reduces=nothing, linear=Linear.NO, random=NEVER, runs=recorded)  # fmt: skip
def filled_like(site: Site) -> Answer:
    """Return the dims of the other tensor, for a value that is the same everywhere."""
    if site.shape(site.inputs[0]) != site.out_shape:
        return None
    return [site.terms(site.inputs[0])]


def fills(name: str) -> bool:
    """Return whether the op makes a constant."""
    return op_record(name).dims in (filled, filled_like)


python_call("as_tensor", becomes="tensor")
python_call("vander", "linalg_vander", sizes=NO_SIZES, linear=Linear.NO, random=NEVER, follows="long")


# Ops that draw random numbers: the same on all ranks for a replicated value, different ones for a sharded value.


@op("randperm",
    sizes=MadeWhole(), reduces=nothing, linear=Linear.NO, random=Random("always", jointly=True),
    runs=recorded)  # fmt: skip
@op("rand", "randn", "randint",
    sizes=MadeWhole(), reduces=nothing, linear=Linear.NO, random=ALWAYS, runs=recorded)  # fmt: skip
def noise(site: Site) -> Answer:
    """Return dims for random values, which vary along every dim and from run to run."""
    dims = [site.fresh(size, Event.CREATED) for size in site.out_shape]
    for term in dims:
        site.mark(term, Event.RANDOM)
    return [dims]


@op("rand_like", "randn_like", "randint_like",
    sizes=NO_SIZES, reduces=nothing, linear=Linear.NO, random=ALWAYS, runs=recorded)  # fmt: skip
def noise_like(site: Site) -> Answer:
    dims = site.terms(site.inputs[0])
    for term in dims:
        site.mark(term, Event.CREATED)
        site.mark(term, Event.RANDOM)
    return [dims]


def makes_anew(name: str) -> bool:
    """Return whether the result of an op contains nothing of the values of its inputs."""
    return fills(name) or op_record(name).dims is noise_like


@op("feature_dropout", "feature_alpha_dropout",
    sizes=NO_SIZES, reduces=nothing, linear=Linear.NO, random=by_rate(1, along=2), runs=recorded)  # fmt: skip
@op("dropout", "native_dropout", "alpha_dropout",
    sizes=NO_SIZES, reduces=nothing, linear=Linear.NO, random=by_rate(1), runs=recorded)  # fmt: skip
@op("rrelu",
    sizes=NO_SIZES, reduces=nothing, linear=Linear.NO, random=by_rate(-1), runs=recorded)  # fmt: skip
@op("normal",
    sizes=MadeWhole(), reduces=nothing, linear=Linear.NO, random=ALWAYS, runs=recorded)  # fmt: skip
@op("bernoulli", "uniform", "exponential", "random", "poisson", "binomial", "log_normal", "geometric", "cauchy",
    sizes=NO_SIZES, reduces=nothing, linear=Linear.NO, random=ALWAYS, runs=recorded)  # fmt: skip
def random(site: Site) -> Answer:
    """Relate dims elementwise; numbers are drawn along every dim."""
    answer = elementwise(site)
    for term in answer[0] or [] if answer else []:
        site.mark(term, Event.RANDOM)
    return answer


@op("multinomial",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=ALWAYS, runs=as_written,
    supposed=Supposed.POSITIONS)  # fmt: skip
def multinomial(site: Site) -> Answer:
    *batch, choices = site.terms(site.inputs[0])
    return [[*batch, site.replaced([choices], site.out_shape[-1], Event.SORT)]]


# It also returns the numbers that it drew.
op("rrelu_with_noise", "rrelu_with_noise_functional",
   sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=by_rate(-1), runs=recorded)(unknown)  # fmt: skip

for _name, _batched in (("dropout1d", 3), ("dropout2d", 0), ("dropout3d", 5)):
    python_call(_name, becomes="feature_dropout", random=by_rate(1, along=2, batched=_batched))
op("_standard_gamma", "_sample_dirichlet",
   sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=ALWAYS, runs=as_written)(unknown)  # fmt: skip
python_call("gumbel_softmax", sizes=NO_SIZES, linear=Linear.NO, random=ALWAYS)

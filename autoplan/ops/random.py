"""Ops that draw random numbers: always, or in training and where a rate says so.

Ranks must draw alike where a value is whole, and each for itself where it is split; so whoever asks whether a module
draws must get one answer, for ops and for the calls that Python makes.
"""

from __future__ import annotations

from autoplan.axes.events import Event
from autoplan.ops.creation import fills
from autoplan.ops.elementwise import elementwise
from autoplan.ops.records.answers import ALWAYS, Linear, Random, Supposed, by_rate
from autoplan.ops.records.on_shards import as_written, recorded
from autoplan.ops.records.record import kept_whole, nothing, op, op_record, python_call, unknown
from autoplan.ops.records.site import Answer, Site
from autoplan.ops.records.sizes import NO_SIZES, MadeWhole


@op("randperm",
    sizes=MadeWhole(), reduces=nothing, linear=Linear.NO, random=Random("always", jointly=True),
    runs=recorded)  # fmt: skip
@op("rand", "randn", "randint",
    sizes=MadeWhole(), reduces=nothing, linear=Linear.NO, random=ALWAYS, runs=recorded)  # fmt: skip
def noise(site: Site) -> Answer:
    """Random values: different along every dim, and different in every run."""
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
    """Does an op give something that holds nothing of what its inputs hold?"""
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
    """Elementwise, with numbers drawn along every dim."""
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


# It gives the numbers that it drew, too.
op("rrelu_with_noise", "rrelu_with_noise_functional",
   sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=by_rate(-1), runs=recorded)(unknown)  # fmt: skip

for _name, _batched in (("dropout1d", 3), ("dropout2d", 0), ("dropout3d", 5)):
    python_call(_name, becomes="feature_dropout", random=by_rate(1, along=2, batched=_batched))
op("_standard_gamma", "_sample_dirichlet",
   sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=ALWAYS, runs=as_written)(unknown)  # fmt: skip
python_call("gumbel_softmax", sizes=NO_SIZES, linear=Linear.NO, random=ALWAYS)

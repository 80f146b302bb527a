"""Check what a run draws at random, and everything computed from it.

The problem: no run says what random numbers are right. But laws do. Of a replicated value, every rank draws the same
numbers: its generator is in the same state as the others'. Of a sharded value, each rank draws numbers that are
independent of the others', and together distributed as the unsharded model's. And if random numbers are replaced by
fixed ones (`FixedNoise`), everything computed from them can be compared with the unsharded model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoplan.common.torch_internals import DispatchMode, outside_of_modes, schema_of
from autoplan.execute import random_streams
from autoplan.values import Finding

RUNS = 6  # forwards that are recorded
FEWEST = 64  # fewest numbers of one rank, over all runs, for a statistical test
_MOST = 4096  # most numbers of one draw that are kept
_FAR = 6.0  # standard errors: fewer than one of 10^8 draws are that far off by chance
_STAND_IN = 0.625  # stands for any number between 0 and 1


class _AtDraws(DispatchMode):
    """Calls `drew` after each op that has drawn from this rank's own generators."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        before = random_streams.get_state()
        result = func(*args, **kwargs)
        if random_streams.unlike(random_streams.get_state(), before) != random_streams.Generators(None):
            named = {arg.name: value for arg, value in zip(schema_of(func).arguments, args, strict=False)} | kwargs
            self.drew(func.overloadpacket.__name__, before, named, result)
        return result

    def drew(self, name: str, before: random_streams.Generators, arguments: dict[str, Any], result: Any) -> None:
        raise NotImplementedError


class Draws(_AtDraws):
    """Records each draw: the op, the state of the generator, how many numbers, and the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, int, torch.Tensor]] = []

    def drew(self, name: str, before: random_streams.Generators, arguments: dict[str, Any], result: Any) -> None:
        # Of several results the last, which is a dropout's mask
        results = result if isinstance(result, tuple | list) else [result]
        drawn = next((t for t in reversed(results) if isinstance(t, torch.Tensor)), None)
        if drawn is not None and not drawn.is_complex():
            with outside_of_modes():
                first = drawn.detach().flatten()[:_MOST].to(torch.float64, copy=True)
            self.found.append((name.strip("_"), random_streams.number_of(before), drawn.numel(), first))

    def observed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each draw as a named tensor: generator state and count, then the numbers."""
        for number, (name, place, count, first) in enumerate(self.found):
            yield f"{number} {name}", torch.cat([torch.tensor([place, count], dtype=torch.float64), first.cpu()])


# The laws


def laws_of_draws(alone: Mapping[str, torch.Tensor], ranks: list[Mapping[str, torch.Tensor]]) -> list[Finding]:
    """Return findings about the draws of several runs; `alone`: the unsharded model's. Runs with different draws (a
    layer skipped at random) cannot be compared, and a finding says so."""
    names = list(alone)
    if any(list(rank) != names for rank in ranks):
        if any(list(rank) != list(ranks[0]) for rank in ranks):
            return [Finding("dropout", "error", "", "ranks draw random numbers in different calls")]
        text = "the sharded model draws in different calls than the unsharded one: its distributions were not checked"
        return [Finding("dropout", "note", "", text)]
    findings = []
    for name in names:
        places, counts = ([int(rank[name][at]) for rank in ranks] for at in (0, 1))
        whole, pieces = all(count == int(alone[name][1]) for count in counts), int(alone[name][1]) / max(1, *counts)
        if whole and len(set(places)) > 1:
            findings.append(_broken(name, "ranks draw different numbers for a replicated value"))
        if not whole and len(set(places)) < min(pieces, len(places)):  # ranks of cp may hold the same part
            findings.append(_broken(name, "ranks draw the same numbers for different shards"))
    return findings[:1] or list(_distributed(alone, ranks))


def _distributed(alone: Mapping[str, torch.Tensor], ranks: list[Mapping[str, torch.Tensor]]) -> Iterator[Finding]:
    """Yield findings if numbers of shards depend on each other, or are distributed otherwise than unsharded ones."""
    for site, names in _sites(alone).items():
        if all(int(rank[names[0]][1]) == int(alone[names[0]][1]) for rank in ranks):
            continue
        least = min(rank[name].numel() for rank in ranks for name in names)
        of_ranks = [torch.stack([rank[name][2:least] for name in names]) for rank in ranks]
        if of_ranks[0].numel() < FEWEST or len(names) < 2:
            continue
        for number, numbers in enumerate(of_ranks[1:], 1):
            if all(ranks[number][name][0] == ranks[0][name][0] for name in names):  # the same part
                continue
            related = _agreement(of_ranks[0], numbers)
            if abs(related) > _FAR:
                text = f"draws on rank {number} depend on those on rank 0 ({related:.0f} standard errors)"
                yield _broken(site, text)
                return
        want = torch.stack([alone[name][2:] for name in names])
        away = _distance(*(torch.cat([x.unique(dim=0).flatten() for x in runs]) for runs in ([want], of_ranks)))
        if away > _FAR:
            yield _broken(site, f"the distribution is {away:.0f} standard errors from the unsharded model's")
            return


def _sites(alone: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return the names of the draws at each place, one for each run."""
    sites: dict[str, list[str]] = {}
    each, rest = divmod(len(alone), RUNS)
    for at, name in enumerate(alone) if not rest else ():
        sites.setdefault(f"{at % each} {name.partition(' ')[2]}", []).append(name)
    return sites


def _agreement(first: torch.Tensor, other: torch.Tensor) -> float:
    """Return how often numbers move in the same direction from one run to another, in standard errors. (Whatever is
    drawn at a place, it moves up as often as down; numbers around a mean are not as often above it as below.)"""
    pairs = combinations(range(len(first)), 2)
    alike = torch.stack([(first[a] - first[b]).sign() * (other[a] - other[b]).sign() for a, b in pairs]).sum(0)
    error = float(alike.square().sum()) ** 0.5
    return float(alike.sum()) / error if error else 0.0


def _distance(want: torch.Tensor, have: torch.Tensor) -> float:
    """Return the largest difference in the share of numbers below a quartile, in standard errors of both samples."""
    worst = 0.0
    for quartile in want.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=want.dtype)):
        below = [float((part <= quartile).double().mean()) for part in (want, have)]
        both = (below[0] * len(want) + below[1] * len(have)) / (len(want) + len(have))
        error = (both * (1 - both) * (1 / len(want) + 1 / len(have))) ** 0.5
        worst = max(worst, abs(below[0] - below[1]) / error if error else 0.0)
    return worst


def _broken(draw: str, what: str) -> Finding:
    hint = "draw random numbers independently per rank for sharded values, identically for replicated ones"
    return Finding("dropout", "error", "", f"draw {draw}: {what}", hint)


# Fixed noise


class FixedNoise(_AtDraws):
    """Replaces random numbers by fixed ones, equal at every position, so that results can be compared.

    Masks keep everything, permutations and choices are the first ones. `unknown`: ops that were left random.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unknown: set[str] = set()

    def drew(self, name: str, before: random_streams.Generators, arguments: dict[str, Any], result: Any) -> None:
        fix = _FIXED.get(name.strip("_"))
        if fix is None:
            self.unknown.add(name)
            return
        if name.endswith("_"):
            arguments.pop("self")  # holds the result already
        with torch.no_grad():
            fix(result, arguments)


_Fix = Callable[[Any, dict[str, Any]], Any]


def _uniform(x: torch.Tensor, arguments: dict[str, Any]) -> None:
    low, high = arguments.get("from", 0.0), arguments.get("to", 1.0)
    x.fill_(low + (high - low) * _STAND_IN)


def _bernoulli(x: torch.Tensor, arguments: dict[str, Any]) -> None:
    p = arguments.get("p")
    if isinstance(p, torch.Tensor):
        x.copy_(p >= 0.5)
    elif p is None and isinstance(arguments.get("self"), torch.Tensor):
        x.copy_(arguments["self"] >= 0.5)
    else:
        x.fill_(1)


def _normal(x: torch.Tensor, arguments: dict[str, Any]) -> None:
    mean, std = arguments.get("mean", 0.0), arguments.get("std", 1.0)
    x.copy_(torch.as_tensor(mean + std * _STAND_IN, dtype=x.dtype, device=x.device))


def _integers(x: torch.Tensor, arguments: dict[str, Any]) -> None:
    low, high = arguments.get("low", arguments.get("from")) or 0, arguments.get("high", arguments.get("to")) or 2
    x.fill_(int(low + (high - low) * _STAND_IN))


def _dropped(results: Any, arguments: dict[str, Any]) -> None:
    out, mask = results
    out.copy_(arguments["input"] / (1 - arguments["p"]))
    mask.fill_(1)


def _first_choices(x: torch.Tensor, arguments: dict[str, Any]) -> None:
    order = arguments["self"].sort(-1, descending=True, stable=True).indices
    at = torch.arange(arguments["num_samples"], device=x.device) % order.shape[-1]
    x.copy_(order[..., at])


def _leaky(x: torch.Tensor, arguments: dict[str, Any]) -> None:
    """Fix `rrelu_with_noise`, whose noise is saved for backward."""
    slope, below = (arguments["lower"] + arguments["upper"]) / 2, arguments["self"] <= 0
    arguments["noise"].copy_(torch.where(below, slope, 1.0))
    x.copy_(arguments["self"] * arguments["noise"])


def _filled(value: float) -> _Fix:
    return lambda x, arguments: x.fill_(value)


_FIXED: dict[str, _Fix] = {
    "bernoulli": _bernoulli,
    "uniform": _uniform,
    "normal": _normal,
    "geometric": _filled(2),
    **dict.fromkeys(("randint", "randint_like", "random"), _integers),
    **dict.fromkeys(("rand", "rand_like", "randn", "randn_like", "exponential", "cauchy", "log_normal"),
                    _filled(_STAND_IN)),
    "native_dropout": _dropped,
    "rrelu_with_noise": _leaky,
    "randperm": lambda x, arguments: x.copy_(torch.arange(len(x), device=x.device)),
    "multinomial": _first_choices,
    "poisson": lambda x, arguments: x.copy_(arguments["self"].round()),
    "binomial": lambda x, arguments: x.copy_((arguments["count"] * arguments["prob"]).round()),
    "standard_gamma": lambda x, arguments: x.copy_(arguments["self"]),
}  # fmt: skip

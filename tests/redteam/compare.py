"""Hold two runs of a model against each other: values, kinds and shapes, and distributions of what is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["Difference", "difference", "law_difference"]

_FLOOR = 1e-3  # of the largest gradient: rounding of sums that cancel is not counted
_LAW = 0.45  # how far means and correlations may be off: 6 sigma of 400 draws

Difference = tuple[float, str]  # how far the worst value is off, and which it is


def difference(plain: Mapping[str, Any], sharded: Mapping[str, Any]) -> Difference:
    """The largest error relative to the largest value of each tensor."""
    largest = max([_size(tensor) for name, tensor in plain.items() if "gradient" in name], default=0.0)
    worst: Difference = (0.0, "")
    for name in dict.fromkeys([*plain, *sharded]):
        floor = _FLOOR * largest if "gradient" in name else 1e-9
        worst = max(worst, (_error(plain.get(name), sharded.get(name), floor, "gradient" in name), name))
    return worst


def _error(expected: Any, got: Any, floor: float, absent_is_zero: bool) -> float:
    if absent_is_zero and (expected is None or got is None):  # a gradient that nobody has counts as zero
        one = got if expected is None else expected
        return _size(one) / floor if floor else (1.0 if _size(one) else 0.0)
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return 0.0 if _same(expected, got) else math.inf
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return math.inf
    if not expected.is_floating_point() and not expected.is_complex():
        return 0.0 if torch.equal(expected, got) else 1.0
    if not torch.equal(expected.isnan(), got.isnan()):
        return math.inf
    usual = ~(expected.isnan() | (expected == got))  # infinities that are equal have no difference
    if not usual.any():
        return 0.0
    off = (expected - got)[usual].abs().max().item()
    return math.inf if math.isinf(off) else off / (_size(expected) + floor)


def _same(expected: Any, got: Any) -> bool:
    if isinstance(expected, float) and isinstance(got, float):
        return math.isclose(expected, got, rel_tol=1e-6, abs_tol=1e-9) or (math.isnan(expected) and math.isnan(got))
    return type(expected) is type(got) and bool(expected == got)


def _size(tensor: Any) -> float:
    if not isinstance(tensor, torch.Tensor) or not tensor.numel():
        return 0.0
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def law_difference(plain: torch.Tensor, sharded: torch.Tensor) -> Difference:
    """How far means and covariances of draws (one a row) are apart, in units of what is allowed."""
    plain, sharded = plain.double(), sharded.double()
    variance = torch.cov(plain.T).diagonal()
    spread = (variance + 1e-3 * variance.mean() + 1e-12).sqrt()
    mean = ((plain.mean(0) - sharded.mean(0)) / spread).abs().max().item()
    covariance = (torch.cov(plain.T) - torch.cov(sharded.T)) / torch.outer(spread, spread)
    return max((mean / _LAW, "mean of the draws"), (covariance.abs().max().item() / _LAW, "covariance of the draws"))

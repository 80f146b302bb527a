"""Measure how far off a sharded model is: one error measure, and findings with the tensor and the size of its error.

A gradient may be zero for mathematical reasons (a key's bias under softmax), so its error is measured against its own
size plus a small part of the largest tensor of its kind: `|got - want|max / (|want|max + 1e-4 * max over all |want|)`.
Missing reductions are found by comparing every gradient on every rank: forward results are exact without them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autoplan.values import Finding

Tensors = Mapping[str, torch.Tensor]
FLOOR = 1e-4


@dataclass(frozen=True)
class Tolerance:
    """The largest error that still counts as equal. In single precision, sums in another order differ already."""

    limit: float
    precision: str


DOUBLE = Tolerance(1e-5, "float64")
SINGLE = Tolerance(2e-3, "float32")


_IN_HALF = {
    torch.bfloat16: Tolerance(6e-2, "bfloat16"),  # rounding hides small mistakes, but no missing sum
    torch.float16: Tolerance(1e-2, "float16"),
}


def tolerance_for(dtype: torch.dtype) -> Tolerance:
    return DOUBLE if dtype == torch.float64 else _IN_HALF.get(dtype, SINGLE)


def error_of(got: torch.Tensor, want: torch.Tensor, largest: float) -> float:
    """Return the error measure above; infinity if shapes or the positions of infinities and NaN differ."""
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    got, want = _comparable(got), _comparable(want)
    difference, top = float((got - want).abs().max()), float(want.abs().max())
    if math.isfinite(difference) and math.isfinite(top):  # then everything is finite
        return _relative(difference, top, largest)
    finite = torch.isfinite(want)
    alike = (got == want) | (got.isnan() & want.isnan()) | (torch.isfinite(got) & finite)
    if not bool(alike.all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    got, want = got[finite], want[finite]
    return _relative(float((got - want).abs().max()), float(want.abs().max()), largest)


def _relative(difference: float, top: float, largest: float) -> float:
    scale = top + FLOOR * largest
    return difference / scale if scale else float(difference > 0)


def compare(
    check: str,
    what: str,
    want: Tensors,
    ranks: Sequence[Tensors],
    tolerance: Tolerance,
    *,
    missing_is_zero: bool = False,
) -> tuple[list[Finding], dict[str, float]]:
    """Compare every tensor of every rank with the unsharded model's; return findings and the worst error by name."""
    largest = max((largest_of(tensor) for tensor in want.values()), default=0.0)
    findings: list[Finding] = []
    errors: dict[str, float] = {}
    for name in sorted({*want, *(name for rank in ranks for name in rank)}):
        if name in want and want[name].numel() and bool(torch.isnan(want[name]).all()):
            findings.append(_not_comparable(check, what, name))
            continue
        pairs = [(rank.get(name), want.get(name)) for rank in ranks]
        errors_by_rank = [_error(got, wanted, largest, missing_is_zero) for got, wanted in pairs]
        worst = max((error, number) for number, error in enumerate(errors_by_rank))
        errors[name] = worst[0]
        if not worst[0] <= tolerance.limit:
            text = _wrong(worst, [rank.get(name) for rank in ranks], want.get(name), tolerance)
            findings.append(Finding(check, "error", name, f"{what} {text}"))
    return findings, errors


def _error(got: torch.Tensor | None, want: torch.Tensor | None, largest: float, missing_is_zero: bool) -> float:
    present = got if got is not None else want
    if present is None:
        return 0.0
    if (got is None or want is None) and not missing_is_zero:
        return float("inf")
    zeros = torch.zeros_like(present)
    return error_of(zeros if got is None else got, zeros if want is None else want, largest)


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def largest_of(tensor: torch.Tensor) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    values = _comparable(tensor).abs()
    if values.numel() and math.isfinite(top := float(values.max())):
        return top
    values = values[torch.isfinite(values)]
    return float(values.max()) if values.numel() else 0.0


def _not_comparable(check: str, what: str, name: str) -> Finding:
    return Finding(
        check,
        "warn",
        name,
        f"not comparable: the unsharded model's {what} is NaN everywhere",
        hint="pass inputs on which the unsharded model is finite",
        kind="not-comparable",
    )


def _wrong(
    worst: tuple[float, int], got: Sequence[torch.Tensor | None], want: torch.Tensor | None, tolerance: Tolerance
) -> str:
    error, number = worst
    size = f"is off by {error:.2g}" if math.isfinite(error) else "cannot be right"
    agree = "" if _alike(got) else "; ranks disagree"
    return f"{size} on rank {number}{_shapes(got[number], want)}{agree} (allowed {tolerance.limit:g})"


def _shapes(got: torch.Tensor | None, want: torch.Tensor | None) -> str:
    if got is None:
        return ", which has none"
    if want is None:
        return ", the unsharded model has none"
    return "" if got.shape == want.shape else f", shape {list(got.shape)} instead of {list(want.shape)}"


def _alike(tensors: Sequence[torch.Tensor | None]) -> bool:
    first = tensors[0]
    return all(
        (a is None and first is None) or (a is not None and first is not None and error_of(a, first, 0.0) <= 1e-9)
        for a in tensors
    )

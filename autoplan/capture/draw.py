"""Draw example tensors, the same ones every time, from a generator of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from autoplan.common.errors import SourceError

_MOST_ELEMENTS, _MOST_DESCRIBED = 1 << 28, 1 << 26  # of one example tensor; of one that a rule file describes
_DRAWN = 1_000_003  # a prime: no two rows of an example are the same


class Draw:
    """Draws the example tensors of one model; floats in the model's own dtype."""

    def __init__(self, seed: int, dtype: torch.dtype):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        """Return normal numbers; many are repeated from the first ones, since drawing takes longer than running."""
        count = prod(_few(shape))
        drawn = torch.randn(min(count, _DRAWN), generator=self.generator, dtype=torch.float64).to(self.dtype)
        return drawn.repeat(-(-count // _DRAWN) or 1)[:count].reshape(tuple(shape))

    def uniform(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.rand(_few(shape), generator=self.generator, dtype=torch.float64).to(self.dtype)

    def integers(self, low: int, high: int, shape: Sequence[int]) -> torch.Tensor:
        return torch.randint(low, max(high, low + 1), _few(shape), generator=self.generator)

    def spread(self, allowed: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return numbers spread over all of `allowed`; a quarter is drawn freely, so that some occur twice."""
        if not allowed:
            raise SourceError("no values to choose example ids from", hint="check the config for an empty vocabulary")
        count = prod(_few(shape))
        even = torch.arange(count - count // 4) * len(allowed) // max(1, count - count // 4)
        places = torch.cat([even, self.integers(0, len(allowed), (count // 4,))])
        return torch.tensor(allowed)[places[torch.randperm(count, generator=self.generator)]].reshape(tuple(shape))

    def described(self, rule: Mapping[str, Any], known: Mapping[str, Any]) -> Any:
        """Return an argument that a rule file describes by kind and shape (ids: low, high), or as `value` or `size`."""
        if "value" in rule:
            return rule["value"]
        if "size" in rule:
            return evaluate(rule["size"], known)
        shape = [evaluate(size, known) for size in rule["shape"]]
        if any(size < 0 for size in shape) or prod(shape) > _MOST_DESCRIBED:
            raise SourceError(f"rules/inputs: {rule['shape']} is {shape} here", hint="give the shape of an example")
        kind = rule.get("kind", "normal")
        if kind == "ids":
            return self.integers(evaluate(rule.get("low", 1), known), evaluate(rule.get("high", 90), known), shape)
        if kind in ("zeros", "ones"):
            dtype = {"int": torch.long, "bool": torch.bool}.get(rule.get("dtype", "float"), self.dtype)
            return torch.full(tuple(shape), float(kind == "ones")).to(dtype)
        if kind == "rows":
            try:
                row = torch.tensor(rule["row"])
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                text = f"rules/inputs: row is {rule['row']!r:.60}: {error}"
                raise SourceError(text, hint="give numbers, or lists of as many numbers each") from error
            return row.expand(*shape, *row.shape).clone()
        if kind not in ("normal", "uniform"):
            raise SourceError(
                f"rules/inputs: unknown kind {kind!r}", hint="use ids, normal, uniform, zeros, ones or rows"
            )
        return self.normal(shape) if kind == "normal" else self.uniform(shape)


def _few(shape: Sequence[int]) -> tuple[int, ...]:
    if prod(shape) > _MOST_ELEMENTS:
        raise SourceError(
            f"an example of shape {list(shape)} has {prod(shape):,} numbers; at most {_MOST_ELEMENTS:,} are drawn",
            hint="look for an absurd size in the config or the question (batch, sequence), or pass inputs=",
        )
    return tuple(shape)


def evaluate(size: int | str, known: Mapping[str, Any]) -> int:
    """Return a size of a rule file: a sum of products of numbers, known sizes and paths into config or model.

    >>> evaluate("2*batch+1", {"batch": 3})
    7
    >>> evaluate("batch*length//2", {"batch": 3, "length": 8})
    12
    """
    if isinstance(size, int):
        return size
    total = 0
    for term in size.split("+"):
        product = 1
        for factor in term.split("*"):
            first, *divisors = factor.split("//")
            product *= _look_up(first.strip(), known)
            for divisor in divisors:
                product //= _look_up(divisor.strip(), known)
        total += product
    return total


def _look_up(name: str, known: Mapping[str, Any]) -> int:
    if name.isdigit():
        return int(name)
    head, *path = name.split(".")
    value = known.get(head)
    for part in path:
        value = value[int(part)] if part.isdigit() and value is not None else getattr(value, part, None)
    if not isinstance(value, int):
        raise SourceError(f"rules/inputs: size {name!r} is {value!r}", hint="name an integer of the config")
    return value

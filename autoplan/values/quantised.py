"""How a quantised weight is stored: the tensors that stand in its place in a checkpoint, and how those lie on ranks.

The problem: a model is analysed as the plain weights that it computes with, and stored as packed ones: float8 with a
scale for each block of 128 × 128, four-bit numbers eight to an integer with a scale for each group of 128. Each dim of
such a tensor stands for dims of the plain weight, `factor` elements of which make one of its own. A cut of the weight
is a cut of all its tensors only where it falls between these blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True)
class PackedDim:
    """One dim of a stored tensor. `of`: the dims of the plain weight that it runs over, major first; none: its own.
    `factor` elements along them make a block, which has `each` elements here. `size` is its size."""

    size: int
    of: tuple[int, ...] = ()
    factor: int = 1
    each: int = 1


@dataclass(frozen=True)
class PackedTensor:
    """One stored tensor. `name`: after the name of the module. `dim` and `layout` say how a plan cuts it."""

    name: str
    dtype: str
    dims: tuple[PackedDim, ...]
    bytes: int
    dim: int | None = None
    layout: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)

    @property
    def attribute(self) -> str:
        """Its name where a module holds it: parameters have no dots."""
        return self.name.replace(".", "_")

    @property
    def segment(self) -> str:
        """How it is cut, as an entry says it."""
        return "whole" if self.dim is None else f"{self.dim}:{self.layout}"


@dataclass(frozen=True)
class Scheme:
    """How numbers are stored: `id` names the file in rules/quantised, `values` what the config says of it."""

    id: str
    title: str
    values: tuple[tuple[str, Any], ...] = ()

    def value(self, name: str) -> Any:
        """A number, a word, or a yes or no that the config says."""
        return dict(self.values)[name]


@dataclass(frozen=True)
class PackedWeight:
    """One weight (in a plan: a pattern of such weights) that is stored in `tensors`. `shape` is that of the plain one.

    `contracted` and `rows` are the dims that a product sums over, and that it does not: stacks have one more in front.
    `segments`: matrices that were quantised each for itself and stored as one, by their sizes along `rows`.
    `dim`: the one along which a plan cuts the plain weight.
    """

    name: str
    scheme: Scheme
    shape: tuple[int, ...]
    tensors: tuple[PackedTensor, ...]
    rows: int = 0
    contracted: int = 1
    segments: tuple[int, ...] = ()
    dim: int | None = None

    @property
    def owner(self) -> str:
        """The module that holds it."""
        return self.name.rpartition(".")[0]

    @property
    def parameter(self) -> str:
        """Its name in that module."""
        return self.name.rpartition(".")[2]

    @property
    def bytes(self) -> int:
        """As it is stored."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def is_flat(self) -> bool:
        """Is the matrix stored as one long row?"""
        return any(len(dim.of) > 1 for tensor in self.tensors for dim in tensor.dims)

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def block(self, dim: int) -> int:
        """How many elements of the plain weight along `dim` are never parted."""
        return max((one.factor for tensor in self.tensors for one in tensor.dims if one.of == (dim,)), default=1)

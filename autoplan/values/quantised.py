"""The storage of a quantised weight: the tensors that replace it in a checkpoint, and their shardings.

The problem: a model is analysed as the plain weights that it computes with, and stored as packed ones: float8 with a
scale for each block of 128 × 128, four-bit numbers eight to an integer with a scale for each group of 128. Each dim of
such a tensor stands for dims of the plain weight, `factor` elements of which make one of its own. A split of the weight
is a split of all its tensors only if it falls between these blocks.
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
    """One stored tensor. `name`: after the name of the module. `dim` and `layout` say how a plan shards it."""

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
        """Return its name as an attribute of a module: parameters have no dots."""
        return self.name.replace(".", "_")

    @property
    def segment(self) -> str:
        """Return its sharding in the notation of an entry."""
        return "whole" if self.dim is None else f"{self.dim}:{self.layout}"


@dataclass(frozen=True)
class Scheme:
    """A storage format of numbers: `id` names the file in rules/quantised, `values` are its settings in the config."""

    id: str
    title: str
    values: tuple[tuple[str, Any], ...] = ()

    def value(self, name: str) -> Any:
        """Return a number, a word or a flag from the config."""
        return dict(self.values)[name]


@dataclass(frozen=True)
class PackedWeight:
    """One weight (in a plan: a pattern of such weights) that is stored in `tensors`. `shape` is that of the plain one.

    `contracted` and `rows` are the dims that a product sums over, and that it does not: stacks have one more in front.
    `segments`: matrices that were quantised separately and stored as one, by their sizes along `rows`. `dim`: the one
    along which a plan shards the plain weight.
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
        """Return the module that holds it."""
        return self.name.rpartition(".")[0]

    @property
    def parameter(self) -> str:
        """Return its name in that module."""
        return self.name.rpartition(".")[2]

    @property
    def bytes(self) -> int:
        """Return its stored size."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def is_flat(self) -> bool:
        """Return whether the matrix is stored as one long row."""
        return any(len(dim.of) > 1 for tensor in self.tensors for dim in tensor.dims)

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def block(self, dim: int) -> int:
        """Return how many elements of the plain weight along `dim` are never separated."""
        return max((own.factor for tensor in self.tensors for own in tensor.dims if own.of == (dim,)), default=1)

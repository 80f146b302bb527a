"""Follow where a library's conversion moves numbers, so that a rank reads only the rows it needs.

The conversion is run once on places (each a number that says where it comes from), with one row along every dim where
nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch

from autoplan.common.errors import AutoplanError

Make = Callable[[Callable[[str], torch.Tensor]], dict[str, torch.Tensor]]  # of what gives a tensor by its key
Rows = Mapping[int, Sequence[int]]
Shape = tuple[int, ...]

_MOST_PLACES = 2**24  # of one conversion


@dataclass(frozen=True)
class Moved:
    """A tensor made of some of a checkpoint. `still`: dims along which nothing moves, with the dim of the source;
    `places`: where each number comes from, counted from `begins` of its source."""

    shape: Shape
    still: Mapping[int, int]
    places: torch.Tensor
    sources: Mapping[str, Shape]
    begins: tuple[int, ...]

    def piece(self, read: Callable[[str, Rows], torch.Tensor], rows: Rows) -> torch.Tensor:
        """What a rank holds of the whole: these rows, by dim; absent dims are held whole."""
        moving = [dim for dim in range(len(self.shape)) if dim not in self.still]
        places = self.places
        for dim in moving:
            if dim in rows:
                places = places.index_select(dim, torch.tensor(list(rows[dim]), dtype=torch.long))
        wanted = places.flatten()
        kept = [len(rows[dim]) if dim in rows else self.shape[dim] for dim in self.still]
        found: torch.Tensor | None = None
        for at, got in self._read(wanted, read, rows):
            if found is None:
                found = got.new_empty([len(wanted), *kept])
            found[at] = got
        if found is None:
            found = read(next(iter(self.sources)), {0: ()}).new_empty([len(wanted), *kept])
        found = found.reshape([*(places.shape[dim] for dim in moving), *kept])
        order = [*moving, *self.still]
        return found.permute([order.index(dim) for dim in range(len(order))])

    def _read(
        self, wanted: torch.Tensor, read: Callable[[str, Rows], torch.Tensor], rows: Rows
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """By source: which of the wanted places lie in it, and what lies there along the other dims."""
        owners = torch.bucketize(wanted, torch.tensor(self.begins), right=True) - 1
        for number in owners.unique().tolist():
            key, at = list(self.sources)[number], (owners == number).nonzero().flatten()
            shape = self.sources[key]
            moved = [dim for dim in range(len(shape)) if dim not in self.still.values()]
            places = wanted[at] - self.begins[number]
            sizes = [shape[dim] for dim in moved]
            indices = []
            for size in reversed(sizes):
                indices.append(places % size)
                places = torch.div(places, size, rounding_mode="floor")
            index = indices[::-1]
            asked: dict[int, Sequence[int]] = {self.still[dim]: held for dim, held in rows.items() if dim in self.still}
            inner = []
            for dim, one in zip(moved, index, strict=True):
                held, place = one.unique(return_inverse=True)
                inner.append(place)
                if len(held) < shape[dim]:
                    asked[dim] = held.tolist()
            got = read(key, asked).permute(*moved, *self.still.values())
            yield at, got[tuple(inner)] if inner else got[None].expand(len(at), *got.shape)


def follow(make: Make, shapes: Mapping[str, Shape]) -> dict[str, Moved] | None:
    """Follow a conversion (`make`) of tensors of these shapes; None where places do not tell."""
    ranks = {len(shape) for shape in shapes.values()}
    if len(ranks) != 1:
        return None
    dims = range(ranks.pop())
    whole = _shapes(make, shapes)
    still = {dim: ends for dim in dims if (ends := _still(make, shapes, whole, dim)) is not None}
    thin = {key: tuple(1 if dim in still else size for dim, size in enumerate(shape)) for key, shape in shapes.items()}
    *starts, all_places = accumulate(map(prod, thin.values()), initial=0)
    if all_places > _MOST_PLACES:
        return None
    begins = tuple(starts)
    numbered = {
        key: torch.arange(begin, begin + prod(shape)).view(shape)
        for begin, (key, shape) in zip(begins, thin.items(), strict=True)
    }
    made = make(lambda key: numbered[key].clone())
    moved = {
        name: Moved(whole[name], {ends[name]: dim for dim, ends in still.items()}, places, dict(shapes), begins)
        for name, places in made.items()
    }
    return moved if all(map(_agrees, moved.values())) else None


def _shapes(make: Make, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    made = make(lambda key: torch.empty(shapes[key], device="meta"))
    return {name: tuple(tensor.shape) for name, tensor in made.items()}


def _still(make: Make, shapes: Mapping[str, Shape], whole: Mapping[str, Shape], dim: int) -> dict[str, int] | None:
    """If nothing moves along a dim of the sources, which dim of each outcome it is: with one row there, as here."""
    thin = {key: (*shape[:dim], 1, *shape[dim + 1 :]) for key, shape in shapes.items()}
    if thin == shapes:
        return None
    two = {key: (*shape[:dim], 2, *shape[dim + 1 :]) for key, shape in shapes.items()}
    still: dict[str, int] = {}
    try:
        ones, twos = _shapes(make, thin), _shapes(make, two)
    except AutoplanError:  # a conversion that wants other sizes: what moves along this dim is read off its places
        return None
    for name, shape in whole.items():
        other, more = ones.get(name, ()), twos.get(name, ())
        if len(other) != len(shape):
            return None
        place = next((place for place, size in enumerate(shape) if other[place] != size), 0)
        if (other, more) != tuple((*shape[:place], few, *shape[place + 1 :]) for few in (1, 2)):
            return None
        still[name] = place
    return still


def _agrees(moved: Moved) -> bool:
    """Are the dims that do not move as long as those of every source, and is there one place for each number?"""
    thin = tuple(1 if dim in moved.still else size for dim, size in enumerate(moved.shape))
    if tuple(moved.places.shape) != thin or len(set(moved.still.values())) != len(moved.still):
        return False
    owners = torch.bucketize(moved.places.flatten(), torch.tensor(moved.begins), right=True) - 1
    used = [list(moved.sources.values())[number] for number in owners.unique().tolist()]
    return all(shape[source] == moved.shape[dim] for shape in used for dim, source in moved.still.items())

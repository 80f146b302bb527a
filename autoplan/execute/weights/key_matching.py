"""Match the keys of a checkpoint to parameters, including joined ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import nn

from autoplan.common.conventions import Conversion, Join, conventions
from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.execute.weights.files import runs

# Tensors that a checkpoint holds in pieces (an entry for each expert, gate apart from up): of each entry only the rows
# of this rank are read. Shapes determine how entries are joined, so that scales and indices are joined like their
# weight.

Rows = Mapping[int, Sequence[int]]
Read = Callable[..., torch.Tensor]  # called with rows of an entry by dim, or without for all of it


@dataclass(frozen=True)
class _Entry:
    key: str
    read: Read
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Places:
    """The dim along which entries are concatenated in a piece, and the range of each; `shapes`: of each, in place."""

    dim: int
    ranges: tuple[range, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass
class Joined:
    """One tensor of a model that is joined from several of a checkpoint."""

    name: str
    join: Join
    keys: list[str] = field(default_factory=list)
    _entries: dict[str, list[_Entry]] = field(default_factory=dict)

    def add(self, key: str, pattern: str, read: Read, shape: tuple[int, ...]) -> None:
        if self.join.turned:
            read, shape = partial(_turned, read), shape[::-1]
        self._entries.setdefault(pattern, []).append(_Entry(key, read, shape))
        self.keys.append(key)

    def forms(self, shape: tuple[int, ...], form: Callable[[str], torch.Tensor]) -> list[torch.Tensor]:
        """Return meta tensors of this shape, one for each dtype of the entries; raise if these do not fit."""
        self._places(shape)
        dtypes = dict.fromkeys(form(entry.key).dtype for entries in self._parts() for entry in entries)
        return [torch.empty(shape, dtype=dtype, device="meta") for dtype in dtypes]

    def piece(self, shape: tuple[int, ...], rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        """Return a rank's shard of the joined tensor of this shape: these rows, by dim; absent dims are full."""
        places, stacked = self._places(shape), int(self.join.stacked)
        sizes = [len(rows[dim]) if dim in rows else size for dim, size in enumerate(shape)]
        assembled = torch.empty(sizes if len(sizes) > stacked else [*sizes, 1], dtype=dtype)
        numbers = rows.get(0, range(shape[0])) if stacked else (0,)
        inner = {dim - stacked: own for dim, own in rows.items() if dim >= stacked}
        for part, entries in enumerate(self._parts()):
            mine, wanted = places.ranges[part], dict(inner)
            where = list(mine)  # positions of the part's rows in the shard
            if places.dim in inner:
                own = inner[places.dim]
                where = [place for place, row in enumerate(own) if row in mine]
                wanted[places.dim] = [own[place] - mine.start for place in where]
            if not where:
                continue
            for slot, number in enumerate(numbers):
                read = _read(entries[number], places.shapes[part], wanted)
                # Copy consecutive rows to their places, a run at a time.
                target = assembled[slot] if stacked else assembled
                done = 0
                for run in runs(where):
                    target.narrow(places.dim, run.start, len(run)).copy_(read.narrow(places.dim, done, len(run)))
                    done += len(run)
        return assembled.reshape(sizes)

    def _parts(self) -> list[list[_Entry]]:
        absent = [pattern for pattern in self.join.patterns if pattern not in self._entries]
        if absent:
            raise AutoplanError(
                f"{self.name} is built from {len(self.join.patterns)} kinds of tensors, but the checkpoint has "
                f"no {', '.join(absent)} (it has {self.keys[0]})",
                hint="is the checkpoint complete?",
            )
        return [self._entries[pattern] for pattern in self.join.patterns]

    def _places(self, shape: tuple[int, ...]) -> _Places:
        parts = self._parts()
        wanted, rest = (shape[0], shape[1:]) if self.join.stacked else (1, shape)
        odd = next((entries for entries in parts if len(entries) != wanted), None)
        if odd is not None:
            raise AutoplanError(
                f"{self.name} is built from {wanted} tensors like {odd[0].key}, but the checkpoint has {len(odd)}",
                hint="is the checkpoint complete, and does its config belong to it?",
            )
        unlike = next((e for entries in parts for e in entries if e.shape != entries[0].shape), None)
        places = None if unlike is not None else _places(rest or (1,), [entries[0].shape for entries in parts])
        if places is None:
            wrong = unlike or parts[0][0]
            raise AutoplanError(
                f"{wrong.key} is {list(wrong.shape)}: {len(self.keys)} such tensors do not form {self.name} "
                f"of {list(shape)}",
                hint="does the config belong to these files?",
            )
        return places


def _places(rest: tuple[int, ...], shapes: list[tuple[int, ...]]) -> _Places | None:
    """Return how entries of these shapes are concatenated in one piece; None if they do not fit."""
    for dim in range(len(rest)):
        others = [(*shape[:dim], *shape[dim + 1 :]) for shape in shapes if len(shape) == len(rest)]
        if len(others) == len(shapes) and all(other == (*rest[:dim], *rest[dim + 1 :]) for other in others):
            ends = (0, *accumulate(shape[dim] for shape in shapes))
            if ends[-1] == rest[dim]:
                return _Places(dim, tuple(range(a, b) for a, b in pairwise(ends)), tuple(shapes))
    each = rest[1:]
    if rest[0] == len(shapes) and all(_bare(shape) == _bare(each) for shape in shapes):  # one row per entry
        return _Places(0, tuple(range(n, n + 1) for n in range(len(shapes))), ((1, *each),) * len(shapes))
    return None


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size > 1)


def _turned(read: Read, rows: Rows | None = None) -> torch.Tensor:
    turned = read({1 - dim: wanted for dim, wanted in rows.items()}) if rows else read()
    return turned.transpose(0, 1)


def _read(entry: _Entry, shape: tuple[int, ...], rows: Rows) -> torch.Tensor:
    rows = {dim: own for dim, own in rows.items() if list(own) != list(range(shape[dim]))}
    if entry.shape == shape:
        return entry.read(rows) if rows else entry.read()
    tensor = entry.read().reshape(shape)  # a scalar, or a row
    for dim, own in rows.items():
        tensor = tensor.index_select(dim, torch.tensor(list(own), dtype=torch.long))
    return tensor


# Match tensors of a checkpoint to those of a model: tied weights are stored once, a base model's checkpoint lacks a
# prefix or has one, and conversions are the library's own (`conventions().checkpoint_names`). The rest is listed.

_SHOWN = 5  # names printed per kind of mismatch


@dataclass
class Matched:
    """The result of matching: targets read directly, joined and converted ones, and keys without a partner."""

    direct: dict[str, str] = field(default_factory=dict)  # name in the model -> key in the files
    joined: list[Joined] = field(default_factory=list)
    converted: list[Conversion] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def match_keys(
    model: nn.Module,
    groups: Sequence[Sequence[str]],
    passing: Iterable[str],
    keys: Iterable[str],
    read: Callable[..., torch.Tensor],
    shape: Callable[[str], tuple[int, ...]],
) -> Matched:
    """Find a source for each group of names (one tensor each): the first name that the checkpoint has. `passing`: the
    non-persistent buffers."""
    names = {name for group in groups for name in group}
    rules = conventions().checkpoint_names(model)
    prefix = rules.prefix
    matched, conversions, joins = Matched(), dict[str, Conversion](), dict[str, Joined]()
    for key in sorted(keys, key=_numbered):  # converters expect experts in order
        name, pattern = rules.rename(key)
        name = _with_or_without(prefix, name, names)
        if name not in names and _with_or_without(prefix, key, names) in names:
            name, pattern = _with_or_without(prefix, key, names), None
        if pattern is None and name in names:
            matched.direct[name] = key
        elif pattern is not None and name not in conversions and (join := rules.join(pattern)) is not None:
            joins.setdefault(name, Joined(name, join)).add(key, pattern, partial(read, key), shape(key))
        elif pattern is not None:
            if name not in conversions:
                conversions[name] = rules.conversion(pattern, name)
            conversions[name].add(name, key, pattern, shape(key))
        else:
            matched.unexpected.append(key)
    for joined in joins.values():
        if joined.name not in names:
            matched.unexpected += joined.keys
        elif joined.name not in matched.direct:
            matched.joined.append(joined)
    for conversion in conversions.values():
        if any(name in names for name in conversion.targets()):
            matched.converted.append(conversion)
        else:
            matched.unexpected += conversion.keys
    converted = {name for entry in matched.converted for name in entry.targets()}
    matched_names = {*matched.direct, *(joined.name for joined in matched.joined), *converted}
    matched.missing = [group[0] for group in groups if not matched_names & set(group)]
    # Old checkpoints hold buffers that are no longer saved; a model may list further harmless keys.
    passing = set(passing)
    missing = [re.compile(text) for text in rules.may_lack]
    surplus = [re.compile(text) for text in rules.may_exceed]
    matched.missing = [name for name in matched.missing if not any(rule.search(name) for rule in missing)]
    matched.unexpected = [
        key
        for key in matched.unexpected
        if _with_or_without(rules.prefix, key, passing) not in passing and not any(rule.search(key) for rule in surplus)
    ]
    return matched


def _numbered(key: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]


def _with_or_without(prefix: str, name: str, names: set[str]) -> str:
    """Return the model's name of a tensor that differs only by the base model's prefix."""
    if name in names:
        return name
    if name.startswith(f"{prefix}.") and name.removeprefix(f"{prefix}.") in names:
        return name.removeprefix(f"{prefix}.")
    return f"{prefix}.{name}" if f"{prefix}.{name}" in names else name


def refuse_unmatched(matched: Matched, wrong_shapes: Sequence[str], where: str) -> None:
    """Raise one error that lists all mismatches, each with the nearest name of the other side."""
    texts = []
    if matched.missing:
        texts.append(_listed("missing", matched.missing, matched.unexpected))
    if matched.unexpected:
        texts.append(_listed("unexpected", matched.unexpected, matched.missing))
    if wrong_shapes:
        texts.append(f"{len(wrong_shapes)} with other shapes or dtypes: " + "; ".join(wrong_shapes[:_SHOWN]))
    if texts:
        raise PlanMismatchError(
            f"{where} is not this model's checkpoint: " + ". ".join(texts),
            hint="strict=False loads what fits" if not wrong_shapes else "",
        )


def _listed(kind: str, names: Sequence[str], others: Sequence[str]) -> str:
    shown = []
    for name in names[:_SHOWN]:
        near = difflib.get_close_matches(name, others, n=1, cutoff=0.5)
        shown.append(f"{name} (nearest: {near[0]})" if near else name)
    return f"{len(names)} {kind}: " + ", ".join(shown) + (", …" if len(names) > _SHOWN else "")


# Trace where a library's conversion moves elements, so that a rank reads only the rows it needs.
#
# The conversion is run once on indices (each element is the number of its source place), with one row along every dim
# where nothing moves.

Make = Callable[[Callable[[str], torch.Tensor]], dict[str, torch.Tensor]]  # takes a reader of tensors by key
Shape = tuple[int, ...]
_MOST_PLACES = 2**24  # in one conversion


@dataclass(frozen=True)
class Moved:
    """A tensor whose elements a conversion moved. `still`: dims along which nothing moves, with their dim in the
    source; `places`: the source place of each element, where a source begins at its number in `begins`."""

    shape: Shape
    still: Mapping[int, int]
    places: torch.Tensor
    sources: Mapping[str, Shape]
    begins: tuple[int, ...]

    def piece(self, read: Callable[[str, Rows], torch.Tensor], rows: Rows) -> torch.Tensor:
        """Return a rank's shard of the tensor: these rows, by dim; absent dims are full."""
        moving = [dim for dim in range(len(self.shape)) if dim not in self.still]
        places = self.places
        for dim in moving:
            if dim in rows:
                places = places.index_select(dim, torch.tensor(list(rows[dim]), dtype=torch.long))
        wanted = places.flatten()
        still_sizes = [len(rows[dim]) if dim in rows else self.shape[dim] for dim in self.still]
        result: torch.Tensor | None = None
        for at, values in self._read(wanted, read, rows):
            if result is None:
                result = values.new_empty([len(wanted), *still_sizes])
            result[at] = values
        if result is None:
            result = read(next(iter(self.sources)), {0: ()}).new_empty([len(wanted), *still_sizes])
        result = result.reshape([*(places.shape[dim] for dim in moving), *still_sizes])
        order = [*moving, *self.still]
        return result.permute([order.index(dim) for dim in range(len(order))])

    def _read(
        self, wanted: torch.Tensor, read: Callable[[str, Rows], torch.Tensor], rows: Rows
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, per source, the indices of the wanted places in it, and the values there along the other dims."""
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
            needed: dict[int, Sequence[int]] = {self.still[dim]: own for dim, own in rows.items() if dim in self.still}
            inner = []
            for dim, positions in zip(moved, index, strict=True):
                source_rows, place = positions.unique(return_inverse=True)
                inner.append(place)
                if len(source_rows) < shape[dim]:
                    needed[dim] = source_rows.tolist()
            values = read(key, needed).permute(*moved, *self.still.values())
            yield at, values[tuple(inner)] if inner else values[None].expand(len(at), *values.shape)


def follow(make: Make, shapes: Mapping[str, Shape]) -> dict[str, Moved] | None:
    """Trace a conversion (`make`) of tensors of these shapes; None where places do not determine it."""
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
    converted = make(lambda key: numbered[key].clone())
    moved = {
        name: Moved(whole[name], {ends[name]: dim for dim, ends in still.items()}, places, dict(shapes), begins)
        for name, places in converted.items()
    }
    return moved if all(map(_agrees, moved.values())) else None


def _shapes(make: Make, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    outcomes = make(lambda key: torch.empty(shapes[key], device="meta"))
    return {name: tuple(tensor.shape) for name, tensor in outcomes.items()}


def _still(make: Make, shapes: Mapping[str, Shape], whole: Mapping[str, Shape], dim: int) -> dict[str, int] | None:
    """Return, if nothing moves along a dim of the sources, its dim in each result, whose size follows it."""
    thin = {key: (*shape[:dim], 1, *shape[dim + 1 :]) for key, shape in shapes.items()}
    if thin == shapes:
        return None
    two = {key: (*shape[:dim], 2, *shape[dim + 1 :]) for key, shape in shapes.items()}
    still: dict[str, int] = {}
    try:
        ones, twos = _shapes(make, thin), _shapes(make, two)
    except AutoplanError:  # the conversion needs other sizes: treat this dim as moving
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
    """Return whether the dims that do not move have their sources' sizes, and every element has a place."""
    thin = tuple(1 if dim in moved.still else size for dim, size in enumerate(moved.shape))
    if tuple(moved.places.shape) != thin or len(set(moved.still.values())) != len(moved.still):
        return False
    owners = torch.bucketize(moved.places.flatten(), torch.tensor(moved.begins), right=True) - 1
    used = [list(moved.sources.values())[number] for number in owners.unique().tolist()]
    return all(shape[source] == moved.shape[dim] for shape in used for dim, source in moved.still.items())

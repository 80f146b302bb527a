"""The state of the search: what one argument should be, and what all arguments of a call should be.

Sizes have names where several arguments share them (batch, length, side): a change of one is a change for all. A size
that a failure gives for a single argument is a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import BuiltinFunctionType, SimpleNamespace
from typing import Any, Literal

import torch

from autoplan.capture.draw import Draw

Kind = Literal[
    "ids", "float", "whole", "unit", "ones", "bool", "nowhere", "complex", "lengths", "groups", "positions", "borders",
    "none", "value", "size", "list", "dict", "record",
]  # fmt: skip
Path = tuple[str | int, ...]  # the argument, then keys and positions inside it
BATCH = "batch"
# All different, so that a size in an error shows which one it is.
SIZES = {BATCH: 2, "length": 10, "width": 16, "side": 32, "frames": 8, "samples": 4096, "nodes": 9, "edges": 14}
_LARGEST = 70_000  # largest size of one dim of an example
_LONGEST = 2048  # the same for ids, times and masks: comparing all with each other grows by the square
MASKS = ("bool", "nowhere", "ones")
_HOLD = ("list", "dict", "record")
_Drawn = Callable[[Draw, tuple[int, ...], int, Mapping[str, int]], torch.Tensor]
_DRAWN: dict[str, _Drawn] = {
    "ids": lambda draw, shape, below, sizes: draw.integers(0, below, shape),
    "float": lambda draw, shape, below, sizes: draw.normal(shape),
    "whole": lambda draw, shape, below, sizes: draw.integers(0, below, shape).to(draw.dtype),
    "unit": lambda draw, shape, below, sizes: draw.uniform(shape),
    "ones": lambda draw, shape, below, sizes: torch.ones(shape, dtype=draw.dtype),
    "bool": lambda draw, shape, below, sizes: torch.ones(shape, dtype=torch.bool),
    "nowhere": lambda draw, shape, below, sizes: torch.zeros(shape, dtype=torch.bool),
    "complex": lambda draw, shape, below, sizes: torch.complex(draw.normal(shape), draw.normal(shape)),
    "lengths": lambda draw, shape, below, sizes: torch.full(shape, sizes["length"]),
    # the same number for neighbours
    "groups": lambda draw, shape, below, sizes: torch.arange(prod(shape)).view(shape) * sizes[BATCH] // prod(shape),
    "positions": lambda draw, shape, below, sizes: torch.arange(shape[-1]).expand(shape).clone(),
    "borders": lambda draw, shape, below, sizes: torch.tensor(_borders(sizes), dtype=torch.int32),
}


@dataclass(frozen=True)
class Mark:
    """A number that a model looks for among ids. `there`: the batch's last sequence ends in it; else no id is it."""

    number: int
    there: bool

    def put(self, ids: torch.Tensor, below: int) -> torch.Tensor:
        ids = torch.where(ids == self.number, (self.number + 1) % below, ids)
        if self.there and ids.dim():
            last = ids[-1] if ids.dim() > 1 else ids
            last[..., -(last.shape[-1] // 3 or 1) :] = self.number
        return ids


@dataclass(frozen=True)
class Want:
    """A kind, and a shape of sizes and names of sizes; ids are below `below`, as are whole numbers (floats). Lists,
    dicts and records hold `items`; a record is of the class `value`, or a namespace; a list is of the class `value`, if
    any: a tuple, named or not; a dict with the `value` Enum has its members as keys. Positions count along the last
    dim; borders split all `length` positions in two; a size is a plain number, that of the name `value`. Ids with a
    `value` (a Mark) do not contain its number, or end in it."""

    kind: Kind
    shape: tuple[int | str, ...] = ()
    below: int | str = 2
    value: Any = None
    items: tuple[tuple[str | int, Want], ...] = ()

    @property
    def is_tensor(self) -> bool:
        return self.kind in _DRAWN

    def sizes(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)

    def text(self, sizes: Mapping[str, int]) -> str:
        """Return a description for people."""
        if self.kind == "value":
            return self.code(sizes)
        if self.kind == "none":
            return "None"
        if self.kind == "size":
            return str(sizes[self.value])
        if self.kind == "record":
            return f"{self._class} of {{{', '.join(f'{key}: {item.text(sizes)}' for key, item in self.items)}}}"
        if self.items or not self.is_tensor:
            inside = ", ".join(f"{key}: {item.text(sizes)}" for key, item in self.items)
            kind = self.value.__name__ if self.kind == "list" and self.value not in (None, tuple) else self.kind
            return f"{kind} of {{{inside}}}" if inside else f"empty {kind}"
        below = f" below {self._below(sizes)}" if self.kind in ("ids", "whole") else ""
        if isinstance(self.value, Mark):
            below += f" {'that end in' if self.value.there else 'but'} {self.value.number}"
        return f"{self.kind}{below} {list(self.sizes(sizes))}"

    def code(self, sizes: Mapping[str, int]) -> str:
        """Return Python code that makes such a value."""
        if self.kind == "value":
            return f"torch.{self.value.__name__}" if isinstance(self.value, BuiltinFunctionType) else repr(self.value)
        inside = ", ".join(item.code(sizes) for _, item in self.items)
        if self.kind == "list":
            if self.value in (None, tuple):
                return f"({inside},)" if self.value is tuple else f"[{inside}]"
            return f"{self.value.__name__}({inside})"
        shape = ", ".join(map(str, self.sizes(sizes)))
        codes = {
            "ids": f"torch.randint(0, {self._below(sizes)}, ({shape},))",
            "float": f"torch.randn({shape or '()'})",
            "whole": f"torch.randint(0, {self._below(sizes)}, ({shape},)).float()",
            "unit": f"torch.rand({shape or '()'})",
            "ones": f"torch.ones({shape or '()'})",
            "complex": f"torch.randn({shape}, dtype=torch.complex64)",
            "bool": f"torch.ones({shape}, dtype=torch.bool)",
            "nowhere": f"torch.zeros({shape}, dtype=torch.bool)",
            "lengths": f"torch.full(({shape},), {sizes['length']})",
            "groups": f"torch.arange({prod(have := self.sizes(sizes))}).view({shape}) * {sizes[BATCH]} // {prod(have)}",
            "positions": f"torch.arange({self.sizes(sizes)[-1:] and self.sizes(sizes)[-1]}).expand({shape})",
            "borders": f"torch.tensor({_borders(sizes)})",
            "size": str(sizes.get(str(self.value))),
            "record": f"{self._class}({', '.join(f'{key}={item.code(sizes)}' for key, item in self.items)})",
            "dict": "{" + ", ".join(f"{self._shown(key)}: {item.code(sizes)}" for key, item in self.items) + "}",
        }
        return codes.get(self.kind, repr(self.value))

    def _shown(self, key: str | int) -> str:
        return repr(key) if self.value is None else str(key)

    def _key(self, key: str | int) -> Any:
        """Return the key of a dict that an item's step stands for: a path has a member of an Enum by its full name."""
        return key if self.value is None else self.value[str(key).partition(".")[2]]

    @property
    def _class(self) -> str:
        return "types.SimpleNamespace" if self.value is None else str(getattr(self.value, "__name__", "record"))

    def _below(self, sizes: Mapping[str, int]) -> int:
        return sizes[self.below] if isinstance(self.below, str) else self.below

    def make(self, draw: Draw, sizes: Mapping[str, int]) -> Any:
        """Draw such a value: real CPU tensors."""
        if (drawn := _DRAWN.get(self.kind)) is not None:
            tensor = drawn(draw, self.sizes(sizes), self._below(sizes), sizes)
            return self.value.put(tensor, self._below(sizes)) if isinstance(self.value, Mark) else tensor
        if self.kind == "list":
            items = [item.make(draw, sizes) for _, item in self.items]
            return self.value(*items) if self.value not in (None, tuple) else (self.value or list)(items)
        if self.kind == "dict":
            return {self._key(key): item.make(draw, sizes) for key, item in self.items}
        if self.kind == "record":
            return (self.value or SimpleNamespace)(**{str(key): item.make(draw, sizes) for key, item in self.items})
        return sizes[self.value] if self.kind == "size" else self.value


@dataclass(frozen=True)
class State:
    """The value that the search assumes for each argument of a call."""

    wants: tuple[tuple[str, Want], ...]
    named: tuple[tuple[str, int], ...] = tuple(SIZES.items())

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.named)

    def leaves(self) -> Iterator[tuple[Path, Want]]:
        """Yield every tensor, inside of lists, dicts and records too."""
        for name, want in self.wants:
            yield from _leaves((name,), want)

    def elements(self) -> int:
        return sum(prod(want.sizes(self.sizes)) for _, want in self.leaves())

    def dims(self) -> int:
        return sum(len(want.shape) for _, want in self.leaves())

    def at(self, path: Path) -> Want | None:
        return dict(self.leaves()).get(path)

    def among(self, paths: Iterable[Path]) -> Iterator[tuple[Path, Want]]:
        """Yield the leaves at these paths."""
        leaves = dict(self.leaves())
        yield from ((path, leaves[path]) for path in paths if path in leaves)

    def holding(self, kind: Kind) -> Iterator[tuple[Path, Want]]:
        """Yield every list, dict or record (`kind`), those inside of others too."""
        for name, want in self.wants:
            yield from _holding((name,), want, kind)

    def inner(self, path: Path) -> Want:
        """Return a part of an argument, of any kind."""
        want = dict(self.wants)[str(path[0])]
        for key in path[1:]:
            want = dict(want.items)[key]
        return want

    def is_tuple(self, path: Path) -> bool:
        """Return whether this part of an argument is a tuple: its annotation fixes its length."""
        return self.inner(path).value is not None

    def holds(self, name: str) -> bool:
        return name in dict(self.wants)

    def with_want(self, path: Path, want: Want) -> State:
        """Return the state with another want; a new argument, key or item is added."""
        wants = dict(self.wants)
        wants[str(path[0])] = _changed(wants.get(str(path[0])), path[1:], want)
        return replace(self, wants=tuple(wants.items()))

    def without(self, name: str) -> State:
        return replace(self, wants=tuple(pair for pair in self.wants if pair[0] != name))

    def with_alike_items(self, before: State) -> State:
        """Return the state in which list items that were alike (levels of a pyramid) still are: all change as one."""
        old = dict(before.wants)
        wants = tuple((name, _alike(old.get(name), want)) for name, want in self.wants)
        return replace(self, wants=wants)

    def with_size(self, name: str, size: int) -> State:
        return replace(self, named=tuple({**self.sizes, name: size}.items()))

    def with_dim(self, path: Path, dim: int, size: int) -> Iterator[State]:
        """Yield states with another size of one dim: for all that share its name, or for this argument alone."""
        want = self.at(path)
        if want is None or size < 1 or size > (_LARGEST if want.kind == "float" else _LONGEST):
            return
        now = want.shape[dim]
        if size < 2 and now in ("length", "side", "samples", "nodes", "edges"):  # a size of one broadcasts
            return
        if isinstance(now, str) and now != BATCH:
            yield self.with_size(now, size)
        if now != BATCH or path:
            if now == "side":  # an image of its own size
                square = tuple(size if own == "side" else own for own in want.shape)
                yield self.with_want(path, replace(want, shape=square))
            shape = (*want.shape[:dim], size, *want.shape[dim + 1 :])
            yield self.with_want(path, replace(want, shape=shape))

    def draw(self, seed: int, dtype: torch.dtype) -> dict[str, Any]:
        draw = Draw(seed, dtype)
        return {name: want.make(draw, self.sizes) for name, want in self.wants}


def _borders(sizes: Mapping[str, int]) -> list[int]:
    return [0, sizes["length"] // 2, sizes["length"]]


def _leaves(path: Path, want: Want) -> Iterator[tuple[Path, Want]]:
    if want.kind in _HOLD:
        for key, item in want.items:
            yield from _leaves((*path, key), item)
    elif want.is_tensor:
        yield path, want


def _holding(path: Path, want: Want, kind: Kind) -> Iterator[tuple[Path, Want]]:
    if want.kind == kind:
        yield path, want
    for key, item in want.items:
        yield from _holding((*path, key), item, kind)


def _alike(before: Want | None, after: Want) -> Want:
    if before is None or before.kind != after.kind or not after.items or before == after:
        return after
    old = dict(before.items)
    items = tuple((key, _alike(old.get(key), item)) for key, item in after.items)
    new = [item for key, item in items if item != old.get(key)]
    if after.kind == "list" and len(old) == len(items) > 1 and len(set(old.values())) == len(set(new)) == 1:
        items = tuple((key, new[0]) for key, _ in items)
    return replace(after, items=items)


def _changed(want: Want | None, path: Path, new: Want) -> Want:
    if not path:
        return new
    if want is None or want.kind not in _HOLD:
        want = Want("dict" if isinstance(path[0], str) else "list")
    items = dict(want.items)
    items[path[0]] = _changed(items.get(path[0]), path[1:], new)
    return replace(want, items=tuple(items.items()))


def grown(name: str, size: int, large: bool) -> tuple[int, int]:
    """Return two other sizes, smaller if inputs are large; what windows and patches divide is doubled or halved."""
    if name in ("side", "frames", "samples"):
        return size // 2 if large else 2 * size, size + size // 2
    if name == BATCH:
        return size + 1, size + 1
    return size + 2 | 1, 2 * size


def is_nothing(value: Any) -> bool:
    """Return whether a value is the default of an optional argument: None, or an empty tuple."""
    return value is None or isinstance(value, tuple) and not value


def is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and not isinstance(value, torch.SymInt)

"""Names with `*`: how one plan entry speaks for the same module of every repeated block.

A plan of an 80-layer model must be short enough to read, and must still say exactly which modules it means. A pattern
is a dotted path in which `*` stands for any text inside one segment, never across a dot. `fold_names` writes patterns
that match the given names and, among the names of the model, nothing else.

>>> matches("model.layers.*.mlp.up_proj", "model.layers.31.mlp.up_proj")
True
>>> matches("model.*.up_proj", "model.layers.31.mlp.up_proj")
False
>>> fold_names(["layers.0.w1", "layers.1.w1", "norm"])
('layers.*.w1', 'norm')
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any, Protocol, TypeVar

__all__ = ["Universe", "best_match", "fold_counted", "fold_names", "is_under", "matches", "nearest"]


class HasPattern(Protocol):
    @property
    def pattern(self) -> str: ...


_LONGEST = 200  # characters of a misspelt name that are compared

Patterned = TypeVar("Patterned", bound=HasPattern)


@lru_cache(maxsize=8192)
def _compiled(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """Atomic groups: the first place at which a piece fits is the one to take, and nothing is tried again."""
    first, *between, last = (re.escape(piece) for piece in pattern.split("*"))
    return re.compile(f"{first}{''.join(f'(?>[^.]+?{piece})' for piece in between)}[^.]+{last}").fullmatch


def matches(pattern: str, fqn: str) -> bool:
    """Does `pattern` mean `fqn`? A pattern means itself, too; "" is the model's root."""
    return pattern == fqn or ("*" in pattern and _compiled(pattern)(fqn) is not None)


def is_under(pattern: str, fqn: str) -> bool:
    """Does `pattern` mean `fqn` or a module that holds it?"""
    depth = pattern.count(".") + 1 if pattern else 0
    return matches(pattern, ".".join(fqn.split(".")[:depth]))


def best_match(items: Iterable[Patterned], fqn: str) -> Patterned | None:
    """The item whose pattern means `fqn`, the one with the fewest `*` where several do."""
    found = [item for item in items if matches(item.pattern, fqn)]
    return min(found, key=lambda item: (item.pattern != fqn, item.pattern.count("*")), default=None)


class Universe:
    """The names of a model by their segments: what a folded pattern means is found without trying every name."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self._tree: dict[str, Any] = {}
        for name in self.names:
            node = self._tree
            for segment in name.split("."):
                node = node.setdefault(segment, {})

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def meant(self, pattern: str) -> frozenset[str]:
        """The names that a pattern means whose every `*` is a whole segment."""
        found: list[tuple[tuple[str, ...], dict[str, Any]]] = [((), self._tree)]
        for segment in pattern.split("."):
            if segment == "*":
                found = [((*path, key), below) for path, node in found for key, below in node.items()]
            else:
                found = [((*path, segment), node[segment]) for path, node in found if segment in node]
        return self.names & {".".join(path) for path, _ in found}


def fold_names(names: Iterable[str], universe: Iterable[str] = ()) -> tuple[str, ...]:
    """Fewer patterns for many names: numbers that differ become `*`. Order is that of first appearance.

    No pattern means a name of `universe` that is not in `names`: where folding everything would claim too much, it is
    done within one value of the leftmost number at a time.
    """
    return tuple(pattern for pattern, _ in fold_counted(names, universe))


def fold_counted(names: Iterable[str], universe: Iterable[str] = ()) -> tuple[tuple[str, int], ...]:
    """`fold_names`, with how many names each pattern stands for."""
    wanted = dict.fromkeys(names)
    known = universe if isinstance(universe, Universe) else Universe(universe)
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name in wanted:
        segments = tuple(name.split("."))
        shape = tuple("*" if segment.isdigit() else segment for segment in segments)
        groups.setdefault(shape, []).append(segments)
    return tuple(folded for members in groups.values() for folded in _fold(members, wanted, known))


def _fold(members: Sequence[tuple[str, ...]], wanted: Container[str], known: Universe) -> list[tuple[str, int]]:
    """Members have one length and differ in numbers only."""
    columns = list(zip(*members, strict=True))
    varying = [position for position, column in enumerate(columns) if len(set(column)) > 1]
    pattern = ".".join("*" if position in varying else column[0] for position, column in enumerate(columns))
    if not varying or all(name in wanted for name in known.meant(pattern)):
        return [(pattern, len(members))]
    parts: dict[str, list[tuple[str, ...]]] = {}
    for member in members:
        parts.setdefault(member[varying[0]], []).append(member)
    return [folded for part in parts.values() for folded in _fold(part, wanted, known)]


def nearest(name: str, names: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """The known names most like an unknown one, best first; numbers and `*` count as equal."""

    def plain(text: str) -> str:
        return ".".join("*" if segment.isdigit() else segment for segment in text.split("."))

    wanted = plain(name[:_LONGEST])
    scored: dict[str, float] = {}
    for known in names:
        matcher = SequenceMatcher(None, wanted, plain(known), autojunk=False)
        # Paths that end alike are better help than paths that begin alike: everything begins with "model.layers".
        same_leaf = 0.2 if wanted.rsplit(".", 1)[-1] == plain(known).rsplit(".", 1)[-1] else 0.0
        score = matcher.ratio() + same_leaf
        if score > 0.5:
            scored.setdefault(known, score)
    return tuple(sorted(scored, key=lambda known: (-scored[known], known))[:count])

"""Names with `*`, which stands for any text inside one segment: one plan entry for a module of every repeated block.

`fold_names` writes patterns that match the given names and no others of the model. Blocks numbered inside their names
(`expert_12`) are folded where a module holds three or more that differ in numbers only.


>>> matches("model.layers.*.mlp.up_proj", "model.layers.31.mlp.up_proj")
True
>>> matches("model.*.up_proj", "model.layers.31.mlp.up_proj")
False
>>> fold_names(["layers.0.w1", "layers.1.w1", "norm"])
('layers.*.w1', 'norm')
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any, Protocol, TypeVar


class HasPattern(Protocol):
    @property
    def pattern(self) -> str: ...


_LONGEST = 200  # most characters of a misspelt name that are compared

Patterned = TypeVar("Patterned", bound=HasPattern)
Key = TypeVar("Key")
Value = TypeVar("Value")
_NUMBER = re.compile(r"\d+")
_ALIKE = 3  # fewest siblings, differing in numbers only, that are folded as blocks; two (`fc1`, `fc2`) are not


@lru_cache(maxsize=8192)
def _compiled(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """Compile a pattern to a regular expression with atomic groups: the first match of a piece is final."""
    first, *between, last = (re.escape(piece) for piece in pattern.split("*"))
    return re.compile(f"{first}{''.join(f'(?>[^.]+?{piece})' for piece in between)}[^.]+{last}").fullmatch


def matches(pattern: str, fqn: str) -> bool:
    """Return whether `pattern` matches `fqn`. A pattern matches itself, too; "" is the model's root."""
    return pattern == fqn or ("*" in pattern and _compiled(pattern)(fqn) is not None)


def matched_by(pattern: str, names: Collection[str]) -> list[str]:
    """Return the names that a pattern matches: itself alone, if it is one of them."""
    return [pattern] if pattern in names else [name for name in names if matches(pattern, name)]


def holders(name: str) -> Iterator[str]:
    """Yield the modules that contain a module, parameter or buffer, the nearest first, the model itself last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def is_under(pattern: str, fqn: str) -> bool:
    """Return whether `pattern` matches `fqn` or a module that contains it."""
    depth = pattern.count(".") + 1 if pattern else 0
    return matches(pattern, ".".join(fqn.split(".")[:depth]))


def best_match(items: Iterable[Patterned], fqn: str) -> Patterned | None:
    """Return the item whose pattern matches `fqn`; of several, the one with the fewest `*`."""
    matching = [item for item in items if matches(item.pattern, fqn)]
    return min(matching, key=lambda item: (item.pattern != fqn, item.pattern.count("*")), default=None)


class Universe:
    """The names of a model by their segments, so that a pattern is matched without trying every name."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self._tree: dict[str, Any] = {}
        self._shapes: dict[int, Counter[str]] = {}  # id of a node of the tree -> shapes of its children
        for name in self.names:
            node = self._tree
            for segment in name.split("."):
                node = node.setdefault(segment, {})

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def meant(self, pattern: str) -> frozenset[str]:
        """Return the names that a pattern matches."""
        nodes: list[tuple[tuple[str, ...], dict[str, Any]]] = [((), self._tree)]
        for segment in pattern.split("."):
            if "*" in segment:
                pairs = ((path, node, key) for path, node in nodes for key in node if matches(segment, key))
                nodes = [((*path, key), node[key]) for path, node, key in pairs]
            else:
                nodes = [((*path, segment), node[segment]) for path, node in nodes if segment in node]
        return self.names & {".".join(path) for path, _ in nodes}

    def shape(self, name: str) -> tuple[str, ...]:
        """Return the segments of a name, with `*` for the numbers that distinguish siblings."""
        segments, node = [], self._tree
        for segment in name.split("."):
            segments.append("*" if segment.isdigit() else self._numbered(segment, node))
            node = node.get(segment, {})
        return tuple(segments)

    def holds_no_others(self, members: Iterable[tuple[str, ...]], at: int, shape: str) -> bool:
        """Return whether these members, at one segment of their paths, are all siblings of this shape."""
        others: dict[tuple[str, ...], set[str]] = {}
        for member in members:
            others.setdefault(member[:at], set()).add(member[at])
        for above, keys in others.items():
            node = self._tree
            for segment in above:
                node = node.get(segment, {})
            if {key for key in node if _NUMBER.sub("*", key) == shape} != keys:
                return False
        return True

    def _numbered(self, segment: str, siblings: dict[str, Any]) -> str:
        if not any(map(str.isdigit, segment)):
            return segment
        shapes = self._shapes.get(id(siblings))
        if shapes is None:
            shapes = self._shapes[id(siblings)] = Counter(_NUMBER.sub("*", key) for key in siblings)
        shape = _NUMBER.sub("*", segment)
        return shape if shapes[shape] >= _ALIKE else segment


def starred(name: str) -> str:
    """Return the name with `*` for every number: the common pattern of blocks of one kind."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def like_modules(classes: Mapping[str, str]) -> dict[str, str]:
    """Return a text for each module that is the same for those of like blocks: its name, its class and what lies beside
    it (inside of it if it is a block). `classes`: the class of each module."""
    inside = defaultdict(list)
    for name, kind in classes.items():
        inside[name.rpartition(".")[0]].append(f"{name.rpartition('.')[2]} {kind}")
    blocks = {name: name if name.rpartition(".")[2].isdigit() else name.rpartition(".")[0] for name in classes}
    return {name: f"{starred(name)} {kind} of {', '.join(inside[blocks[name]])}" for name, kind in classes.items()}


def fold_names(names: Iterable[str], universe: Iterable[str] = ()) -> tuple[str, ...]:
    """Return few patterns for many names: numbers that differ become `*`, ordered by first appearance. No pattern
    matches a name of `universe` that is not in `names`."""
    return tuple(pattern for pattern, _ in fold_counted(names, universe))


def fold_counted(names: Iterable[str], universe: Iterable[str] = ()) -> tuple[tuple[str, int], ...]:
    """Return `fold_names` with the number of names that each pattern stands for."""
    wanted = dict.fromkeys(names)
    tree = universe if isinstance(universe, Universe) else Universe(universe)
    groups = grouped((tree.shape(name), tuple(name.split("."))) for name in wanted)
    return tuple(folded for shape, members in groups.items() for folded in _fold(shape, members, tree))


def _fold(shape: tuple[str, ...], members: Sequence[tuple[str, ...]], universe: Universe) -> list[tuple[str, int]]:
    """Fold members that differ in numbers only; a pattern matches these alone, and no name of another shape."""
    columns = list(zip(*members, strict=True))
    varying = [position for position, column in enumerate(columns) if len(set(column)) > 1]
    pattern = ".".join(shape[position] if position in varying else column[0] for position, column in enumerate(columns))
    partly = [at for at in varying if shape[at] != "*" and not universe.holds_no_others(members, at, shape[at])]
    if not varying or (not partly and universe.meant(pattern) <= {".".join(member) for member in members}):
        return [(pattern, len(members))]
    parts = grouped((member[(partly or varying)[0]], member) for member in members)
    return [folded for part in parts.values() for folded in _fold(shape, part, universe)]


def nearest(name: str, names: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """Return the known names most like an unknown one, best first; numbers and `*` count as equal."""
    wanted = starred(name[:_LONGEST])
    scored: dict[str, float] = {}
    for candidate in names:
        matcher = SequenceMatcher(None, wanted, starred(candidate), autojunk=False)
        # A common end is better help than a common beginning: everything begins with "model.layers".
        same_leaf = 0.2 if wanted.rsplit(".", 1)[-1] == starred(candidate).rsplit(".", 1)[-1] else 0.0
        score = matcher.ratio() + same_leaf
        if score > 0.5:
            scored.setdefault(candidate, score)
    return tuple(sorted(scored, key=lambda candidate: (-scored[candidate], candidate))[:count])


def meant(name: str, paths: Iterable[str]) -> tuple[str, ...]:
    """Return the path that an unknown one was probably meant as: the nearest, if their last parts are alike or one is
    inside the other.

    >>> meant("layers.*.mlp.upp", ["layers.*.mlp.up", "layers.*.mlp.down"])
    ('layers.*.mlp.up',)
    >>> meant("layers.*.mlp.gate", ["layers.*.attn.qkv"])
    ()
    """
    leaf = starred(name).rpartition(".")[2]
    for path in nearest(name, paths, count=1):
        other = starred(path).rpartition(".")[2]
        nested = is_under(starred(name), starred(path)) or is_under(starred(path), starred(name))
        if nested or SequenceMatcher(None, leaf, other, autojunk=False).ratio() >= 0.5:
            return (path,)
    return ()


def suggestion(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return a hint with the known name that is most like an unknown one; `otherwise` if none is like it."""
    close = nearest(name, names, count=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, in order.

    >>> grouped((len(word), word) for word in ("up", "gate", "to"))
    {2: ['up', 'to'], 4: ['gate']}
    """
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups

"""The arrow notation: patterns of rules and the pictures of their examples, in one language.

    x    -> gate:linear -> product:mul.activated      a chain; `:kind` says what a box is; `.port` where it is read
    x    -> up:linear -> product
    product -> down:linear

`a -> b` means that b reads a, through nothing but scales and shifts (which stay visible to patterns that name them).
`a ~> b` means that a's value reaches b through norms, splits, joins and the like, but through no other contraction.
In an example, a kind carries the dims of its weight in layout notation: `linear[64, 256!]` has in = 64 and out = 256,
sharded over ranks; `linear[64, 96!|96!]` is packed. `#name` after a dim names its axis class where the size does not
tell, `@name` after the brackets lets two boxes share one parameter, and `+gathered` says that the
output is gathered from all ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import networkx as nx

from autoplan.analyse.picture.flow import Dim, Flow, Node
from autoplan.common.errors import AutoplanError
from autoplan.common.layout import Layout

# The dims of the weight of each kind, in the order in which examples list them.
FIELDS: dict[str, tuple[str, ...]] = {
    "linear": ("in", "out"),
    "stacked": ("in", "out", "stack"),
    "embedding": ("rows", "width"),
    "conv": ("in", "out"),
    "depthwise": ("out",),
    **dict.fromkeys(("norm", "scale", "shift", "parameter", "attend", "scan"), ("over",)),
}
PLAIN_KINDS = {
    *("input", "output", "mul", "add", "cat", "split", "mix", "sum", "softmax", "topk", "pick"),
    *("scatter", "write", "matmul", "cumsum", "any"),
}

_BOX = re.compile(
    r"(?P<name>\w+)"
    r"(:(?P<kinds>[a-z|]+)(\[(?P<dims>[^\]]*)\])?(@(?P<shared>\w+))?(?P<gathered>\+gathered)?)?"
    r"(\.(?P<port>\w+))?"
)


@dataclass(frozen=True)
class Arrow:
    """An arrow: `reader` reads `source` at `port` ("" for any); `direct` distinguishes `->` from `~>`."""

    source: str
    reader: str
    port: str
    direct: bool


@dataclass(frozen=True)
class Pattern:
    """Named boxes with the kinds they may have, in order of appearance, and arrows between them."""

    kinds: tuple[tuple[str, frozenset[str]], ...]
    arrows: tuple[Arrow, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.kinds)

    def kinds_of(self, name: str) -> frozenset[str]:
        return dict(self.kinds)[name]


@dataclass(frozen=True)
class _Box:
    name: str
    kinds: frozenset[str]
    dims: str | None
    shared: str | None
    gathered: bool
    port: str


def _read_box(text: str, line: str) -> _Box:
    box = _BOX.fullmatch(text.strip())
    if not box:
        raise AutoplanError(f"{text.strip()!r} is not a box, in the line {line.strip()!r}", hint="write name:kind.port")
    kinds = frozenset((box["kinds"] or "").split("|")) - {""}
    unknown = sorted(kinds - FIELDS.keys() - PLAIN_KINDS)
    if unknown:
        raise AutoplanError(
            f"{unknown[0]!r} is not a kind of box, in the line {line.strip()!r}",
            hint=f"kinds are {', '.join(sorted(PLAIN_KINDS | FIELDS.keys()))}",
        )
    return _Box(box["name"], kinds, box["dims"], box["shared"], bool(box["gathered"]), box["port"] or "")


def _chains(text: str) -> list[tuple[list[_Box], list[bool]]]:
    """Return each line as boxes, with whether the arrow after each is direct."""
    chains = []
    for line in text.strip().splitlines():
        parts = re.split(r"(->|~>)", line.partition("  #")[0])
        if not line.strip():
            continue
        chains.append(([_read_box(part, line) for part in parts[::2]], [arrow == "->" for arrow in parts[1::2]]))
    return chains


def parse_pattern(text: str) -> Pattern:
    """Parse the pattern of a rule. A name without a kind may be any box."""
    kinds: dict[str, frozenset[str]] = {}
    arrows: list[Arrow] = []
    for boxes, direct in _chains(text):
        for box in boxes:
            if box.kinds or box.name not in kinds:
                kinds[box.name] = box.kinds or frozenset({"any"})
        for source, reader, is_direct in zip(boxes, boxes[1:], direct, strict=False):
            arrows.append(Arrow(source.name, reader.name, reader.port, is_direct))
    return Pattern(tuple(kinds.items()), tuple(arrows))


def draw(text: str) -> Flow:
    """Draw the picture of an example. Boxes are numbered in order of appearance; a box's parameter is its name."""
    flow: Flow = nx.DiGraph()
    numbers: dict[str, int] = {}
    for boxes, _ in _chains(text):
        for box in boxes:
            if box.name not in numbers:
                numbers[box.name] = len(numbers)
                flow.add_node(numbers[box.name], node=_example_node(box))
        for source, reader in zip(boxes, boxes[1:], strict=False):
            edge = numbers[source.name], numbers[reader.name]
            ports = flow.edges[edge]["ports"] if flow.has_edge(*edge) else frozenset[str]()
            flow.add_edge(*edge, ports=ports | ({reader.port} - {""}))
    return flow


def _example_node(box: _Box) -> Node:
    if len(box.kinds) != 1:
        raise AutoplanError(f"box {box.name!r} of an example needs exactly one kind where it first appears")
    kind = next(iter(box.kinds))
    parameter = box.shared or box.name
    texts = [text.strip() for text in (box.dims or "").split(",") if text.strip()]
    fields = FIELDS.get(kind, ())
    if len(texts) > len(fields):
        raise AutoplanError(f"box {box.name!r} has {len(texts)} dims; {kind} has {', '.join(fields) or 'none'}")
    numbered = enumerate(zip(fields, texts, strict=False))
    dims = tuple((field, _example_dim(text, parameter, i)) for i, (field, text) in numbered)
    return Node(kind, box.name, (parameter,) if texts else (), dims, box.gathered)


def _example_dim(text: str, parameter: str, dim: int) -> Dim:
    layout_text, _, label = text.partition("#")
    layout = Layout.parse(layout_text)
    # Its axis classes: the label, else the sizes of the sharded factors, else the size of the dim.
    split = {str(factor.size) for factor in _factors(layout) if factor.split is not None}
    classes = frozenset({label} if label else split or {str(layout.size)})
    return Dim(layout.size, parameter, dim, str(layout) if layout.is_split else None, classes)


def _factors(layout: Layout) -> list[Layout]:
    return [leaf for part in layout.parts for leaf in _factors(part)] if layout.parts else [layout]

"""Layouts: how one tensor dimension is sharded, in one line that people can read and files can hold.

    "32!*128"                    32 heads of 128 rows, heads sharded over ranks
    "32!*128|8!*128|8!*128"      packed q, k, v: each segment is cut by its own heads
    "14336!|14336!"              packed gate and up
    "(16!|1)*64"                 Falcon: query heads are sharded, the shared key is replicated
    "2!2@2*4!2@1*64"             grouped heads over four ranks: groups over pairs of ranks, heads within a pair
    "768!~128"                   six blocks of 128 rows, unevenly: over four ranks 256, 256, 128 and 128 rows

A number is a factor; `*` multiplies (major first); `|` concatenates; `!` marks a factor that is sharded over all
ranks; `n!p@s` shards it in p parts, rank r taking part (r // s) % p; `n!~b` shards it between blocks of b, with one
block more on the first ranks if the number is not divisible. A bare factor is replicated.

>>> Layout.parse("2!*2|3").rows(rank=1, tp=2)
(2, 3, 4, 5, 6)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from autoplan.common.errors import AutoplanError

_TOKEN = re.compile(r"\s*(\d+!\d+@\d+|\d+!~[1-9]\d*|\d+!|\d+|[()*|])")


def chunk(size: int, parts: int, index: int) -> range:
    """Return the index-th of `parts` pieces, cut by ceiling as DTensor does: uneven pieces are the last ones."""
    step = -(-size // parts)
    return range(min(index * step, size), min((index + 1) * step, size))


def even_blocks(size: int, parts: int, index: int, block: int) -> range:
    """Return the index-th of `parts` pieces of blocks, as even as possible: the first ones have one block more.

    >>> [len(even_blocks(768, 4, rank, 128)) for rank in range(4)]
    [256, 256, 128, 128]
    """
    each, more = divmod(-(-size // block), parts)
    first = index * each + min(index, more)
    return range(min(first * block, size), min((first + each + (index < more)) * block, size))


@dataclass(frozen=True)
class Layout:
    """A parsed layout: a factor (`size`), or a "product" or "concatenation" of `parts`."""

    kind: str
    size: int
    parts: tuple[Layout, ...] = ()
    split: tuple[int, int] | None = None  # (pieces, stride); (0, 1): over all ranks
    block: int = 0  # block size of an uneven cut

    @staticmethod
    def parse(text: str) -> Layout:
        """Parse the notation above."""
        return _parse(text)

    @property
    def is_split(self) -> bool:
        return self.split is not None or any(part.is_split for part in self.parts)

    @property
    def is_uneven(self) -> bool:
        """Return whether it is cut between blocks, whose number need not be divisible."""
        return self.block > 0 or any(part.is_uneven for part in self.parts)

    def piece(self, rank: int, tp: int) -> range:
        """Return what a rank holds of a sharded factor."""
        assert self.split is not None
        pieces, stride = self.split
        if self.block:
            return even_blocks(self.size, tp, rank, self.block)
        return chunk(self.size, pieces or tp, (rank // stride) % (pieces or tp))

    def rows(self, rank: int, tp: int) -> tuple[int, ...]:
        """Return the global indices that `rank` holds, in its local order."""
        return _rows(self, rank, tp)

    def rows_of_all(self, tp: int) -> tuple[tuple[int, ...], ...]:
        """Return `rows` of each rank."""
        return tuple(self.rows(rank, tp) for rank in range(tp))

    def held(self, rank: int, tp: int) -> int:
        """Return how many global indices `rank` holds, without listing them: a table may have too many."""
        if self.kind == "product":
            return prod(part.held(rank, tp) for part in self.parts)
        if self.parts:
            return sum(part.held(rank, tp) for part in self.parts)
        return self.size if self.split is None else len(self.piece(rank, tp))

    def runs(self, rank: int, tp: int) -> tuple[range, ...]:
        """Return what `rank` holds, in order, as runs of global indices, of which there may be too many to list."""
        return _runs(self, rank, tp)

    def all_carried(self) -> bool:
        """Return whether every row that a rank holds is sharded."""
        if self.kind == "product":
            return any(part.all_carried() for part in self.parts)
        return all(part.all_carried() for part in self.parts) if self.parts else self.split is not None

    def carried(self, tp: int) -> tuple[bool, ...]:
        """Return for each row that a rank holds (as many as rank 0) whether it is sharded or replicated."""
        return _carried(self, 0, tp)

    def shared_rows(self, tp: int) -> bool:
        """Return whether several ranks hold one row, while others are sharded."""
        if not self.is_split:
            return tp > 1 and self.size > 0
        if self.kind == "concatenation":
            return any(part.shared_rows(tp) for part in self.parts)
        split = [part for part in self.parts if part.is_split]  # replicated factors go with each index of the others
        if len(split) == 1:
            return split[0].shared_rows(tp)
        if self.split == (0, 1):
            return False
        all_rows = [row for rank in range(tp) for row in self.rows(rank, tp)]
        return len(all_rows) != len(set(all_rows))

    def contiguous(self, tp: int) -> bool:
        """Return whether a plain `Shard(dim)` holds the same: consecutive rows, cut by ceiling."""
        wanted = (chunk(self.size, tp, rank) for rank in range(tp))
        return all(self.runs(rank, tp) == ((piece,) if piece else ()) for rank, piece in enumerate(wanted))

    def one_run(self, tp: int) -> bool:
        """Return whether the ranks' rows, one after the other, are the global ones, however many each rank holds."""
        runs = [run for rank in range(tp) for run in self.runs(rank, tp)]
        ends = [0, *(run.stop for run in runs)]
        return ends[-1] == self.size and all(run.start == end for run, end in zip(runs, ends, strict=False))

    def __str__(self) -> str:
        if not self.parts:
            mark = "" if self.split is None else "!" if self.split[0] == 0 else f"!{self.split[0]}@{self.split[1]}"
            return f"{self.size}{mark}~{self.block}" if self.block else f"{self.size}{mark}"
        if self.kind == "concatenation":
            return "|".join(str(part) for part in self.parts)
        return "*".join(f"({part})" if part.kind == "concatenation" else str(part) for part in self.parts)


@lru_cache(maxsize=4096)
def _parse(text: str) -> Layout:
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if not match:
            raise AutoplanError(f"cannot parse layout {text!r} at {text[position:]!r}")
        tokens.append(match[1])
        position = match.end()

    def concatenation() -> Layout:
        parts = [product()]
        while tokens and tokens[0] == "|":
            tokens.pop(0)
            parts.append(product())
        return parts[0] if len(parts) == 1 else Layout("concatenation", sum(p.size for p in parts), tuple(parts))

    def product() -> Layout:
        parts = [factor()]
        while tokens and tokens[0] == "*":
            tokens.pop(0)
            parts.append(factor())
        return parts[0] if len(parts) == 1 else Layout("product", prod(p.size for p in parts), tuple(parts))

    def factor() -> Layout:
        if not tokens:
            raise AutoplanError(f"layout {text!r} ends unexpectedly")
        token = tokens.pop(0)
        if token == "(":
            inner = concatenation()
            if not tokens or tokens.pop(0) != ")":
                raise AutoplanError(f"layout {text!r} has an unclosed parenthesis")
            return inner
        if not token[0].isdigit():
            raise AutoplanError(f"layout {text!r} has {token!r} where a number is expected")
        size, mark, how = token.partition("!")
        if not mark:
            return Layout("factor", int(size))
        if how.startswith("~"):
            return Layout("factor", int(size), split=(0, 1), block=int(how[1:]))
        pieces, _, stride = how.partition("@")
        return Layout("factor", int(size), split=(int(pieces or 0), int(stride or 1)))

    result = concatenation()
    if tokens:
        raise AutoplanError(f"unexpected {tokens[0]!r} in layout {text!r}")
    return result


@lru_cache(maxsize=65536)
def _rows(layout: Layout, rank: int, tp: int) -> tuple[int, ...]:
    return tuple(row for run in layout.runs(rank, tp) for row in run)


@lru_cache(maxsize=65536)
def _runs(layout: Layout, rank: int, tp: int) -> tuple[range, ...]:
    runs: list[range] = []
    if not layout.parts:
        runs = [range(layout.size) if layout.split is None else layout.piece(rank, tp)]
    elif layout.kind == "product":
        runs, size = [range(1)], 1
        for part in reversed(layout.parts):
            outer = _runs(part, rank, tp)
            if runs == [range(size)]:
                runs = [range(run.start * size, run.stop * size) for run in outer]
            else:
                runs = [range(i * size + run.start, i * size + run.stop) for own in outer for i in own for run in runs]
            size *= part.size
    else:
        offset = 0
        for part in layout.parts:
            runs += [range(offset + run.start, offset + run.stop) for run in _runs(part, rank, tp)]
            offset += part.size
    joined: list[range] = []
    for run in filter(len, runs):
        if joined and joined[-1].stop == run.start:
            joined[-1] = range(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return tuple(joined)


@lru_cache(maxsize=65536)
def _carried(layout: Layout, rank: int, tp: int) -> tuple[bool, ...]:
    if not layout.parts:
        return (layout.split is not None,) * len(_rows(layout, rank, tp))
    if layout.kind == "product":
        flags: tuple[bool, ...] = (False,)
        for part in layout.parts:
            inner = _carried(part, rank, tp)
            flags = tuple(a or b for a in flags for b in inner)
        return flags
    return tuple(flag for part in layout.parts for flag in _carried(part, rank, tp))


# A packed tensor has one element for each `block` elements of a plain dim (the last may be smaller). Its layout follows
# from the plain one, if no rank holds a part of a block.


def in_blocks(layout: Layout, tp: int, block: int, segments: tuple[int, ...] = ()) -> Layout | None:
    """Return the layout of the blocks; None if `tp` ranks would part one.

    `segments`: sizes of the pieces in each of which blocks are counted from its beginning.

    >>> str(in_blocks(Layout.parse("32!*64"), 4, 128)), in_blocks(Layout.parse("768!"), 4, 128)  # 192 = 1.5 blocks
    ('16!', None)
    """
    if block == 1:
        return layout
    if len(segments) > 1 and any(size % block for size in segments[:-1]):
        return _segmented(layout, tp, block, segments)
    return _divided(layout, tp, block)


def joined(layouts: tuple[Layout, ...]) -> Layout:
    """Return the layout of one dim that runs over several, the first of them slowest."""
    return layouts[0] if len(layouts) == 1 else Layout("product", prod(layout.size for layout in layouts), layouts)


def _segmented(layout: Layout, tp: int, block: int, segments: tuple[int, ...]) -> Layout | None:
    """Return the layout of blocks that begin again with each segment, which must be a part of the layout."""
    if not layout.is_split:
        return Layout("factor", sum(-(-size // block) for size in segments))
    if layout.kind != "concatenation" or tuple(part.size for part in layout.parts) != segments:
        return None
    return _concatenation([_divided(part, tp, block) for part in layout.parts])


def _divided(layout: Layout, tp: int, block: int) -> Layout | None:
    if not layout.is_split:
        return Layout("factor", -(-layout.size // block))
    if layout.split is not None:
        return _divided_leaf(layout, tp, block)
    if layout.kind == "concatenation":
        if any(part.size % block for part in layout.parts[:-1]):
            return None
        return _concatenation([_divided(part, tp, block) for part in layout.parts])
    last = max(place for place, part in enumerate(layout.parts) if part.is_split)
    before, suffix = layout.parts[:last], prod(part.size for part in layout.parts[last + 1 :])
    inner = _scaled(layout.parts[last], suffix, tp)
    if inner is None or (before and inner.size % block):
        return None
    blocks = _divided(inner, tp, block)
    if blocks is None:
        return None
    return joined((*before, blocks)) if before else blocks


def _divided_leaf(leaf: Layout, tp: int, block: int) -> Layout | None:
    """Return the blocks of rows cut by ceiling, if all cuts fall between blocks and are those of the blocks."""
    assert leaf.split is not None
    if leaf.block:
        between = leaf.block % block == 0
        return Layout("factor", -(-leaf.size // block), (), leaf.split, leaf.block // block) if between else None
    pieces = leaf.split[0] or tp
    blocks = -(-leaf.size // block)
    for index in range(pieces):
        rows, piece = chunk(leaf.size, pieces, index), chunk(blocks, pieces, index)
        if (rows.start, rows.stop) != (min(piece.start * block, leaf.size), min(piece.stop * block, leaf.size)):
            return None
    return Layout("factor", blocks, split=leaf.split)


def _scaled(layout: Layout, by: int, tp: int) -> Layout | None:
    """Return the same dim with `by` elements in place of each, in as few factors as possible."""
    if by == 1:
        return layout
    if not layout.parts:
        if layout.split is not None and not layout.block and layout.size % (layout.split[0] or tp):
            return None
        return Layout("factor", layout.size * by, split=layout.split, block=layout.block * by)
    if layout.kind == "concatenation":
        scaled = [_scaled(part, by, tp) for part in layout.parts]
        return _concatenation(scaled)
    return Layout("product", layout.size * by, (*layout.parts, Layout("factor", by)))


def _concatenation(parts: list[Layout | None]) -> Layout | None:
    present = [part for part in parts if part is not None]
    return Layout("concatenation", sum(p.size for p in present), tuple(present)) if len(present) == len(parts) else None

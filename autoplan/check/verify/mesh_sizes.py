"""A mesh to simulate, as text: `dp=2,tp=2`. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoplan.common.errors import AutoplanError

__all__ = ["NAMES", "MeshSizes", "parse_mesh"]

NAMES = ("dp", "dp_shard", "fsdp", "dp_shard_cp", "dp_replicate", "tp", "ep")


@dataclass(frozen=True)
class MeshSizes:
    """A mesh to simulate: dim names and sizes, in order."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def tp_size(self) -> int:
        return dict(zip(self.names, self.sizes, strict=True)).get("tp", 1)

    @property
    def ep_size(self) -> int:
        return dict(zip(self.names, self.sizes, strict=True)).get("ep", 1)

    @property
    def split_size(self) -> int:
        """Ranks that see one batch."""
        return self.tp_size * self.ep_size

    @property
    def data_size(self) -> int:
        return self.ranks // self.split_size

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


def parse_mesh(text: str | Mapping[str, int] | MeshSizes) -> MeshSizes:
    """`dp=2,tp=2` as names and sizes; tp (or ep) comes last.

    >>> parse_mesh("tp=2,dp=4")
    MeshSizes(names=('dp', 'tp'), sizes=(4, 2))
    """
    if isinstance(text, MeshSizes):
        return text
    listed = [_pair(part, text) for part in text.split(",")] if isinstance(text, str) else list(text.items())
    pairs = dict(listed)
    if len(pairs) < len(listed):
        raise AutoplanError(f"mesh {text!r} names a dim twice", hint="write it as dp=2,tp=2")
    for name, size in pairs.items():
        if name not in NAMES or not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise AutoplanError(f"mesh {text!r}: {name}={size}", hint=f"sizes from 1 on, for {', '.join(NAMES)}")
    if pairs.get("tp", 1) > 1 and pairs.get("ep", 1) > 1:
        raise AutoplanError(
            f"mesh {text!r} has tp and ep: experts live on the ranks of tp, or on ranks of their own",
            hint="leave ep out and pass ep_size, or leave tp out",
        )
    order = sorted(pairs, key=lambda name: (name in ("tp", "ep"), name != "dp_replicate"))
    return MeshSizes(tuple(order), tuple(pairs[name] for name in order))


def _pair(part: str, text: Any) -> tuple[str, int]:
    name, _, size = part.partition("=")
    if not size.strip().isdecimal() or len(size) > 9:
        raise AutoplanError(f"mesh {text!r} is not understood at {part!r}", hint="write it as dp=2,tp=2")
    return name.strip(), int(size)

"""Bytes that a compiled step moves: elementwise ops between two products are one kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Fusion:
    """`kernel`: products and messages so far. `unwritten`: storages of elementwise results that no other kernel has
    read, and the kernel that makes each."""

    kernel: int = 0
    unwritten: dict[int, int] = field(default_factory=dict)

    def moved(self, read: Iterable[tuple[int, int]], made: Iterable[tuple[int, int]], product: bool) -> int:
        """Return the bytes that one op adds. `read`, `made`: number (-1: unknown) and bytes of each storage."""
        self.kernel += product
        size = 0
        for number, own in read:
            maker = self.unwritten.get(number)
            if maker != self.kernel:
                size += own if maker is None else 2 * own  # written by its maker first
                self.unwritten.pop(number, None)
        for number, own in made:
            if product or number < 0:
                size += own
            else:
                self.unwritten[number] = self.kernel
        return size

"""Modules that a user names: found where Python finds them, and in the folder one stands in."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def from_here() -> list[str]:
    """The places where modules are looked for, the current folder among them."""
    here = os.getcwd()
    return [*sys.path] if here in sys.path or "" in sys.path else [here, *sys.path]


@contextmanager
def importable_here() -> Iterator[None]:
    """Inside, the current folder counts as a place for modules, as it does for `python -m`."""
    before, inside = sys.path[:], from_here()
    added = inside[0] if inside != before else None
    if added is not None:
        sys.path.insert(0, added)
    try:
        yield
    finally:
        if added is not None and added in sys.path:
            sys.path.remove(added)

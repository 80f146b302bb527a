"""In which order a model uses its modules: what a drawing of it follows. For readers; nothing is decided by it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CutsOf", "Drawn", "FlowPart"]


@dataclass(frozen=True)
class FlowPart:
    """Modules with parameters, in the order in which their weights are first read.

    `block`: the first block of a kind, and `blocks` how many run like it; "" for what stands in no block. `steps` are
    names under it (whole names where there is no block), with `*` for many alike, such as experts. `reads`: for each
    step the numbers of those that feed it without another between, -1 for all that is not in this part; () where that
    is not known.
    """

    block: str
    blocks: int
    steps: tuple[str, ...]
    reads: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class CutsOf:
    """What one plan does to every parameter of the model: (pattern, the dim that is cut or None, as people read it)."""

    name: str
    cuts: tuple[tuple[str, int | None, str], ...]


@dataclass(frozen=True)
class Drawn:
    """What a page draws of an audit (one side) or of two plans that are compared."""

    flow: tuple[FlowPart, ...]
    sides: tuple[CutsOf, ...]

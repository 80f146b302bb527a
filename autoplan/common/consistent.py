"""Does a plan make sense by itself: are its patterns paths, its layouts and numbers for as many ranks as it has?"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.common.errors import AutoplanError
from autoplan.common.layout import Layout
from autoplan.common.patterns import matches
from autoplan.values import Plan


def inconsistencies(plan: Plan) -> Iterator[str]:
    """One line for each thing that cannot be meant, with the place in the plan."""
    sizes = plan.made_for.sizes
    for number, rule in enumerate(plan.runtime.parameters):
        where = f"runtime.parameters[{number}]"
        yield from _of_pattern(where, rule.pattern)
        yield from _of_layout(f"{where}.layout", rule.layout, plan.ranks)
        if (rule.dim is None) != (rule.layout is None):
            yield f"{where}: a cut needs both a dim and a layout"
        if rule.dim is None or rule.layout is None:
            continue
        for known in sizes:
            if known.pattern == rule.pattern:
                yield from _of_shapes(where, rule.dim, rule.layout, known.shapes)
    for number, one in enumerate(plan.runtime.instructions):
        where = f"runtime.instructions[{number}]"
        yield from _of_pattern(where, one.pattern)
        for layout in one.layouts():
            yield from _of_layout(f"{where}.layout", layout, plan.ranks)
        if problem := one.problem(plan.ranks):
            yield f"{where} ({type(one).__name__} at {one.pattern or 'the model'}): {problem}"


def _of_pattern(where: str, pattern: str) -> Iterator[str]:
    """A dotted path. The model itself is ""."""
    if pattern and not (all(pattern.split(".")) and pattern == pattern.strip() and matches(pattern, pattern)):
        yield f"{where}.pattern: {pattern!r} is no dotted path"


def _of_layout(where: str, text: str | None, ranks: int) -> Iterator[str]:
    try:
        layout = Layout.parse(text or "1")
    except AutoplanError as error:
        yield f"{where}: {error.message}"
        return
    for part in _over_groups(layout):
        pieces, stride = part.split or (1, 1)
        if ranks % (pieces * stride):
            yield f"{where}: {text!r} shards {part} over groups of ranks, which {ranks} ranks do not make"


def _over_groups(layout: Layout) -> Iterator[Layout]:
    if layout.split is not None and layout.split[0]:
        yield layout
    for part in layout.parts:
        yield from _over_groups(part)


def _of_shapes(where: str, dim: int, text: str, shapes: tuple[tuple[int, ...], ...]) -> Iterator[str]:
    try:
        size = Layout.parse(text).size
    except AutoplanError:  # said already
        return
    for shape in shapes:
        if not -len(shape) <= dim < len(shape):
            yield f"{where}: dim {dim} of a parameter of shape {list(shape)}"
        elif shape[dim] != size:
            yield f"{where}: layout {text!r} is for {size} rows, dim {dim} of the parameter has {shape[dim]}"

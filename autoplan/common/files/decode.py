"""Decode plain data into frozen values by their type hints; errors name the exact place (`entries[3].units`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from autoplan.common.errors import AutoplanError, PlanFileError
from autoplan.common.layout import Layout
from autoplan.common.patterns import matches, suggestion
from autoplan.values import Plan
from autoplan.values.plain import FAMILIES, Family

_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}


def decode(hint: Any, data: Any, where: str) -> Any:
    """Return `data` as a value of type `hint`; `where` names it in errors."""
    if hint in FAMILIES:
        return _decode_member(FAMILIES[hint], data, where)
    if is_dataclass(hint):
        return _decode_fields(hint, data, where)
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        if data is None and NoneType in get_args(hint):
            return None
        (only,) = [choice for choice in get_args(hint) if choice is not NoneType]  # values have no other unions
        return decode(only, data, where)
    if origin is tuple:
        return _decode_tuple(get_args(hint), data, where)
    if origin is Literal:
        choices = get_args(hint)
        return data if data in choices else _refuse(where, f"one of {', '.join(map(str, choices))}", data)
    if origin is dict:
        if not isinstance(data, dict):
            return _refuse(where, "a mapping", data)
        return {key: decode(get_args(hint)[1], value, f"{where}.{key}") for key, value in data.items()}
    if hint is Any:
        return _freeze(data)
    if hint is float and type(data) is int:
        return float(data)
    return data if type(data) is hint else _refuse(where, _NAMES[hint], data)


def _decode_member(family: Family, data: Any, where: str) -> Any:
    """Return a member of a closed set of classes; `family.key` names the class."""
    key, kinds = family.key, family.members
    name = data.get(key) if isinstance(data, dict) else None
    if not isinstance(name, str):
        return _refuse(where, f"the {family.noun} as {{{key}: its name, …}}", data)
    if name not in kinds:
        hint = suggestion(name, kinds, f"known are {', '.join(kinds)}")
        raise PlanFileError(f"{where}.{key}: there is no {family.noun} {name!r}", hint=hint)
    return _decode_fields(kinds[name], {other: value for other, value in data.items() if other != key}, where)


_hints = cache(get_type_hints)


def _decode_fields(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        return _refuse(where, f"the keys of {cls.__name__.lower()}", data)
    by_name = {field.name: field for field in fields(cls)}
    for key in data:
        if key not in by_name:
            hint = suggestion(str(key), by_name, f"the keys here are {', '.join(by_name)}")
            raise PlanFileError(f"{where}: unknown key {str(key)!r}", hint=hint)
    for name, field in by_name.items():
        if name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise PlanFileError(f"{where}: key {name!r} is missing", hint="add it, or make the plan again")
    hints = _hints(cls)
    return cls(**{key: decode(hints[key], value, f"{where}.{key}") for key, value in data.items()})


def _decode_tuple(items: tuple[Any, ...], data: Any, where: str) -> Any:
    if not isinstance(data, list):
        return _refuse(where, "a list", data)
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(decode(items[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if len(items) != len(data):
        return _refuse(where, f"a list of {len(items)}", data)
    pairs = enumerate(zip(items, data, strict=True))
    return tuple(decode(hint, item, f"{where}[{i}]") for i, (hint, item) in pairs)


def _freeze(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_freeze(item) for item in data)
    return {key: _freeze(value) for key, value in data.items()} if isinstance(data, dict) else data


def _refuse(where: str, wanted: str, data: Any) -> Any:
    shown = repr(data) if len(repr(data)) <= 40 else repr(data)[:37] + "..."
    raise PlanFileError(f"{where}: expected {wanted}, found {shown}", hint="fix it, or make the plan again")


# Consistency of a plan by itself: patterns are paths, layouts and numbers fit its number of ranks.


def inconsistencies(plan: Plan, *, sizes: bool = True) -> Iterator[str]:
    """Yield one line for each inconsistency in a plan, with its place. `sizes`: compare layouts with shapes too."""
    made_for = plan.made_for.sizes if sizes else ()
    for number, rule in enumerate(plan.runtime.parameters):
        where = f"runtime.parameters[{number}]"
        yield from _of_pattern(where, rule.pattern)
        for cut, ranks in ((rule, plan.cut_over), (rule.read, plan.cp_size)):
            yield from _of_layout(f"{where}.layout", cut.layout if cut is not None else None, ranks)
            if cut is not None and (cut.dim is None) != (cut.layout is None):
                yield f"{where}: a cut needs both a dim and a layout"
        if rule.dim is None or rule.layout is None:
            continue
        for size in made_for:
            if size.pattern == rule.pattern:
                yield from _of_shapes(f"{where} ({rule.pattern})", rule.dim, rule.layout, size.shapes)
    sizes_over = {"": plan.cut_over, "cp": plan.cp_size, "all": plan.ranks}
    for number, done in enumerate(plan.runtime.instructions):
        where, over = f"runtime.instructions[{number}]", sizes_over[done.over]
        yield from _of_pattern(where, done.pattern)
        for layout in done.layouts():
            yield from _of_layout(f"{where}.layout", layout, over)
        if problem := done.problem(over):
            yield f"{where} ({type(done).__name__} at {done.pattern or 'the model'}): {problem}"


def _of_pattern(where: str, pattern: str) -> Iterator[str]:
    """Yield the problem of a pattern that is no dotted path. The model itself is ""."""
    if pattern and not (all(pattern.split(".")) and pattern == pattern.strip() and matches(pattern, pattern)):
        yield f"{where}.pattern: {pattern!r} is not a dotted path"


def _of_layout(where: str, text: str | None, ranks: int) -> Iterator[str]:
    try:
        layout = Layout.parse(text or "1")
    except AutoplanError as error:
        yield f"{where}: {error.message}"
        return
    for part in _over_groups(layout):
        pieces, stride = part.split or (1, 1)
        if ranks % (pieces * stride):
            yield f"{where}: {text!r} shards {part} over groups of ranks, but {ranks} ranks do not form such groups"


def _over_groups(layout: Layout) -> Iterator[Layout]:
    if layout.split is not None and layout.split[0]:
        yield layout
    for part in layout.parts:
        yield from _over_groups(part)


def _of_shapes(where: str, dim: int, text: str, shapes: tuple[tuple[int, ...], ...]) -> Iterator[str]:
    try:
        size = Layout.parse(text).size
    except AutoplanError:  # reported already
        return
    for shape in shapes:
        if not -len(shape) <= dim < len(shape):
            yield f"{where}: the parameter of shape {list(shape)} has no dim {dim}"
        elif shape[dim] != size:
            yield f"{where}: layout {text!r} is for {size} rows, but dim {dim} of the parameter has {shape[dim]}"


# Check that plain values have the types that their reader expects. A shape looks like what it describes: `str`;
# `[str]`; `{"*": int}`, any keys; `{"flow!": str}`, "!" marks required keys, other keys pass; a tuple of alternatives.


def misshapen(value: Any, shape: Any, where: str = "") -> str:
    """Return what is wrong with the first value that does not fit its shape, and where; "" if all fit.

    >>> misshapen({"where": ["a", 1]}, {"where": [str]})
    'where[1] must be text, not 1'
    >>> misshapen({}, {"flow!": str})
    "missing key 'flow'"
    """
    if isinstance(shape, tuple):
        results = [misshapen(value, option, where) for option in shape]
        deeper = [problem for option, problem in zip(shape, results, strict=True) if _is_kind(value, option)]
        return "" if "" in results else deeper[0] if deeper else _wrong(value, shape, where)
    if not _is_kind(value, shape):
        return _wrong(value, shape, where)
    if isinstance(shape, list):
        problems = (misshapen(item, shape[0], f"{where}[{number}]") for number, item in enumerate(value))
        return next(filter(None, problems), "")
    if not isinstance(shape, dict):
        return ""
    if missing := next((key[:-1] for key in shape if key.endswith("!") and key[:-1] not in value), ""):
        return f"{where + ': ' if where else ''}missing key {missing!r}"
    shapes = {key.removesuffix("!"): inner for key, inner in shape.items()}
    problems = (
        misshapen(item, shapes.get(key, shapes.get("*")), f"{where}.{key}" if where else key)
        for key, item in value.items()
        if key in shapes or "*" in shapes
    )
    return next(filter(None, problems), "")


def _is_kind(value: Any, shape: Any) -> bool:
    kind = type(shape) if isinstance(shape, (list, dict)) else shape
    if kind is object:
        return True
    if isinstance(value, bool):
        return kind is bool
    if kind is dict:
        return isinstance(value, Mapping)
    return isinstance(value, (list, tuple) if kind is list else kind) or (kind is float and isinstance(value, int))


def _wrong(value: Any, shape: Any, where: str) -> str:
    wanted = " or ".join(dict.fromkeys(map(_name, shape if isinstance(shape, tuple) else (shape,))))
    shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
    return f"{where or 'the top'} must be {wanted}, not {shown}"


def _name(shape: Any) -> str:
    if isinstance(shape, list):
        return "a list"
    return "a mapping" if isinstance(shape, dict) else _NAMES[shape]

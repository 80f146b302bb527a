"""Do plain values have the kinds that their reader expects? Asked once, before anything reads them.

A shape is written as what it describes: `str`; `[str]`, a list of text; `{"*": int}`, a mapping with any keys;
`{"flow!": str, "where": [str]}`, a mapping in which the marked keys must be there (keys that are not named are the
reader's business); a tuple says that one of several will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES: dict[type, str] = {
    type(None): "null",
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def misshapen(value: Any, shape: Any, where: str = "") -> str:
    """What the first value is that has another kind than the shape says, and where; "" if there is none.

    >>> misshapen({"where": ["a", 1]}, {"where": [str]})
    'where[1] must be text, not 1'
    >>> misshapen({}, {"flow!": str})
    "the key 'flow' is missing"
    """
    if isinstance(shape, tuple):
        found = [misshapen(value, one, where) for one in shape]
        deeper = [problem for one, problem in zip(shape, found, strict=True) if _is_kind(value, one)]
        return "" if "" in found else deeper[0] if deeper else _wrong(value, shape, where)
    if not _is_kind(value, shape):
        return _wrong(value, shape, where)
    if isinstance(shape, list):
        problems = (misshapen(item, shape[0], f"{where}[{number}]") for number, item in enumerate(value))
        return next(filter(None, problems), "")
    if isinstance(shape, dict):
        return _misshapen_mapping(value, shape, where)
    return ""


def _misshapen_mapping(value: Mapping[str, Any], shape: dict[str, Any], where: str) -> str:
    prefix = f"{where}." if where else ""
    if missing := next((key[:-1] for key in shape if key.endswith("!") and key[:-1] not in value), ""):
        return f"{where + ': ' if where else ''}the key {missing!r} is missing"
    shapes = {key.removesuffix("!"): one for key, one in shape.items()}
    problems = (
        misshapen(item, shapes.get(key, shapes.get("*")), f"{prefix}{key}")
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

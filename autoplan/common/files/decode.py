"""Plain data back into frozen values, checked against their type hints.

Files are written by people and programs that get things wrong. Reading them through the dataclasses' own annotations
keeps one description of the format (`autoplan.values`), and lets every error name the exact place: `entries[3].units`.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from autoplan.common.errors import PlanFileError
from autoplan.common.patterns import nearest
from autoplan.values.plain import FAMILIES, Family

_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}


def decode(hint: Any, data: Any, where: str) -> Any:
    """`data` as a value of type `hint`; `where` names it in errors."""
    if hint in FAMILIES:
        return _decode_member(FAMILIES[hint], data, where)
    if is_dataclass(hint):
        return _decode_fields(hint, data, where)
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _decode_union(get_args(hint), data, where)
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
    """One of a closed set of classes; `family.key` names which."""
    key, kinds = family.key, family.members
    name = data.get(key) if isinstance(data, dict) else None
    if not isinstance(name, str):
        return _refuse(where, f"the {family.noun} as {{{key}: its name, …}}", data)
    if name not in kinds:
        close = nearest(name, kinds, count=1)
        raise PlanFileError(
            f"{where}.{key}: there is no {family.noun} {name!r}",
            hint=f"did you mean {close[0]!r}?" if close else f"known are {', '.join(kinds)}",
        )
    return _decode_fields(kinds[name], {other: value for other, value in data.items() if other != key}, where)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _decode_fields(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        return _refuse(where, f"the keys of {cls.__name__.lower()}", data)
    known = {field.name: field for field in fields(cls)}
    for key in data:
        if key not in known:
            close = nearest(str(key), known, count=1)
            raise PlanFileError(
                f"{where}: unknown key {str(key)!r}",
                hint=f"did you mean {close[0]!r}?" if close else f"the keys here are {', '.join(known)}",
            )
    for name, field in known.items():
        if name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise PlanFileError(f"{where}: key {name!r} is missing", hint="add it, or make the plan again")
    hints = _hints(cls)
    return cls(**{key: decode(hints[key], value, f"{where}.{key}") for key, value in data.items()})


def _decode_union(choices: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and NoneType in choices:
        return None
    (only,) = [choice for choice in choices if choice is not NoneType]  # values have no other unions
    return decode(only, data, where)


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

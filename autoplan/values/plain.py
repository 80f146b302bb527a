"""Frozen values as dicts, lists, text and numbers: the only form in which anything leaves the process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from math import isfinite
from typing import Any

from autoplan.values.estimate import Cost
from autoplan.values.instructions.base import INSTRUCTIONS, Instruction
from autoplan.values.instructions.modules import Capabilities
from autoplan.values.reasons import REASONS, Reason

_TERSE = (Cost,)  # always brief: most of their fields apply to one kind only


@dataclass(frozen=True)
class Family:
    """A closed set of classes. In files the `key` of each member names its class; `noun` is for messages."""

    key: str
    noun: str
    members: Mapping[str, type]


FAMILIES: dict[Any, Family] = {
    Instruction: Family("do", "instruction", INSTRUCTIONS),
    Reason: Family("kind", "reason", REASONS),
}


def plain(value: Any, *, brief: bool = False) -> Any:
    """Return a value as plain data; `brief` leaves out fields that have their default value. An instruction has its
    class: {"do": "AllReduce", …}; a reason too: {"kind": "DoesNotDivide", …}."""
    if isinstance(value, Capabilities):  # modules are keyed by their likeness there
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        kind = {family.key: type(value).__name__ for base, family in FAMILIES.items() if isinstance(value, base)}
        brief = brief or isinstance(value, _TERSE)
        return kind | {
            field.name: plain(getattr(value, field.name), brief=brief)
            for field in fields(value)
            if not (brief and getattr(value, field.name) == _default(field))
        }
    if isinstance(value, tuple):
        return [plain(item, brief=brief) for item in value]
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value), f"keys in files must be text, not {list(value)}"
        return {key: plain(item, brief=brief) for key, item in value.items()}
    # A list would be read back as a tuple and a tensor not at all, so such a value must not get here.
    assert value is None or isinstance(value, (str, int, float, bool)), f"{value!r} cannot be written to a file"
    return value


def finite(data: Any) -> Any:
    """Return plain data with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not isfinite(data) else data


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default

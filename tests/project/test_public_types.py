"""Who builds on autoplan can name every type that its public calls take or give, and is told of replaced names."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
import typing
import warnings
from collections import abc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

import autoplan
from autoplan.deprecated import Renamed, successor

NAMES = {
    "Callable": abc.Callable,
    "nn": nn,
    "torch": torch,
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "OffloadPolicy": OffloadPolicy,
}


def hints(value: Any) -> Iterator[tuple[str, Any]]:
    """What a public function takes and gives; what the fields and methods of a public class are."""
    if inspect.isfunction(value):
        yield from typing.get_type_hints(value, localns=NAMES).items()
    elif inspect.isclass(value):
        if dataclasses.is_dataclass(value):
            shown = {field.name for field in dataclasses.fields(value) if field.repr}  # others are for the house
            found = typing.get_type_hints(value, localns=NAMES)
            yield from ((key, hint) for key, hint in found.items() if key in shown)
        for name, method in inspect.getmembers(value, inspect.isfunction):
            if not name.startswith("_") and method.__module__.startswith("autoplan"):
                yield from (
                    (f"{name}.{key}", hint) for key, hint in typing.get_type_hints(method, localns=NAMES).items()
                )


def classes(hint: Any) -> Iterator[type]:
    if isinstance(hint, type):
        yield hint
    for part in typing.get_args(hint):
        yield from classes(part)


def test_public_types_import_from_the_package() -> None:
    """All that calls take or give, but for what plans are made of (`autoplan.values`) and what stays in a room."""
    missing = set()
    for name in autoplan.__all__:
        value = getattr(autoplan, name)
        for where, hint in hints(value):
            for kind in classes(hint):
                inside = room(kind) == "values" or (inspect.isclass(value) and room(kind) == room(value))
                ours = kind.__module__.startswith("autoplan.")
                if ours and not inside and getattr(autoplan, kind.__name__, None) is not kind:
                    missing.add(f"{name}.{where}: {kind.__module__}.{kind.__qualname__}")
    assert not missing


def room(kind: type) -> str:
    return kind.__module__.split(".")[1] if kind.__module__.startswith("autoplan.") else ""


def test_every_public_name_is_there() -> None:
    assert all(getattr(autoplan, name) is not None for name in autoplan.__all__)
    assert list(autoplan.__all__) == sorted(autoplan.__all__, key=lambda name: (not name[0].isupper(), name))


def test_a_type_checker_sees_them() -> None:
    """The package says that it is typed, and its stub exports every public name, as `import name as name` does."""
    stub = ast.parse(Path(autoplan.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    aliases = [alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert [alias.asname for alias in aliases] == [alias.name for alias in aliases]
    assert {alias.name for alias in aliases} == set(autoplan.__all__)
    script = "import autoplan, sys; autoplan.PlanMismatchError; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_replaced_names_work_and_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(autoplan._RENAMED, "read_plan", Renamed("load_plan", "0.2", "0.4"))
    with pytest.warns(DeprecationWarning, match=r"autoplan.read_plan was renamed autoplan.load_plan in 0.2.*0.4"):
        assert autoplan.read_plan is autoplan.load_plan  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert successor("load_plan", autoplan._RENAMED) is None and autoplan.load_plan
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        autoplan.nothing  # type: ignore[attr-defined]  # noqa: B018

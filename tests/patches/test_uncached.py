"""Cached functions run uncached while a model is recorded, wherever and whenever they were made."""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import pytest
from torch import nn

from autoplan.patches.classes import code_lies_open


def test_functions_that_come_later_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are searched once: again when they are new or have other names, while names are replaced too."""
    module, calls = ModuleType("of_a_user"), list[int]()
    with code_lies_open(nn.Identity()):
        pass
    module.first = functools.cache(calls.append)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def twice(number: int) -> list[int]:
        calls.clear()
        for _ in range(2):
            module.first(number)
            if hasattr(module, "second"):
                module.second(-number)
        return list(calls)

    with code_lies_open(nn.Identity()):
        assert twice(1) == [1, 1]
        module.second = functools.cache(calls.append)  # type: ignore[attr-defined]
        with code_lies_open(nn.Identity()):
            pass
    with code_lies_open(nn.Identity()):
        assert twice(2) == [2, -2, 2, -2]
    assert twice(3) == [3, -3]

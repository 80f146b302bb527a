"""Cases of a parametrised test of which few are quick: the others are slow tests. Used by tests of several rooms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["slow_but"]


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """All cases; those that are not quick wait for `make test-all`.

    >>> [one if isinstance(one, str) else one.values for one in slow_but(["a", "b"], "b")]
    [('a',), 'b']
    """
    cases = list(cases)
    assert set(quick) <= set(cases), "a quick case is not there"
    return [one if one in quick else pytest.param(one, marks=pytest.mark.slow) for one in cases]

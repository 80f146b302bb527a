"""Cases of a parametrised test of which few are quick: the others are slow or long. Used by tests of several rooms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["marked", "slow_but"]


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """All cases; those that are not quick wait for `make test-all`.

    >>> [one if isinstance(one, str) else one.values for one in slow_but(["a", "b"], "b")]
    [('a',), 'b']
    """
    cases = list(cases)
    assert set(quick) <= set(cases), "a quick case is not there"
    return [one if one in quick else pytest.param(one, marks=pytest.mark.slow) for one in cases]


def marked(cases: Iterable[Any], *, long: Iterable[Any] = (), slow: Iterable[Any] = ()) -> list[Any]:
    """All cases in their order. Those of `long` wait for `make test-long`, those of `slow` for `make test-all`.

    >>> [one if isinstance(one, tuple) and not hasattr(one, "marks") else one.values for one in marked([(1, "a")])]
    [(1, 'a')]
    """
    cases, marks = list(cases), dict.fromkeys(long, pytest.mark.long) | dict.fromkeys(slow, pytest.mark.slow)
    assert marks.keys() <= set(cases), "a case with a mark is not there"
    values = {one: one if isinstance(one, tuple) else (one,) for one in marks}
    return [pytest.param(*values[one], marks=marks[one]) if one in marks else one for one in cases]

"""Loops whose rounds do the same: run as they are, or counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autoplan.common.stages import Round, counted, run_rounds


@pytest.mark.parametrize("rows", [2, 6, 7])
def test_a_counter_is_given_the_rounds_that_are_alike(rows: int) -> None:
    done: list[slice] = []
    given: list[slice] = []

    def count(work: Round, parts: Sequence[slice]) -> None:
        given.extend(parts)
        work(parts[0])

    parts = [slice(at, min(at + 2, rows)) for at in range(0, rows, 2)]
    run_rounds(done.append, parts)
    assert done == parts
    done.clear()
    with counted(count):
        run_rounds(done.append, parts)
    assert given == (parts[:-1] if len(parts) > 2 else [])
    assert done == ([parts[0], parts[-1]] if len(parts) > 2 else parts)

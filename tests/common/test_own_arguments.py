"""An argument that a call may fill is the call's own."""

from __future__ import annotations

import torch

from autoplan.common.nested import own_argument


class Cache:
    def __init__(self) -> None:
        self.rows: dict[int, list[torch.Tensor]] = {0: [torch.zeros(2)]}


class Stubborn(Cache):
    def __deepcopy__(self, memo: object) -> None:
        raise TypeError


def test_a_cache_is_copied_with_its_tensors_changed() -> None:
    cache = Cache()
    made = own_argument(cache, lambda value: value + 1)
    made.rows[0].append(torch.ones(2))
    assert len(cache.rows[0]) == 1 and not cache.rows[0][0].any()
    assert made.rows[0][0].eq(1).all()


def test_what_is_no_state_or_cannot_be_copied_stays_itself() -> None:
    for value in (torch.relu, Cache, "word", None, Stubborn()):
        assert own_argument(value, lambda one: one) is value

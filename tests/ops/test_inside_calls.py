"""Calls written by hand, for what torch's op database has no sample of: each is exact on shares, or its axis whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_law import judge
from op_samples import Case, case_of
from torch.nn import functional as F


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def indices(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(most))


def bag(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return F.embedding_bag(places, table, mode="sum")


def mean_by_hand(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1) / x.shape[-1]


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int, str]] = {
    # what is called, its arguments, the dim under test, what becomes of it
    "its length is told": (torch.repeat_interleave, (numbers(3, 6), 2), {"dim": 1, "output_size": 12}, 1, "exact"),
    "its groups are told": (
        F.conv_transpose3d, (numbers(2, 4, 3, 3, 3), numbers(4, 3, 2, 2, 2)), {"groups": 4}, 1, "exact"
    ),
    "a linear of four dims": (
        F.linear, (numbers(2, 3, 2, 6).transpose(1, 2), numbers(5, 6), numbers(5)), {}, 3, ""
    ),
    "attention in five dims": (F.scaled_dot_product_attention, (numbers(2, 2, 1, 4, 6),) * 3, {}, 1, ""),
    "attention of one head": (F.scaled_dot_product_attention, (numbers(2, 2, 1, 4, 6),) * 3, {}, 0, ""),
    "attention over a cut width": (F.scaled_dot_product_attention, (numbers(2, 3, 4, 6),) * 3, {}, 3, ""),
    "rows of bags": (bag, (numbers(8, 6), indices(8, 4, 3)), {}, 0, ""),
    "widths of bags": (bag, (numbers(8, 6), indices(8, 4, 3)), {}, 1, ""),
    "a mean by hand": (mean_by_hand, (numbers(3, 6),), {}, 1, ""),
    "three factors": (torch.einsum, ("ab,ab,bc->ac", numbers(3, 6), numbers(3, 6), numbers(6, 4)), {}, 1, ""),
    "a product of three": (torch.linalg.multi_dot, ([numbers(3, 6), numbers(6, 4), numbers(4, 2)],), {}, 1, ""),
    "a mean square": (F.mse_loss, (numbers(3, 6), numbers(3, 6)), {}, 1, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_exact_on_shares_or_its_axis_is_whole(name: str) -> None:
    function, args, kwargs, dim, expected = CALLS[name]
    for number in range(3):  # the other tensors are buffers, parameters, and come from linears
        apart = tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)
        case = case_of(name, function, apart, kwargs, dim, number)
        assert isinstance(case, Case), case
        outcome = judge(case)
        known = expected if number == 0 else ""  # what else is cut, or is input, may decide
        assert outcome.kind in ((known,) if known else ("exact", "gathered", "whole")), (str(case), outcome)

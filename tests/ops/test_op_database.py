"""Ops of torch's own op database between linears: split they are exact, or a dim stays whole and the plan says why.

Here each op that has a usable sample comes once, with another of its samples and dims as its number in the database
says, and only every tenth op: the rest are for tests/benchmarks/op_database.py. `MENDED` are samples on which a
plan was wrong once, with the reason that is now given, or exact.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from op_law import BROKEN, Outcome, judge
from op_samples import Case, Unusable, cases, database, name_of, usable_samples

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on ops that may still change
EVERY = 10

# op, sample, dim: what the plan was wrong about.
MENDED = {
    "a loss averaged over classes that torch counts itself": ("nn.functional.multilabel_soft_margin_loss", 0, 0),
    "a covariance, whose mean is taken off inside the call": ("cov", 0, 0),
    "a loss averaged over the positions that have a target": ("nn.functional.cross_entropy", 0, 0),
    "lengths and a sum of products within one call": ("nn.functional.cosine_similarity", 0, 1),
    "a norm that gives its statistics, too": ("native_layer_norm", 2, 2),
    "a softmax after a product within one call": ("nn.functional.linear_cross_entropy", 1, 1),
    "sizes taken from a value that is whole": ("reshape_as", 1, 1),
    "a value stretched to the size of another": ("expand_as", 0, 0),
    "values stretched to each other's sizes": ("broadcast_tensors", 0, 0),
    "values stretched over a grid": ("meshgrid.variadic_tensors", 9, 0),
    "sizes that a sum leaves": ("sum_to_size", 15, 0),
    "sizes of a view that is a copy": ("view_copy", 0, 0),
    "sizes to stretch to, of a copy": ("expand_copy", 0, 0),
    "a list of positions that looks like several numbers": ("__getitem__", 0, 1),
    "a product of something with itself": ("cov", 39, 0),
    "a source that is read in order, by a mask": ("masked_scatter", 0, 1),
    "statistics without running ones": ("_native_batch_norm_legit", 7, 2),
    "statistics that are always taken": ("_batch_norm_with_update", 0, 0),
    "values that a call hands on untouched beside others": ("atleast_1d", 5, 0),
    "a value whose size alone is looked at": ("diff", 22, 1),
    "channels that are the sides of one pixel's square": ("nn.functional.pixel_shuffle", 1, 1),
    "a square matrix that is only copied": ("linalg.matrix_power", 12, 1),
    "as many columns as a row is long": ("linalg.vander", 2, 0),
    "the same for several rows": ("linalg.vander", 6, 1),
    "random numbers drawn in the middle of a call": ("nn.functional.rrelu", 0, 0),
}


@functools.cache
def ops() -> dict[str, Any]:
    return {name_of(op): op for op in database()}


def judged(name: str, number: int, dim: int) -> Outcome:
    (case,) = (
        case
        for case in cases(ops()[name], lambda n, d, _: (n, d) == (number, dim))
        if isinstance(case, Case) or case.number == number
    )
    return judge(case)


@pytest.mark.parametrize("mended", MENDED)
def test_what_was_wrong_is_exact_or_whole(mended: str) -> None:
    if MENDED[mended][0] not in ops():
        pytest.skip(f"torch {torch.__version__} has no {MENDED[mended][0]}")
    outcome = judged(*MENDED[mended])
    assert outcome.kind in ("exact", "gathered", "whole"), outcome.reason


@pytest.mark.long
@pytest.mark.parametrize("turn", range(4))
def test_ops_of_the_database_are_exact_or_whole(turn: int) -> None:
    broken, seen = [], 0
    for place, op in enumerate(database()):
        if place % EVERY or place // EVERY % 4 != turn:
            continue
        case = one_case(op, place // EVERY)
        if isinstance(case, Case):
            outcome = judge(case)
            seen += outcome.kind in ("exact", "gathered", "whole")
            if outcome.kind in BROKEN:
                broken.append(f"{outcome.kind}: {case}: {outcome.reason}")
    assert not broken, "\n".join(broken)
    assert seen > 10


def one_case(op: Any, turn: int) -> Case | Unusable | None:
    """The turn-th of an op's samples and dims, counted round."""
    numbers = usable_samples(op)[:3]
    if not numbers:
        return None
    number = numbers[turn % len(numbers)]
    found = [case for case in cases(op, lambda n, *_: n == number) if case.number == number]
    return found[turn % len(found)]


def test_the_law_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were nobody to look at what a call does inside itself, results would be wrong, and said to be."""
    monkeypatch.setattr("autoplan.analyse.placement.call_instructions.why_no_partial_sum", lambda *_: "")
    assert judged(*MENDED["a loss averaged over classes that torch counts itself"]).kind == "wrong"


def test_a_sample_that_cannot_be_used_says_why() -> None:
    assert {case.reason for case in cases(ops()["eye"])} == {"it takes no tensor"}
    reasons = {case.reason for case in cases(ops()["linalg.solve"], lambda *_: False) if isinstance(case, Unusable)}
    assert "one of its tensors is empty" in reasons

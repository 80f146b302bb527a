"""Laws of instructions: each class is carried out by one executor, and says of itself all that others tell of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from example_instructions import example_of
from torch import nn

import autoplan.execute.hooks.install  # noqa: F401 - registers all executors
from autoplan.common.errors import AutoplanError
from autoplan.common.layout import Layout
from autoplan.decide.written_plans.plan_file import plan_from_dict, plan_to_dict
from autoplan.execute.executors import EXECUTORS, At, execute, executes
from autoplan.values import (
    INSTRUCTIONS,
    Boundary,
    Collective,
    Cost,
    Instruction,
    Move,
    Plan,
    Runtime,
    Spread,
    instruction,
)


def unfinished(kind: type[Instruction]) -> Iterator[str]:
    """What a class lacks, in words that name it."""
    name, example = kind.__name__, example_of(kind)
    if kind not in EXECUTORS:
        yield f"{name} has no executor"
    if "\n" in example.said(2) or example.pattern not in example.said(2):
        yield f"{name} is not explained in a line"
    if not isinstance(kind.cost, Cost | None) or not all(isinstance(move, Move) for move in example.moves):
        yield f"{name} does not say what it costs and moves"
    if bool(example.beyond_styles()) == kind.in_styles:
        yield f"{name} is not decided on for exports"
    if not isinstance(kind.takes, Spread) or not isinstance(kind.gives, Spread):
        yield f"{name} does not say how values lie on ranks"
    if any(not Layout.parse(layout) for layout in example.layouts()) or example.problem(2):
        yield f"{name} finds a fault with its own example: {example.problem(2)}"
    plan = Plan("m", 2, runtime=Runtime(instructions=(example,)))
    if plan_from_dict(plan_to_dict(plan)) != plan:
        yield f"{name} does not come back from a plan file"


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_a_class_is_install_explained_costed_saved_and_exported(name: str) -> None:
    assert not list(unfinished(INSTRUCTIONS[name]))


def test_nothing_is_install_that_is_no_instruction() -> None:
    assert set(EXECUTORS) == set(INSTRUCTIONS.values())


def test_a_value_that_moves_lies_otherwise_afterwards() -> None:
    """Partial values become sums by a collective, and nothing else does."""
    for kind in INSTRUCTIONS.values():
        sums = {move.collective for move in kind.collectives if not move.backward} - {Collective.ALL_GATHER}
        if issubclass(kind, Boundary) and kind.takes is Spread.PARTIAL and kind.gives is not Spread.PARTIAL:
            assert sums or kind.__name__ == "WithholdPartial", kind  # which leaves it to the branch that joins


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Classes that a test adds are forgotten after it."""
    known = dict(INSTRUCTIONS)
    yield
    INSTRUCTIONS.clear()
    INSTRUCTIONS.update(known)


def test_a_class_that_leaves_something_unsaid_is_refused_by_name(forgotten: None) -> None:
    class HalfDone(Boundary):
        takes = Spread.PARTIAL
        says = "{what} is halved"

    with pytest.raises(TypeError, match="HalfDone lacks `gives`, `cost`, `collectives`, a docstring"):
        instruction(HalfDone)


def test_a_class_without_executor_fails_by_name(forgotten: None) -> None:
    @instruction
    class NobodysWork(Boundary):
        """Nothing."""

        takes = gives = Spread.REPLICATE
        says, cost, collectives = "nothing is done to {what}", None, ()

    assert list(unfinished(NobodysWork)) == ["NobodysWork has no executor"]
    with pytest.raises(AutoplanError, match="no executor for NobodysWork"):
        execute(NobodysWork("a", "input", ()), At(nn.Identity(), "a", (), None))  # type: ignore[arg-type]


def test_a_second_executor_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="AllReduce already has an executor"):
        executes(INSTRUCTIONS["AllReduce"])(lambda planned, at: torch.neg)

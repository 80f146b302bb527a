"""Reasons are values: each has its numbers, one text, and the name by which files know it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from autoplan.common.files.decode import decode
from autoplan.values import ParameterFact, Replicated
from autoplan.values.plain import plain
from autoplan.values.reasons import REASONS, DoesNotDivide, GradientSummed, OfDim, Reason, ResidualStream, sentence


def example(kind: type[Reason]) -> Reason:
    """One of a kind, with something in each of its fields."""
    values: dict[Any, Any] = {int: 7, bool: True, str: "some text", tuple[str, ...]: ("norm", "softmax")}
    values |= {
        str | None: "a module",
        float: 2,
        int | None: 1,
        Reason: ResidualStream(),
        Reason | None: DoesNotDivide(5, 2),
    }
    hints = get_type_hints(kind)
    chosen = {name: get_args(hint)[0] for name, hint in hints.items() if get_origin(hint) is Literal}
    return kind(**{field.name: chosen.get(field.name) or values[hints[field.name]] for field in fields(kind)})


@pytest.mark.parametrize("name", REASONS)
def test_every_reason_has_a_text_of_its_own_and_comes_back_from_a_file(name: str) -> None:
    reason = example(REASONS[name])
    assert str(reason) and str(reason) != repr(reason)
    assert {"says", "__str__"} & vars(type(reason)).keys()
    hints = get_type_hints(type(reason))
    closed = any(get_origin(hint) is Literal for hint in hints.values())  # each of its words says what belongs to it
    for field in () if closed else fields(reason):
        value = getattr(reason, field.name)
        if type(value) in (int, str):
            assert str(value) in str(reason), f"{field.name} is not said"
    written = plain(reason)
    assert written["kind"] == name
    assert decode(Reason, written, "x") == reason
    with pytest.raises((FrozenInstanceError, TypeError)):
        reason.anything = 1  # type: ignore[attr-defined]


def test_the_set_is_closed() -> None:
    assert set(REASONS.values()) == set(Reason.__subclasses__())
    assert len({str(example(kind)) for kind in REASONS.values()}) == len(REASONS), "two reasons read the same"


def test_several_are_said_once_each() -> None:
    why = (OfDim(0, 5, DoesNotDivide(5, 2)), OfDim(0, 5, DoesNotDivide(5, 2)), GradientSummed())
    assert sentence(why) == "dim 0 (5): 5 is not divisible by tp=2; its gradient is summed over ranks"
    assert ParameterFact(("w",), (5,), 20, why=why).reason == sentence(why)
    assert sentence(()) == ""


def test_people_get_text_where_a_whole_parameter_is_unpacked() -> None:
    why = (OfDim(0, 5, DoesNotDivide(5, 2)),)
    name, size, reason = Replicated("w", 20, sentence(why), ("router",), why)
    assert f"{name:>3} {size} {reason:<50}".split() == ["w", "20", *sentence(why).split()]

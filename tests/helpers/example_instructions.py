"""One instruction of each class, with every field filled."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from autoplan.values import Instruction, NormCall
from autoplan.values.reasons import OfDim, ReadAcross, Reason

__all__ = ["example_of", "filled"]


def example_of(kind: type[Instruction]) -> Instruction:
    """An instruction for two ranks."""
    two = {"held": (3, 4), "pieces": ((1, 2), (3,)), "per_rank": (7, 8), "experts": 4}
    given = {name: value for name, value in two.items() if name in {field.name for field in fields(kind)}}
    return filled(kind, **given)


def filled(hint: Any, **given: Any) -> Any:
    """Some value of a type that no field has by default, so that a field lost on the way is noticed."""
    if hint is Instruction:
        return example_of(NormCall)
    if hint is Reason:
        return OfDim(7, 7, ReadAcross(("softmax",)))
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        given |= {name: None for name, own in hints.items() if own == hint | None and name not in given}
        values = {field.name: filled(hints[field.name]) for field in fields(hint) if field.name not in given}
        if "layout" in values:
            values["layout"] = "8!*2"
        for per_rank in {"passed", "wanted"} & values.keys():
            values[per_rank] = (7, 7)
        if "ep_size" in values:
            values |= {"tp_size": 2, "ep_size": 2}
        if hints.get("shapes") == tuple[tuple[int, ...], ...]:  # of the parameter whose layout that is, along the dim 7
            values["shapes"] = ((16,) * 8,)
        return hint(**values | given)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is dict:
        return {"key": filled(arguments[1])}
    if origin is tuple:
        return tuple(filled(argument) for argument in arguments if argument is not Ellipsis)
    if origin is Literal:
        return arguments[-1]
    if arguments:  # a union with None
        return filled(arguments[0])
    return {str: "text: x", int: 7, bool: True, Any: ("a", 1, ("b", {"c": None}), 0.5, True)}[hint]

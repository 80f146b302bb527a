"""What a plan was made for, and whether a model is that: asked before anything of the model is changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from autoplan.common.code.forward_code import forward_code, same_code
from autoplan.common.consistent import inconsistencies
from autoplan.common.errors import PlanMismatchError
from autoplan.common.patterns import matches
from autoplan.common.requirements import installed_versions
from autoplan.execute.model_values import Reading
from autoplan.execute.quantised.rules import is_stored
from autoplan.values import CallRewrite, ForwardCode, MadeFor, Plan, Sizes, Version, replace
from autoplan.version import __version__

__all__ = ["check_fits", "made_anew", "made_with", "model_hash", "with_made_for"]

_SHOWN = 3
_DIGITS = 16


def with_made_for(plan: Plan, model: nn.Module) -> Plan:
    """The plan, saying that it was made for this model."""
    libraries = {"autoplan": __version__, **installed_versions()}
    versions = tuple(Version(library, version) for library, version in libraries.items())
    forwards = [
        ForwardCode(kind.__qualname__, forward_code(kind, places)) for kind, places in _rewritten(model, plan).items()
    ]
    cut = [rule.pattern for rule in plan.runtime.parameters if rule.dim is not None]
    shapes = _shapes(model)
    sizes = (Sizes(pattern, tuple(dict.fromkeys(_meant(pattern, shapes).values()))) for pattern in dict.fromkeys(cut))
    made_for = MadeFor(versions, tuple(forwards), tuple(one for one in sizes if one.shapes), model_hash(model))
    return replace(plan, made_for=made_for)


def model_hash(model: nn.Module) -> str:
    """A hash of the code of a model, and of all plain values that its classes, modules and config hold.

    A flag, a rate or a function steers code that no shape shows. Classes that wrap others, their code looked through,
    and the device, the dtype and the mode of the model are not in it.
    """
    reading = Reading(model)
    codes = sorted({forward_code(kind, ()) for kind in reading.kinds})
    values = {name: reading.module(module) for name, module in model.named_modules()}
    text = json.dumps([codes, reading.classes(), values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def check_fits(model: nn.Module, plan: Plan) -> None:
    """Raise unless the plan makes sense and was made for code and sizes like these."""
    apart = [*inconsistencies(plan), *_other_code(model, plan), *_other_sizes(model, plan)]
    if not apart:
        return
    more = f" (and {len(apart) - _SHOWN} more)" if len(apart) > _SHOWN else ""
    raise PlanMismatchError(
        f"the plan does not fit {type(model).__name__}: {'; '.join(apart[:_SHOWN])}{more} ({made_with(plan)})",
        hint=f"make it anew for this model: {made_anew(plan)}",
    )


def made_with(plan: Plan) -> str:
    """With which versions."""
    libraries = ", ".join(f"{one.library} {one.version}" for one in plan.made_for.versions)
    return f"it was made with {libraries or 'unknown versions'}"


def made_anew(plan: Plan) -> str:
    """The command that does it, and the line of Python."""
    size = f"--tp {plan.tp_size}" + (f" --ep {plan.ep_size}" if plan.ep_size > 1 else "")
    return (
        f"autoplan plan {plan.model} {size}{' --sequence-parallel' * plan.sequence_parallel} -o FILE, or in Python "
        f"autoplan.plan(model, {plan.tp_size}).save(FILE)"
    )


def _other_code(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Classes whose forward is not what it was. One that somebody derived from, or put in a wrapper's class, is."""
    known: dict[str, list[str]] = {}
    for one in plan.made_for.forwards:
        known.setdefault(one.class_name, []).append(one.code)
    for kind, places in _rewritten(model, plan).items() if known else ():
        named = next((base for base in kind.__mro__ if base.__qualname__ in known), None)
        if named is None:
            yield f"calls in the forward of {kind.__qualname__} are rewritten, which the plan was not made for"
        elif not any(same_code(code, forward_code(kind, places)) for code in known[named.__qualname__]):
            yield f"the code of {kind.__qualname__}.forward is another one, in which calls are rewritten by their place"


def _rewritten(model: nn.Module, plan: Plan) -> dict[type[nn.Module], set[str]]:
    """Classes some of whose own calls run otherwise, with the places of these calls."""
    calls = plan.runtime.of(CallRewrite)
    found: dict[type[nn.Module], set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False) if calls else ():
        for call in calls:
            if matches(call.pattern, name):
                found.setdefault(type(module), set()).add(call.site.place)
    return found


def _other_sizes(model: nn.Module, plan: Plan) -> Iterator[str]:
    shapes = _shapes(model) if plan.made_for.sizes else {}
    for sizes in plan.made_for.sizes:
        for name, shape in _meant(sizes.pattern, shapes).items():
            if shape not in sizes.shapes and not is_stored(name, shape, plan):
                planned = " or ".join(str(list(one)) for one in sizes.shapes)
                yield f"{name} has the shape {list(shape)}, where it was planned with {planned}"
                break


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    tensors: Iterable[tuple[str, torch.Tensor]] = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def _meant(pattern: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    if pattern in shapes:
        return {pattern: shapes[pattern]}
    return {name: shape for name, shape in shapes.items() if matches(pattern, name)}

"""What is verified in place of a model: a tiny clone with random weights, and calls that exercise it.

In double precision wherever that can be had, so that what differs is a bug and not rounding. Code that asks for single
precision inside is given double (`patches/seeding.py`); only what cannot be traced so is checked in single
precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autoplan.capture.called import call, calls_the_model
from autoplan.capture.capture import capture_any
from autoplan.capture.copies import copied
from autoplan.capture.dry_run import own
from autoplan.capture.feeding.other_paths import with_other_paths
from autoplan.check.ranks.common import KeptOutside
from autoplan.check.verify.subject import CANNOT_RUN
from autoplan.common.errors import AutoplanError
from autoplan.common.random_values import cast_numbers, inputs_in, randomise, tried_dtypes, working_dtype
from autoplan.hf.inputs.make import make_inputs
from autoplan.patches.seeding import Lifted

_OWN_CLONE = 3_000_000  # a module of so few parameters is verified itself


@dataclass(frozen=True)
class Clone:
    """What is verified: a tiny model, the calls to make, and the same calls with another batch and length.

    `planned`: the calls that its plan is made from, those of the others among them that take another way. `outside`:
    what a run changes in the modules of its code.
    """

    model: Any
    feeds: Mapping[str, Any]
    others: Mapping[str, Any]
    note: str
    planned: Mapping[str, Any]
    outside: tuple[str, ...] = ()
    ranks: tuple[int, int] | None = None  # those that its sizes were fitted to (`Source.ranks`)
    recorded: dict[str, Any] = field(default_factory=dict, compare=False)  # its run, once for every plan that is tried


def clone_of(source: Any) -> Clone:
    """A tiny model to verify: shrunk less where the smallest cannot be built or run."""
    refusal: AutoplanError | None = None
    for one in source.ever_larger():
        try:
            return _clone_at_size(one)
        except AutoplanError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _clone_at_size(source: Any) -> Clone:
    """In double precision, or in single where the model refuses that, or else in its own."""
    refusal = ""
    for dtype in tried_dtypes(source.module):
        model, note = _built(source, dtype)
        feeds = feeds_at(source, model, batch=2, length=10)
        try:
            with KeptOutside(model) as outside:
                lifted = _needs_lifting(model, feeds)
            if lifted and not _traced(source, model, feeds):
                raise TypeError("some of its paths can be traced in single precision only")
        except CANNOT_RUN as error:
            refusal = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"
            continue
        others = {} if source.inputs is not None else feeds_at(source, model, batch=3, length=12)
        if dtype != torch.float64:
            note += f"; in {str(dtype).removeprefix('torch.')}, because in others it does not run ({refusal})"
        unfamiliar = others if source.recipe is not None else {}
        planned = with_other_paths(model, feeds, unfamiliar).feeds
        return Clone(model, feeds, others, note, planned, outside.changed, source.ranks)
    raise AutoplanError(
        f"the tiny clone of {source.name} cannot run unsharded: {refusal}",
        hint="pass inputs= that the model accepts, and let its code take dtypes from its inputs or weights: clones "
        "compute in float64, float32 or the dtype of the model's own weights",
    )


def _traced(source: Any, model: Any, feeds: Mapping[str, Any]) -> bool:
    """Can all its paths be traced as they are, with nothing given double precision?"""
    if _calls(_made(source, model, 2, 10)) < len(calls_the_model(feeds)):
        return False
    try:
        capture_any(copied(model), dict(feeds))
    except AutoplanError:
        return False
    return True


def _needs_lifting(model: Any, feeds: Mapping[str, Any]) -> bool:
    """Does it run only where what asks for single precision is given double? Raises if it does not run even so."""
    lifted = False
    with torch.no_grad():
        for feed in feeds.values():
            try:
                call(copied(model), own(dict(feed)))
            except CANNOT_RUN:
                lifted = True
                with Lifted():
                    call(copied(model), own(dict(feed)))
    return lifted


def _built(source: Any, dtype: Any) -> tuple[Any, str]:
    given = source.given
    if given is not None and is_small_and_real(given):
        model = copied(given).cpu()
        cast_numbers(model, dtype)
        randomise(model)
        return model.eval(), "the model itself with random weights"
    model = source.tiny(dtype=dtype, experts="batched_mm")
    return model, f"a clone of {sum(parameter.numel() for parameter in model.parameters()):,} parameters"


def is_small_and_real(model: Any) -> bool:
    """Is it verified itself?"""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters) <= _OWN_CLONE and not any(p.is_meta for p in parameters)


def feeds_at(source: Any, model: Any, *, batch: int, length: int) -> dict[str, Any]:
    """The calls that exercise a clone of a source, in the clone's own dtype.

    Where a path does not run it is tried in single precision too, which models are written for.
    """
    made = _made(source, model, batch, length)
    if made.notes:
        probe = copied(model)
        cast_numbers(probe, torch.float32)
        made = max(made, _made(source, probe, batch, length), key=_calls)
    return inputs_in(working_dtype(model), made.feeds)


def _made(source: Any, model: Any, batch: int, length: int) -> Any:
    how: Any = {"inputs": source.inputs, "recipe": source.recipe, "batch": batch, "length": length}
    return make_inputs(model, model_type=source.model_type, **how)


def _calls(made: Any) -> int:
    return len(calls_the_model(made.feeds))

"""Example inputs: what to call a model with so that its forward runs and touches what there is to plan.

A *feed* is one way to call a model: keyword arguments for its forward, under a name. The text pass comes first;
models with several towers get one feed more per tower, because a text pass never touches a vision tower. Inputs are
real CPU tensors also for models on meta, ids are below the vocabulary and are no special tokens, no size is 1, and
the same arguments give the same numbers without touching any global random state.

Where the inputs come from, first that applies: the user's; a transformers config (`from_config.py`); the
forward's own signature and code (`capture/derive_inputs.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from autoplan.capture.derive_inputs import Recipe, derive
from autoplan.capture.feeding.wants import SIZES
from autoplan.common.errors import CaptureError
from autoplan.hf.inputs.from_config import make_feeds


@dataclass(frozen=True)
class Feeds:
    """Feed name -> keyword arguments, and a note for each feed that could not be made.

    `others`: the same calls in other sizes, where it is known that they may change: paths that depend on sizes show.
    """

    feeds: dict[str, dict[str, Any]]
    notes: tuple[str, ...] = ()
    others: Mapping[str, dict[str, Any]] = field(default_factory=dict)


def feeds_for(
    model: nn.Module,
    *,
    config: PretrainedConfig | None = None,
    model_type: str = "",
    inputs: Mapping[str, Any] | None = None,
    batch: int = 2,
    length: int = 10,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """Feed name -> keyword arguments for `model(**kwargs)`. Raises CaptureError when not even one can be made."""
    return make_inputs(
        model, config=config, model_type=model_type, inputs=inputs, batch=batch, length=length, seed=seed
    ).feeds


def make_inputs(
    model: nn.Module,
    *,
    config: PretrainedConfig | None = None,
    model_type: str = "",
    inputs: Mapping[str, Any] | None = None,
    batch: int = 2,
    length: int = 10,
    seed: int = 0,
    recipe: Recipe | None = None,
) -> Feeds:
    """`feeds_for` with notes on what is missing. The user's inputs are taken as they are, at any size asked.

    A `recipe` has two sizes: its first for the usual batch and length, else the other.
    """
    if inputs is not None:
        return Feeds(users_feeds(inputs, arguments_of(model)))
    core = core_of(model)
    config = config or (core.config if core is not None else None)
    if config is not None:
        made, notes = make_feeds(core or model, config, model_type or config.model_type or "", batch, length, seed)
        return Feeds(made, tuple(notes))
    if recipe is None:
        return Feeds({"forward": derive(model, batch, length, seed)})
    usual = (batch, length) == (SIZES["batch"], SIZES["length"])
    others = recipe.draw(model, seed, other=usual) if recipe.other is not None else {}
    return Feeds(recipe.draw(model, seed, other=not usual), others=others)


def core_of(model: nn.Module) -> PreTrainedModel | None:
    """The transformers model that `model` is, or that it wraps: it holds all parameters and is called the same way."""
    if isinstance(model, PreTrainedModel):
        return model
    core = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if core is None or {id(p) for p in core.parameters()} != {id(p) for p in model.parameters()}:
        return None
    taken = inspect.signature(model.forward).parameters.values()
    passes_on = any(parameter.kind == parameter.VAR_KEYWORD for parameter in taken)
    return core if passes_on or core.main_input_name in {parameter.name for parameter in taken} else None


def arguments_of(model: nn.Module) -> frozenset[str]:
    """The names of what its forward takes."""
    return frozenset(inspect.signature(model.forward).parameters)


def users_feeds(inputs: Mapping[str, Any], arguments: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """`{argument: value}` is one feed; `{feed: {argument: value}}` is as many as it says. An argument of the forward
    that is a dict is an argument.

    A feed with the key "@module" calls that part in place of the model (`capture/called.py`).
    """
    if not isinstance(inputs, Mapping) or not inputs:
        raise CaptureError(
            f"inputs= is {'empty' if isinstance(inputs, Mapping) else type(inputs).__name__}",
            hint="give {argument: tensor}, or {feed name: {argument: tensor}}",
        )
    wrong = [name for name in inputs if not isinstance(name, str)]
    if wrong:
        raise CaptureError(f"inputs= has the key {wrong[0]!r}", hint="keys are names of forward's arguments")
    if all(isinstance(value, Mapping) for value in inputs.values()) and not all(name in arguments for name in inputs):
        return {feed: dict(keywords) for feed, keywords in inputs.items()}
    return {"forward": dict(inputs)}

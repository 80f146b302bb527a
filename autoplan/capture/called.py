"""What a feed calls: the model, or the part of it that the key "@module" names; "@training" runs its training paths."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn

from autoplan.capture.training_paths import in_training
from autoplan.patches.kernels import where_it_runs

__all__ = ["PART", "TRAINING", "call", "calls_the_model"]

PART, TRAINING = "@module", "@training"


def call(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Run the model, or the part of it that the feed names, on the other keys."""
    given = dict(inputs)
    part, training = given.pop(PART, None), given.pop(TRAINING, False)
    with where_it_runs(model), in_training(model) if training else nullcontext():
        return (model if part is None else model.get_submodule(part))(**given)


def calls_the_model(feeds: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The feeds that call the model itself."""
    return {name: inputs for name, inputs in feeds.items() if PART not in inputs}

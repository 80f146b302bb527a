"""What a feed calls: the model, or the part of it that the key "@module" names; "@training" runs its training paths."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from types import FrameType
from typing import Any

from torch import nn
from torch.autograd.function import FunctionCtx

from autoplan.capture.training_paths import in_training
from autoplan.patches.kernels import where_it_runs

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


def inside_a_function() -> bool:
    """Is the forward of a `torch.autograd.Function` running? It has a backward of its own, whatever is off within: one
    that checkpoints runs the model's code without gradients, and once more with them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and isinstance(frame.f_locals.get(next(iter(code.co_varnames), "")), FunctionCtx):
            return True
        frame = frame.f_back
    return False

"""Layers that take their shapes from the first call: a plan needs the shapes, so a copy is called first."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoplan.capture.called import call
from autoplan.capture.copies import copied
from autoplan.capture.dry_run import own
from autoplan.common.errors import CaptureError
from autoplan.common.random_values import untouched_randomness


def with_shapes(model: nn.Module, feeds: Mapping[str, Mapping[str, Any]] | None) -> nn.Module:
    """The model itself, or a copy of it that was called once where parameters have no shape yet."""
    waiting = _waiting(model)
    if not waiting:
        return model
    if not feeds:
        raise CaptureError(
            f"{waiting[0]} of {type(model).__name__} has no shape before its first call ({len(waiting)} such)",
            hint="call the model once on an example before it is planned, or pass inputs= (then a copy is called)",
        )
    copy = copied(model)
    try:
        with untouched_randomness(0), torch.no_grad():
            for inputs in feeds.values():
                call(copy, own(dict(inputs)))
    except Exception as error:  # someone else's forward may raise anything
        raise CaptureError(
            f"the first call of {type(model).__name__}, which gives {waiting[0]} its shape, fails: "
            f"{type(error).__name__}: {error}",
            hint="pass inputs= as its forward takes them",
        ) from error
    left = _waiting(copy)
    if left:
        raise CaptureError(
            f"{left[0]} of {type(model).__name__} has no shape even after a call with inputs=",
            hint="pass a second feed, {name: {argument: tensor}}, that runs it",
        )
    return copy


def _waiting(model: nn.Module) -> list[str]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return [name for name, tensor in named if is_lazy(tensor)]

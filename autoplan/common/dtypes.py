"""In which dtype a model computes, and casting it to another.

The first floating parameter tells, except that a weight kept in float8 is a store of bits next to its scales: nothing
computes in it, and casting it would make another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from autoplan.common.errors import SourceError
from autoplan.common.nested import changed_inside


def working_dtype(model: nn.Module, default: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype in which a model computes."""
    return next((parameter.dtype for parameter in model.parameters() if _computes(parameter)), default)


def tried_dtypes(model: Callable[[], nn.Module]) -> Iterator[torch.dtype]:
    """In which a clone is run, the best first: rounding hides least in the widest; some code runs in its own only.

    `model` gives the model that is cloned. It is asked for last: at its full size it costs more than a clone. Some
    configs describe no model that can be built but at the sizes of a clone; they have no dtype of their own.
    """
    tried = (torch.float64, torch.float32)
    yield from tried
    try:
        own = working_dtype(model())
    except SourceError:
        return
    if own not in tried:
        yield own


def cast_numbers(model: nn.Module, dtype: torch.dtype) -> None:
    """Floating tensors to `dtype`; complex tables stay complex, quantised weights quantised."""
    for parameter in model.parameters():
        if _computes(parameter):
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and _computes(buffer):
                module._buffers[name] = buffer.to(dtype)


def inputs_in(dtype: torch.dtype, value: Any) -> Any:
    """Example inputs for a clone on the CPU that computes in `dtype`: users give them as their own model takes them."""
    if isinstance(value, torch.Tensor):
        here = value if value.is_meta else value.cpu()
        return here.to(dtype) if here.is_floating_point() else here
    return changed_inside(value, partial(inputs_in, dtype))


def _computes(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1

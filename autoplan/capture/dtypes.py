"""In which dtype a model computes, and casting it to another.

The first floating parameter tells, except that a weight kept in float8 is a store of bits beside its scales: nothing
computes in it, and casting it would make another model.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["cast_numbers", "working_dtype"]


def working_dtype(model: nn.Module, default: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype in which a model computes."""
    return next((parameter.dtype for parameter in model.parameters() if _computes(parameter)), default)


def cast_numbers(model: nn.Module, dtype: torch.dtype) -> None:
    """Floating tensors to `dtype`; complex tables stay complex, quantised weights quantised."""
    for parameter in model.parameters():
        if _computes(parameter):
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and _computes(buffer):
                module._buffers[name] = buffer.to(dtype)


def _computes(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1

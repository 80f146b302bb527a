"""Random quantised checkpoints: packed tensors of a described weight, and the plain numbers that they stand for.

The numbers are made the slow way, one rule written out for whole matrices, so that the pieces that ranks read can be
held against it.
"""

from __future__ import annotations

from math import prod

import torch

from autoplan.values.quantised import PackedTensor, PackedWeight

_DTYPES = {name: getattr(torch, name) for name in
           ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float8_e4m3fn")}  # fmt: skip


def random_parts(weight: PackedWeight) -> dict[str, torch.Tensor]:
    """Stored tensors with random numbers, by name."""
    return {tensor.name: _random(weight, tensor) for tensor in weight.tensors}


def _in_any_order(weight: PackedWeight) -> bool:
    """May an input have any group, so that scales are held whole?"""
    scales = next(tensor for tensor in weight.tensors if tensor.name.endswith(("scales", "_scale")))
    return all(dim.of != (weight.contracted,) for dim in scales.dims)


def _random(weight: PackedWeight, tensor: PackedTensor) -> torch.Tensor:
    dtype, shape = _DTYPES[tensor.dtype], tensor.shape
    if tensor.name.endswith("g_idx"):
        values = dict(weight.scheme.values)
        group = int(values.get("group") or values.get("columns") or shape[0])
        groups, in_order = -(-shape[0] // group), torch.arange(shape[0]) // group
        return (torch.randint(groups, shape) if _in_any_order(weight) else in_order).to(dtype)
    if tensor.name.endswith("weight_shape"):
        return torch.tensor(weight.shape)
    if tensor.name.endswith("quant_map"):
        return torch.linspace(-1, 1, prod(shape))
    if tensor.dtype == "uint8" and tensor.name.endswith(("scale", "scales", "scale_inv")):
        return torch.randint(118, 130, shape).to(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return (0.01 + torch.rand(shape)).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype) if tensor is weight.tensors[0] else (0.5 + torch.rand(shape)).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=torch.int64).to(dtype)

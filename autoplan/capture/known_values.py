"""Fake tensors, but real numbers where they are known: what a model computes from its inputs' integers and masks.

Multimodal models count placeholder tokens, read grids of patches, and cut sequences by lengths, in Python. A run on
fake tensors alone must give up there, although none of these numbers depends on a weight: they follow from integers
that the caller passes. So integer and boolean inputs stay real, an op all of whose tensors are real is computed, and
everything that touches a weight is fake as before.

Where Python asks for choices that do depend on weights (which experts were hit) and the model is too large to run for
real, choices can be supposed: positions spread over all there are, comparisons that hold. Any run makes some choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.common.nested import changed_inside, flatten_tensors
from autoplan.ops import op_record
from autoplan.ops.records.answers import Supposed

_LARGEST = 4_000_000  # elements that are worth computing


class KnownValues:
    """A fake mode in which what is made of known integers alone is known. Inputs come in by `admit`.

    With `supposing`, positions and comparisons of unknown values are made up.
    """

    def __init__(self, mode: FakeTensorMode, *, supposing: bool = False) -> None:
        self.mode, self.supposing = mode, supposing

    def admit(self, value: Any) -> Any:
        """An input as this mode wants it: integers and masks stay as they are, floats lose their storage."""
        if not isinstance(value, torch.Tensor):
            return changed_inside(value, self.admit)
        return value.clone() if _is_known(value) else self.mode.from_tensor(value)

    def __enter__(self) -> KnownValues:
        self.mode.__enter__()
        self.above = _Computing(self.supposing)
        self.above.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.above.__exit__(*exception)
        self.mode.__exit__(*exception)


class _Computing(TorchDispatchMode):
    """Computes an op for real if every tensor in it is real, or if it makes integers out of nothing."""

    def __init__(self, supposing: bool) -> None:
        super().__init__()
        self.supposing = supposing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [tensor for _, tensor in flatten_tensors((args, kwargs))]
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            if func._schema.is_mutable and not isinstance(given[0], FakeTensor):
                raise RuntimeError(f"{func}: a known tensor is overwritten with what is not known")
            found = func(*args, **kwargs)
            return _supposed(func, given[0], found) if self.supposing and not func._schema.is_mutable else found
        if not given:
            made = func(*args, **kwargs)
            if not all(_is_known(tensor) and tensor.device.type == "cpu" for _, tensor in flatten_tensors(made)):
                return made
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _supposed(func: Any, chosen_from: torch.Tensor, found: Any) -> Any:
    """What an op on unknown values returned, with its positions and truth values made up."""
    if isinstance(found, tuple | list):
        return type(found)([_supposed(func, chosen_from, item) for item in found])
    if not isinstance(found, FakeTensor) or found.numel() > _LARGEST or not _is_known(found):
        return found
    supposed = op_record(func._schema.name.removeprefix("aten::")).supposed
    with unset_fake_temporarily():
        if found.dtype == torch.bool and supposed in (Supposed.TRUE, Supposed.FALSE):
            return torch.full(found.shape, supposed is Supposed.TRUE)
        if found.dtype == torch.int64 and supposed is Supposed.POSITIONS:
            return _spread(found.shape, chosen_from.shape)
    return found


def _spread(shape: torch.Size, among: torch.Size) -> torch.Tensor:
    """Positions along the dim that an op chooses in: the first, the last, and others between."""
    if len(shape) != len(among):  # one for each row
        return torch.zeros(shape, dtype=torch.int64)
    dim = next((d for d in range(len(shape)) if shape[d] != among[d]), len(shape) - 1)
    count, size = shape[dim], among[dim]
    places = torch.arange(count) * max(size - 1, 0) // max(count - 1, 1)
    return places.reshape([count if d == dim else 1 for d in range(len(shape))]).expand(shape).contiguous()


def _is_known(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _LARGEST

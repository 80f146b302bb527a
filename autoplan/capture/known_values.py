"""Fake tensors, but real numbers where they are known: what a model computes from its inputs' integers and masks.

Multimodal models count placeholder tokens, read grids of patches, and cut sequences by lengths, in Python. A run on
fake tensors alone must give up there, although none of these numbers depends on a weight: they follow from integers
that the caller passes. So integer and boolean inputs stay real, an op all of whose tensors are real is computed, and
everything that touches a weight is fake as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["KnownValues"]

_LARGEST = 4_000_000  # elements that are worth computing


class KnownValues:
    """A fake mode in which what is made of known integers alone is known. Inputs come in by `admit`."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode

    def admit(self, value: Any) -> Any:
        """An input as this mode wants it: integers and masks stay as they are, floats lose their storage."""
        if not isinstance(value, torch.Tensor):
            return value
        return value.clone() if _is_known(value) else self.mode.from_tensor(value)

    def __enter__(self) -> KnownValues:
        self.mode.__enter__()
        self.above = _Computing()
        self.above.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.above.__exit__(*exception)
        self.mode.__exit__(*exception)


class _Computing(TorchDispatchMode):
    """Computes an op for real if every tensor in it is real, or if it makes integers out of nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            if func._schema.is_mutable and not isinstance(given[0], FakeTensor):
                raise RuntimeError(f"{func}: a known tensor is overwritten with what is not known")
            return func(*args, **kwargs)
        if not given:
            made = func(*args, **kwargs)
            if not all(_is_known(tensor) and tensor.device.type == "cpu" for tensor in _tensors(made)):
                return made
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _is_known(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _LARGEST


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)

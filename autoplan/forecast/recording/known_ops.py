"""What ops made of tensors like these before: a step repeats few ops on few shapes, and torch's own table of them takes
longer to look up than it saves.

An op is known by its arguments' metadata and its numbers. What it made is stated by shape, or as the storage of one of
its arguments; anything else (values, shapes that depend on data, other kinds of tensors) is left to torch each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoplan.common.torch_internals import FakeTensor, FakeTensorMode, fake_like, schema_of, storage_id

_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format))
_UNKNOWN = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_MOST = 200_000  # ops remembered; a question about a large model asks for some thousands
Made = tuple[int, bool, Any]  # which argument it is (-1: none), whether it is only a view of it, and what it is like
_made: dict[Any, tuple[type, tuple[Made, ...]] | None] = {}  # None: left to torch


class KnownOps:
    """Runs ops for a mode of fake tensors."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[torch.Tensor] = []
        key: list[Any] = [func, torch.get_default_dtype()]
        plain = _describe(args, key, tensors) and _describe(kwargs.items(), key, tensors)
        if not plain or func.namespace != "aten":
            return func(*args, **kwargs)
        known = tuple(key)
        if known not in _made:
            was, self.mode.cache_enabled = self.mode.cache_enabled, False  # torch's own table
            try:
                result = func(*args, **kwargs)
            finally:
                self.mode.cache_enabled = was
            if len(_made) >= _MOST:
                _made.clear()
            _made[known] = _entry(func, tensors, key, result)
            return result
        entry = _made[known]
        if entry is None:
            return func(*args, **kwargs)
        kind, results_made = entry
        results = []
        for at, viewed, like in results_made:
            base = tensors[at] if at >= 0 else None
            results.append(base if base is not None and not viewed else fake_like(self.mode, base, *like))
        return results[0] if kind is FakeTensor else kind(results)


def _describe(values: Any, key: list[Any], tensors: list[torch.Tensor]) -> bool:
    """Append what tells these arguments apart; False where one is of another kind."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.is_complex() or value.layout is not torch.strided:
                return False
            key.append(_like(value))
            tensors.append(value)
        elif kind in _PLAIN:
            key.append((kind, value))
        elif kind is list or kind is tuple:
            key.append(len(value))
            if not _describe(value, key, tensors):
                return False
        else:
            return False
    return True


def _like(tensor: Any) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device,
            tensor.requires_grad)  # fmt: skip


def _entry(func: Any, tensors: list[torch.Tensor], key: list[Any], result: Any) -> tuple[type, tuple[Made, ...]] | None:
    kind = type(result)
    results: Sequence[Any] = (result,) if kind is FakeTensor else result if kind in (list, tuple) else ()
    plain = all(type(one) is FakeTensor and one.constant is None and not one.is_complex() for one in results)
    if not results or not plain or any(tag in func.tags for tag in _UNKNOWN):
        return None
    described = [item for item in key if type(item) is tuple and len(item) == 6]
    if schema_of(func).is_mutable and any(_like(t) != was for t, was in zip(tensors, described, strict=True)):
        return None
    places = {storage_id(tensor): at for at, tensor in reversed(list(enumerate(tensors)))}
    forms: list[Made] = []
    for one in results:
        at = next((n for n, tensor in enumerate(tensors) if tensor is one), -1)
        shared = places.get(storage_id(one), -1)
        forms.append((at, False, None) if at >= 0 else (shared, shared >= 0, _like(one)[:-1]))
        if shared < 0:
            places[storage_id(one)] = len(tensors)  # of another result
        elif shared == len(tensors):
            return None
    return kind, tuple(forms)

"""A user's example inputs at another batch and length: inputs say the kinds of arguments, the question says the sizes.

Rows are the first dim of tensors that have as many of them as the ids; tokens are the dims of ids, masks, positions and
embeddings that are as long. All rows become the first one, longer sequences repeat the last token: a step without
storage looks at shapes. What has no such dim stays as it is, and `size_of` tells which size was taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_IDS = ("input_ids", "decoder_input_ids")
_EMBEDDED = ("inputs_embeds", "hidden_states", "decoder_inputs_embeds")


def size_of(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and tokens of one call; 0 tokens where no argument is a sequence of them."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.dim()}
    named = [tensors[name] for name in (*_IDS, *_EMBEDDED) if name in tensors and tensors[name].dim() > 1]
    ids = [value for value in tensors.values() if value.dim() == 2 and value.dtype in (torch.int64, torch.int32)]
    first = next(iter((*named, *ids)), None)
    if first is not None:
        return int(first.shape[0]), int(first.shape[1])
    return next((int(value.shape[0]) for value in tensors.values()), 1), 0


def resized(inputs: Mapping[str, Any], batch: int, length: int) -> dict[str, Any]:
    """The same arguments for `batch` rows of `length` tokens, as far as they have such dims."""
    rows, tokens = size_of(inputs)
    if (rows, tokens) in ((batch, length), (batch, 0)):
        return dict(inputs)
    return {
        name: _resized(value, (rows, tokens), (batch, length), embedded=name in _EMBEDDED)
        if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }  # fmt: skip


def _resized(value: torch.Tensor, own: tuple[int, int], wanted: tuple[int, int], *, embedded: bool) -> torch.Tensor:
    (rows, tokens), (batch, length) = own, wanted
    whole = not value.is_floating_point() or (value.dim() == 4 and tuple(value.shape[-2:]) == own[1:] * 2)
    has_rows = value.dim() > 0 and value.shape[0] == rows
    if has_rows:
        value = value[:1]
    if tokens:
        first = 1 if has_rows or value.dim() > 1 else 0
        dims = range(first, value.dim()) if whole else (1,) if embedded else ()
        for dim in (dim for dim in dims if value.shape[dim] == tokens):
            value = _longer(value, dim, length)
    return value.expand(batch, *value.shape[1:]) if has_rows else value


def _longer(value: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Cut, or with its last place repeated."""
    more = length - value.shape[dim]
    if more <= 0:
        return value.narrow(dim, 0, length)
    sizes = [more if place == dim else -1 for place in range(value.dim())]
    return torch.cat([value, value.narrow(dim, value.shape[dim] - 1, 1).expand(sizes)], dim=dim)

"""Floating-point operations of one op on one rank, by the formulas of torch's flop counter and a few more."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

__all__ = ["flops_of"]


def _attention(args: Any, kwargs: Any, result: Any) -> int:
    flops = sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)
    causal = kwargs.get("is_causal", args[4] if len(args) > 4 else False)
    return int(flops) // (2 if causal else 1)


def _attention_backward(args: Any, kwargs: Any, result: Any) -> int:
    flops = sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape)
    causal = kwargs.get("is_causal", args[7] if len(args) > 7 else False)
    return int(flops) // (2 if causal else 1)


def _grouped(args: Any, kwargs: Any, result: Any) -> int:
    """Rows of each expert times its matrix: every row is multiplied once."""
    one, other = args[0], args[1]
    if one.dim() == other.dim() == 2:  # the gradient of the matrices
        return 2 * prod(one.shape) * int(other.shape[-1])
    rows, matrix = (one, other) if one.dim() == 2 else (other, one)
    return 2 * prod(rows.shape) * int(matrix.shape[-1])


_MORE = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_grouped_mm": _grouped,
    "grouped_mm_fallback": _grouped,
}


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Zero for what only moves data or works element by element."""
    packet = func.overloadpacket
    known = flop_registry.get(packet)
    if known is not None:
        with torch.utils._python_dispatch._disable_current_modes():
            return int(known(*args, **kwargs, out_val=result))
    more = _MORE.get(func._schema.name.partition("::")[2])
    return 0 if more is None else more(args, kwargs, result)

"""Floating-point operations of one op on one rank, by the formulas of torch's flop counter and a few more."""

from __future__ import annotations

from math import prod
from typing import Any, Literal

import torch
from torch.utils.flop_counter import flop_registry


def _attention(func: Any, args: Any, kwargs: Any) -> int:
    """Two products of the forward; of backward the scores again, and two for either product. Half of each if causal."""
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    wide, narrow = (3, 2) if func.overloadpacket.__name__.endswith("_backward") else (1, 1)
    scores = prod(query.shape[:-1]) * key.shape[-2]
    flops = 2 * scores * (wide * query.shape[-1] + narrow * value.shape[-1])
    return int(flops) // (2 if given.get("is_causal") else 1)


def _grouped(args: Any, kwargs: Any, result: Any) -> int:
    """Rows of each expert times its matrix: every row is multiplied once."""
    one, other = args[0], args[1]
    if one.dim() == other.dim() == 2:  # the gradient of the matrices
        return 2 * prod(one.shape) * int(other.shape[-1])
    rows, matrix = (one, other) if one.dim() == 2 else (other, one)
    return 2 * prod(rows.shape) * int(matrix.shape[-1])


_SCORES = "_scaled_dot_product_"
_MORE = {"_grouped_mm": _grouped, "grouped_mm_fallback": _grouped}


def layer_of(func: Any, result: Any) -> Literal["", "linear", "experts"]:
    """Of an op that has operations: is it a product of layers? Their rows make a matrix; attention's have more dims."""
    if func._schema.name.partition("::")[2] in _MORE:
        return "experts"
    return "linear" if isinstance(result, torch.Tensor) and result.dim() == 2 else ""


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Zero for what only moves data or works element by element."""
    name = func._schema.name.partition("::")[2]
    if name.startswith(_SCORES):  # torch's count all scores of causal ones; those of 2.11 know no fewer key heads
        return _attention(func, args, kwargs)
    known = flop_registry.get(func.overloadpacket)
    if known is not None:
        with torch.utils._python_dispatch._disable_current_modes():
            return int(known(*args, **kwargs, out_val=result))
    more = _MORE.get(name)
    return 0 if more is None else more(args, kwargs, result)

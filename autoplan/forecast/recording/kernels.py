"""Kernels that a GPU has and CPU tensors do not: what is recorded is what runs there.

A recording runs on tensors of the CPU without storage. Where torch would take a reference there that keeps far more
(all scores of attention), the op that a GPU takes is put in its place; its shapes are known without a GPU. `KERNELS` is
the table: what is called, what is recorded for it, and where that is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

__all__ = ["KERNELS", "Kernel", "grouped_in_bfloat16", "kernels_of_a_gpu"]

_ATEN = torch.ops.aten
_FLASH_WIDTH = 256  # of a head


@dataclass(frozen=True)
class Kernel:
    """`called`: in the model's code; `recorded`: the op in its place; `keeps`: for backward; `source`: who says so."""

    called: str
    recorded: str
    keeps: str
    source: str


KERNELS = (
    Kernel(
        "scaled_dot_product_attention, heads of one width, no dropout", "_scaled_dot_product_flash_attention_for_cpu",
        "queries, keys, values, output, one float32 for each row", "torch/_meta_registrations.py: as for CUDA",
    ),
    Kernel(
        "scaled_dot_product_attention with fewer key heads, or dropout", "_scaled_dot_product_flash_attention",
        "queries, keys, values, output, one float32 for each row",
        "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_head_dim_size_flash: widths are equal, up to 256",
    ),
    Kernel(
        "scaled_dot_product_attention, values narrower than keys (latent attention), or with a mask and dropout",
        "_scaled_dot_product_efficient_attention", "queries, keys, values, output, one float32 for each row",
        "sdp_utils.cpp, can_use_mem_efficient_attention: widths may differ",
    ),
    Kernel(
        "grouped_mm in another dtype than bfloat16", "_grouped_mm", "both operands",
        "aten/src/ATen/native/cuda/GroupedBlas.cpp: other dtypes fall back to a product for each group",
    ),
)  # fmt: skip


class _OnAGpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            fused = _fused(*args, **(kwargs or {}))
            if fused is not None:
                return fused
        return func(*args, **(kwargs or {}))


def _fused(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    """None where the op of a CPU keeps what that of a GPU keeps."""
    given = [one for one in (query, key, value, attn_mask) if one is not None]
    if any(isinstance(one, DTensor) or one.dim() != 4 for one in given) or not (query.is_meta or is_fake(query)):
        return None  # a step that runs for real
    alike, shared = query.shape[-1] == value.shape[-1], query.shape[1] != key.shape[1]
    if alike and not dropout_p and not shared:
        return None
    if alike and attn_mask is None and query.shape[-1] <= _FLASH_WIDTH:
        whole = _ATEN._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    elif shared:
        return None
    else:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        whole = _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
        )
    mixed: torch.Tensor = whole[0]
    return mixed


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


@contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """While a step runs on tensors without storage."""
    with _OnAGpu():
        yield


def grouped_in_bfloat16(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Products of groups in any dtype: shapes are asked in the one dtype that torch knows them in. None: another op."""
    if func is not _ATEN._grouped_mm.default or args[0].dtype == torch.bfloat16:
        return None
    dtype = args[0].dtype
    narrow = [one.to(torch.bfloat16) if isinstance(one, torch.Tensor) and one.is_floating_point() else one
              for one in args]  # fmt: skip
    return func(*narrow, **kwargs).to(dtype)

"""Attention as a GPU runs it in models that have no path through scaled_dot_product_attention (gpt-oss: learned sinks).

transformers builds these with eager attention, which keeps all scores; on a GPU they are run with the flash kernel that
their class says it supports. For a step without storage torch's own flash op stands for that kernel: the same shapes
are kept, and what a bias of a head adds is not seen in them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

__all__ = ["take_flash_attention"]

_NAME = "autoplan_flash"
_WIDEST = 256  # of a head, in the flash kernel


def take_flash_attention(model: nn.Module) -> bool:
    """Let a copy without storage take the flash kernel, where its class supports that and not SDPA; did any?

    Who sets eager attention for a class that has SDPA wants it, and keeps it.
    """
    changed = False
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or part._supports_sdpa or not part._supports_flash_attn:
            continue
        if part.config._attn_implementation == "eager":
            AttentionInterface.register(_NAME, _flash)
            part.config._attn_implementation = _NAME
        changed = changed or part.config._attn_implementation == _NAME
    return changed


def _flash(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    scaling: float | None = None, dropout: float = 0.0, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    if query.shape[-1] == value.shape[-1] <= _WIDEST:
        mixed = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout, True, scale=scaling)[0]
    else:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, query.requires_grad, dropout, True, scale=scaling
        )[0]
    return mixed.transpose(1, 2), None

"""Modules that no recorded call ran, when a call does run them.

They are whole, and so are the gradients that they give. But what they read may be a value whose gradient is summed over
ranks, since every reader that was seen gives a part of it. There a whole gradient would count once for each rank: it is
given in equal parts. (A file of its own: it watches modules of which a plan says nothing else.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autoplan.common.nested import changed_inside
from autoplan.common.patterns import is_under
from autoplan.execute.collectives import RankGroup, gradient_is_summed, scale_gradient

__all__ = ["watch_idle"]


def watch_idle(modules: dict[str, nn.Module], patterns: Iterable[str], group: RankGroup) -> Iterator[RemovableHandle]:
    """Have these modules give their part of such gradients, from now on."""
    if group.size == 1:
        return
    for name, module in modules.items():
        if any(is_under(pattern, name) for pattern in patterns):
            yield module.register_forward_pre_hook(partial(_give_parts, group.size), with_kwargs=True)


def _give_parts(ranks: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None

    def part(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return scale_gradient(value, 1.0 / ranks) if gradient_is_summed(value) else value
        return changed_inside(value, part)

    with torch._C.DisableTorchFunction():
        return tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()}

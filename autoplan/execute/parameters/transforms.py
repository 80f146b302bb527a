"""Functions of functions around a sharded model (`torch.func.grad`, `vmap`, forward derivatives, export): one error.

They need of every step rules of their own, and a communication between ranks has none. Without this check each says so
in other words, from the middle of the model.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import forward_ad

from autoplan.common.errors import AutoplanError

__all__ = ["refuse_transforms"]


def refuse_transforms(module: nn.Module) -> None:
    """Raise where a module whose parameters lie on ranks runs inside of such a function."""
    if torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and not torch.compiler.is_exporting()):
        return  # compilers use such functions for their own ends; torch 2.11's says that it exports
    if torch._C._functorch.peek_interpreter_stack() is not None:
        how, instead = "a transform of torch.func (grad, vjp, jvp, vmap)", "torch.autograd.grad, with create_graph"
    elif forward_ad._current_level >= 0:
        how, instead = "a forward derivative", "torch.autograd.grad"
    elif torch.compiler.is_exporting():
        how, instead = "torch.export", "torch.compile; or export the model that is not sharded"
    else:
        return
    raise AutoplanError(
        f"{type(module).__name__} lies on ranks, and is called inside of {how}, which cannot see what ranks send each "
        "other",
        hint=f"what works: {instead}",
    )

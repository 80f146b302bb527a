"""torch's encoder stack with padding, in eval mode without gradients.

There `nn.TransformerEncoder` packs the positions that are no padding into a nested tensor, which layers with hooks
cannot take, and leaves zeros at the others. Sharded layers get dense tensors; the zeros are put behind the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autoplan.common.errors import PlanMismatchError
from autoplan.common.torch_internals import DisableTorchFunction, forward_hooks
from autoplan.execute.hooks.install import Hooks

_NAMES = ("src", "mask", "src_key_padding_mask")


def keep_dense(model: nn.Module) -> Iterator[RemovableHandle]:
    """Keep the stacks dense whose layers have hooks; yield the handles of the hooks that do it."""
    stacks = (m for m in model.modules() if isinstance(m, nn.TransformerEncoder) and m.use_nested_tensor)
    for stack in stacks:
        if any(hooks for inner in stack.layers.modules() for hooks in forward_hooks(inner)):
            dense = _Dense()
            yield stack.register_forward_pre_hook(dense.begin, with_kwargs=True)
            yield list(stack.layers)[-1].register_forward_hook(dense.put_zeros)
            yield stack.register_forward_hook(dense.end, always_call=True)


class _Dense(Hooks):
    def __init__(self) -> None:
        self.real: torch.Tensor | None = None  # the positions that are no padding, where the others become zeros

    def begin(self, module: Any, args: Any, kwargs: Any) -> None:
        given = dict(zip(_NAMES, args, strict=False)) | kwargs
        source, padding = given["src"], given.get("src_key_padding_mask")
        with DisableTorchFunction():
            if padding is not None and _packs(module, source, given.get("mask")):
                real = padding.logical_not()
                aligned = bool((real.int().diff(dim=1) <= 0).all())
                self.real = real if aligned or not module.mask_check else None
        module.use_nested_tensor = False

    def put_zeros(self, layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if self.real is None:
            return output
        if output.shape[:2] != self.real.shape:
            raise PlanMismatchError(
                "torch's encoder leaves zeros at padding in eval mode without gradients, which are not put into shards "
                "of the sequence",
                hint="make it with enable_nested_tensor=False",
            )
        return output.masked_fill(self.real.logical_not()[..., None], 0)

    def end(self, module: Any, args: Any, output: Any) -> None:
        self.real, module.use_nested_tensor = None, True


def _packs(encoder: Any, source: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether torch would use a nested tensor for a mask that is left aligned."""
    first = encoder.layers[0]
    ways = torch.backends.mha.get_fastpath_enabled(), source.dim() == 3, mask is None, not first.training
    others = torch.is_autocast_enabled(), torch.compiler.is_compiling(), source.is_nested
    needs = torch.is_grad_enabled() and any(t.requires_grad for t in (source, *first.parameters()))
    return all(ways) and not any(others) and not needs

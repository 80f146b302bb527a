"""What a rank of context parallelism reads of whole weights, and the sum of their gradients.

Weights are whole on each rank, and so is the gradient that an optimizer sees. A rank uses a weight on its own
positions, or its own heads of it on all positions: either way its gradient is one part of a sum. The sum is made once,
at the end of a backward, for all parameters of the module that was called: on their way back ranks may meet parameters
in another order, or not at all, since experts that get no token of a rank are not read there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import nn

from autoplan.common.layout import Layout
from autoplan.execute.collectives import (
    RankGroup,
    copies_to_ranks,
    copy_to_ranks,
    part_of_sum,
    scale_gradient,
    take_rows,
)
from autoplan.execute.parameters.held import Held, record_of

NOTHING: Mapping[int, torch.Tensor] = MappingProxyType({})


def part_of_whole(part: torch.Tensor, whole: Held, summed: torch.Tensor | None) -> torch.Tensor:
    """What a rank of context parallelism reads of a parameter, or of what its rank of another split holds of it, and
    whose gradient is the sum over ranks. `summed`: the same, where the sum is made at the end of the backward."""
    held = whole.read
    if held is None or held.group.size == 1:
        return part
    size = held.group.size
    if whole.is_summed and summed is not None:
        part = summed
    elif whole.is_summed:
        part = scale_gradient(part, float(size)) if held.averaged else copy_to_ranks(part, held.group)
    if held.dim is not None and held.layout is not None:
        part = take_rows(part, held.dim, held.rows[held.group.rank])
        layout = Layout.parse(held.layout)
        if held.gradient == "local" and not layout.all_carried():
            part = scale_gradient(part, [1.0 if carried else 1.0 / size for carried in layout.carried(size)], held.dim)
    return part_of_sum(part, size) if held.divide else part


def summed_together(module: nn.Module, view: Callable[[nn.Parameter, Held], torch.Tensor]) -> dict[int, torch.Tensor]:
    """Of the parameters of a module that is called: those whose gradients ranks sum, at the end of its backward.
    `view`: what a rank holds of one."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return {}
    found: dict[int, torch.Tensor] = {}
    groups = set[RankGroup]()
    for inner in module.modules():
        record = record_of(inner)
        for name, parameter in inner._parameters.items() if record is not None else ():
            held = record.parameters.get(name) if record is not None else None
            if parameter is None or not parameter.requires_grad or held is None or held.read is None:
                continue
            if held.is_summed and id(parameter) not in found:
                found[id(parameter)] = view(parameter, held)
                groups.add(held.read.group)
    if not found:
        return {}
    copies = copies_to_ranks(list(found.values()), groups.pop())
    return dict(zip(found, copies, strict=True))

"""What a rank of context parallelism reads of whole weights, and the sum of their gradients.

Weights are whole on each rank, and so is the gradient that an optimizer sees. A rank uses a weight on its own
positions, or its own heads of it on all positions: either way its gradient is one part of a sum. The sum is made once,
at the end of a backward, for all parameters of the module that was called: on their way back ranks may meet parameters
in another order, or not at all, since experts that get no token of a rank are not read there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.common.layout import Layout
from autoplan.execute.collectives import copies_to_ranks, copy_to_ranks, part_of_sum, scale_gradient, take_rows
from autoplan.execute.parameters.held import Held, record_of

NOTHING: Mapping[int, torch.Tensor] = MappingProxyType({})


def part_of_whole(
    parameter: torch.Tensor | None, whole: Held, summed: Mapping[int, torch.Tensor]
) -> torch.Tensor | None:
    """What a rank of context parallelism reads of a whole parameter, whose gradient is the sum over ranks."""
    held = whole.read
    if parameter is None or held is None or isinstance(parameter, DTensor) or held.group.size == 1:
        return parameter
    part, size = parameter, held.group.size
    if whole.is_summed and id(parameter) in summed:
        part = summed[id(parameter)]
    elif whole.is_summed:
        part = scale_gradient(part, float(size)) if held.averaged else copy_to_ranks(part, held.group)
    if held.dim is not None and held.layout is not None:
        part = take_rows(part, held.dim, held.rows[held.group.rank])
        layout = Layout.parse(held.layout)
        if held.gradient == "local" and not layout.all_carried():
            part = scale_gradient(part, [1.0 if carried else 1.0 / size for carried in layout.carried(size)], held.dim)
    return part_of_sum(part, size) if held.divide else part


def summed_together(module: nn.Module) -> dict[int, torch.Tensor]:
    """Of the parameters of a module that is called: those whose gradients ranks sum, at the end of its backward."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return {}
    found: dict[int, tuple[torch.Tensor, Held]] = {}
    for inner in module.modules():
        record = record_of(inner)
        for name, parameter in inner._parameters.items() if record is not None else ():
            held = record.parameters.get(name) if record is not None else None
            if parameter is not None and parameter.requires_grad and held is not None and held.is_summed:
                found[id(parameter)] = parameter, held
    if not found:
        return {}
    copies = copies_to_ranks([x for x, _ in found.values()], next(iter(found.values()))[1].group)
    return dict(zip(found, copies, strict=True))

"""What code of the model reads of a parameter on ranks: plain tensors that pass their gradients on to the DTensor.

The local tensor of a rank, its part of that under context parallelism, or the full tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.common.layout import Layout
from autoplan.common.torch_internals import local_part, local_spec, outside_of_vmap, own_parameters, unwrapped
from autoplan.execute.collectives import (
    Linear,
    RankGroup,
    Recorded,
    all_reduce,
    copy_rows,
    copy_to_ranks,
    gather_over_ranks,
    linear,
    part_of_sum,
    recorded_again,
    scale_gradient,
    sum_over_ranks,
    take_rows,
)
from autoplan.execute.parameters.held import Held, ModuleRecord, Reading, record_of
from autoplan.execute.parameters.state_dict import gathered, local_piece


def local_view(
    parameter: torch.Tensor | None, held: Held | None, summed: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor | None:
    """Return the plain tensor this rank computes with. `summed`: see `ModuleRecord`."""
    if parameter is not None and parameter is not unwrapped(parameter):  # a stack of them, which torch.vmap runs as one
        if held is not None and (held.has_spare_room or held.shared.count or held.read is not None):
            return parameter  # rows are picked along a dim of the parameter, which is another one of the stack
        return outside_of_vmap(partial(local_view, held=held), parameter)
    lies_on_tp = isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1
    if parameter is None:
        return None
    if held is None or held.read is None:
        local = held_view(parameter, held)
    elif summed is not None and parameter is summed[0]:
        local = _part_of_whole(parameter, held, summed[1])
    elif summed is not None and _is_made_of_summed(parameter):  # put in its place by `torch.func.functional_call`
        return parameter
    elif isinstance(parameter, DTensor) and (not lies_on_tp or held.read.group == held.group):
        return parameter  # FSDP2's sharded parameter
    else:
        local = _part_of_whole(held_view(parameter, held), held, None)
    # last, so that what autograd saves for it is saved by the module's own run, and again by a checkpoint's
    if held is not None and held.divide and held.group.size > 1 and lies_on_tp:
        local = part_of_sum(local, held.group.size)
    wants_gradient = parameter.requires_grad and not local.requires_grad  # also where no gradients are recorded
    return local.detach().requires_grad_() if wants_gradient and not torch.compiler.is_compiling() else local


def held_view(parameter: Any, held: Held | None) -> Any:
    """Return this tp rank's undivided local tensor."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim != 1:
        return parameter
    local = _local(parameter)
    if held is None:
        return local
    local = held.held_of(local)
    if held.gradient != "local" and held.group.size > 1 and local.requires_grad:
        if held.dim is None:
            local = copy_to_ranks(local, held.group)
        elif held.shared.count:
            shared = held.shared
            local = _sum_shared_rows(local, held.group, held.dim, shared.positions, shared.places, shared.count)
    return local


def whole_view(parameter: torch.Tensor | None, held: Held | None) -> torch.Tensor | None:
    """Return the full tensor, for code that computes the same with it on every tp rank."""
    if not isinstance(parameter, DTensor) or held is None:
        return parameter
    if parameter.device_mesh.ndim > 1:  # in an FSDP2 unit that does not run, so it is not gathered
        return _WholeOfUnit.apply(parameter, held)
    local = held.held_of(_local(parameter))
    return local if held.dim is None else gather_over_ranks(local, held.group, held.dim, held.rows)


class _WholeOfUnit(Recorded):
    """The full tensor of FSDP2's sharded parameter. Its gradient is averaged over data-parallel ranks, like FSDP2's."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, held: Held) -> torch.Tensor:
        ctx.spec, ctx.held = local_spec(parameter), held
        return held.to_checkpoint_order(gathered(parameter.detach(), held.room if held.dim is not None else None))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        spec, held = ctx.spec, ctx.held
        for dim in range(spec.mesh.ndim - 1):
            group = RankGroup.of(spec.mesh.get_group(dim))
            gradient = all_reduce(gradient, group) / group.size
        piece = local_piece(gradient, held, spec.mesh, spec.placements)
        return DTensor(piece.contiguous(), spec, requires_grad=False), None


def _local(parameter: DTensor) -> torch.Tensor:
    """Return `to_local()`, without the search for the gradient's placements: they are those of its parameter."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return parameter.to_local()
    return _ToLocal.apply(parameter)


class _ToLocal(Recorded):
    of_each = True

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        local = local_part(parameter)
        ctx.spec, ctx.stride = local_spec(parameter), local.stride()
        ctx.set_materialize_grads(False)
        return local.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> DTensor | None:
        if gradient is None:
            return None
        if isinstance(gradient, DTensor):  # of an op with parameters that `named_parameters()` gave in a forward
            gradient = gradient.full_tensor()
        gradient, spec = gradient.to_dense() if gradient.is_sparse else gradient, ctx.spec  # DTensors are dense
        if recorded_again() or gradient.dtype != spec.tensor_meta.dtype:
            layout: Any = {"run_check": False, "shape": spec.shape, "stride": spec.stride}
            return DTensor.from_local(gradient, spec.mesh, spec.placements, **layout)
        if gradient.stride() != ctx.stride:  # a gradient has the strides of its parameter
            gradient = gradient.new_empty_strided(gradient.shape, ctx.stride).copy_(gradient)
        return DTensor(gradient, spec, requires_grad=False)


# Context parallelism: the part of replicated weights that a rank reads, and the sum of their gradients.
#
# Weights are replicated, and so is the gradient that an optimizer sees. A rank uses a weight on its own positions, or
# its own heads of it on all positions: either way its gradient is partial. The sum is made once, at the end of a
# backward, for all parameters of the module that was called: in backward ranks may reach parameters in another order,
# or not at all, since an expert without tokens of a rank is not read there.


def _part_of_whole(part: torch.Tensor, whole: Held, summed: torch.Tensor | None) -> torch.Tensor:
    """Return the part of a replicated parameter (or of a tp rank's shard) that a rank of context parallelism reads; its
    gradient is summed over ranks. `summed`: the same, where the sum is made at the end of the backward."""
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


def sum_together(module: nn.Module, reading: Reading) -> None:
    """Let the modules inside read what `_CopyAll` returns of parameters whose gradients are summed at the end of the
    backward of the called module."""
    if not reading.summing or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    views: dict[int, torch.Tensor] = {}
    readers: list[tuple[ModuleRecord, str, torch.Tensor]] = []
    for inner in module.modules():
        if (record := record_of(inner)) is None:
            continue
        for name, parameter in own_parameters(inner).items():
            held = record.parameters.get(name)
            if parameter is None or not parameter.requires_grad or held is None or held.read is None:
                continue
            if held.is_summed:
                readers.append((record, name, parameter))
                group = held.read.group
                if id(parameter) not in views:  # tied ones are read as one
                    views[id(parameter)] = held_view(parameter, held)
    if views:
        copies = dict(zip(views, _CopyAll.apply(group, *views.values()), strict=True))
        reading.summed = [record for record, _, _ in readers]
        for record, name, parameter in readers:
            record.summed[name] = parameter, copies[id(parameter)]


def _is_made_of_summed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was made of what code reads of parameters whose gradients are summed at the end."""
    nodes, seen = [tensor.grad_fn], set[Any]()
    for node in nodes:  # they grow
        if node is not None and node not in seen:
            if node.name() == f"{_CopyAll.__name__}Backward":
                return True
            seen.add(node)
            nodes += [above for above, _ in node.next_functions]
    return False


_MESSAGE = 1 << 22  # numbers; a larger gradient is summed by itself


class _CopyAll(Recorded):
    """Copies of many tensors, whose gradients are summed over ranks together, at the end of a backward: a missing
    gradient counts as zeros, and a gradient that no rank has is not summed."""

    @staticmethod
    def forward(ctx: Any, group: RankGroup, *many: torch.Tensor) -> Any:
        ctx.group, ctx.like = group, [(x.shape, x.dtype, x.device) for x in many]
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in many)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        present = torch.tensor([gradient is not None for gradient in gradients], device=ctx.like[0][2])
        anywhere = all_reduce(present.to(torch.int32), ctx.group, "max").tolist()
        parts = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None and wanted else gradient
            for gradient, (shape, dtype, device), wanted in zip(gradients, ctx.like, anywhere, strict=True)
        ]
        summed: list[torch.Tensor | None] = [None] * len(parts)
        for places in _messages(parts):
            together = [part for part in (parts[place] for place in places) if part is not None]
            if len(together) == 1:  # perhaps a large one: no copy
                summed[places[0]] = sum_over_ranks(together[0], ctx.group)
                continue
            whole = sum_over_ranks(torch.cat([part.flatten() for part in together]), ctx.group)
            pieces = whole.split([part.numel() for part in together])
            for place, piece, part in zip(places, pieces, together, strict=True):
                summed[place] = piece.view(part.shape)
        return None, *summed


def _messages(parts: Sequence[torch.Tensor | None]) -> Iterator[list[int]]:
    """Yield the places of those that are summed in one message."""
    waiting: dict[torch.dtype, list[int]] = {}
    sizes = Counter[torch.dtype]()
    for place, part in enumerate(parts):
        if part is not None:
            if sizes[part.dtype] + part.numel() > _MESSAGE and part.dtype in waiting:
                yield waiting.pop(part.dtype)
                sizes[part.dtype] = 0
            waiting.setdefault(part.dtype, []).append(place)
            sizes[part.dtype] += part.numel()
    yield from waiting.values()


def _summed_rows(
    x: torch.Tensor, group: RankGroup, dim: int, positions: tuple[int, ...], places: tuple[int, ...], count: int
) -> torch.Tensor:
    """Sum each row with several holders over them."""
    shape = list(x.shape)
    shape[dim] = count
    parts, summed = x.new_zeros(shape), x.clone()
    copy_rows(parts, places, x, positions, dim)
    copy_rows(summed, positions, all_reduce(parts, group), places, dim)
    return summed


_sum_rows = linear("SumRows", _summed_rows, lambda gradient, _, *how: _sum_shared_rows(gradient, *how))
# Identity; the gradient of each row with several holders is summed over them.
_sum_shared_rows: Linear[[RankGroup, int, tuple[int, ...], tuple[int, ...], int]]
_sum_shared_rows = linear("SumSharedRows", lambda x, *_: x.detach(), lambda x, _, *how: _sum_rows(x, *how))

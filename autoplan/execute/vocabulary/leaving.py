"""Split logits in a caller's hands: a DTensor beside which plain tensors may stand.

The problem: who trains computes a loss of their own, by `F.cross_entropy(logits.view(-1, size), labels.view(-1))`, by
the divergence from a teacher, by `gather(logits, -1, ids)`. DTensor refuses to compute with plain tensors, and where it
is asked for a number it gives one rank's part of it.

So the logits that leave a model are a DTensor of a class of ours, and so is what is made of them. Beside plain tensors
they do what they do beside a model's own loss (`split_logits.py`): a cross-entropy is the vocabulary-parallel one, and
whatever is not understood gets whole logits. What comes out of sums over the vocabulary is summed over ranks at once,
on every rank, so that a number that only one rank asks for later waits for nobody. Among themselves they are DTensors
as any other, also under torch's `loss_parallel`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoplan.common.errors import AutoplanError
from autoplan.common.nested import flatten_tensors
from autoplan.execute.collectives import RankGroup
from autoplan.execute.vocabulary.split_logits import can_stay_split, columns_in, dressed, split_class
from autoplan.ops.records.record import writes_in_place

__all__ = ["LeavingLogits", "leaving"]

_T = torch.Tensor


def leaving(local: torch.Tensor, mesh: DeviceMesh, dim: int, size: int) -> torch.Tensor:
    """A rank's columns as logits that leave the model, split over the ranks of a 1-D mesh in `dim`."""
    dim %= local.dim()
    shape = torch.Size([*local.shape[:dim], size, *local.shape[dim + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    found = DTensor.from_local(local.contiguous(), mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
    return found if torch.compiler.is_compiling() else _ours(found)


class LeavingLogits(DTensor):
    """See above."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NUMBERS:
            _refuse_part(args[0], func)
        if _beside_plain(args, kwargs) and not (func is F.cross_entropy and _loss_parallel()):
            return _with_plain(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func is _T.__deepcopy__:
                return _ours(_T.__deepcopy__(_theirs(args[0]), *args[1:]))
            return _kept(func(*args, **kwargs), args)


_NUMBERS = frozenset((_T.item, _T.tolist, _T.numpy, _T.__array__, _T.__float__, _T.__int__, _T.__bool__, _T.__index__))


def _ours(found: DTensor) -> torch.Tensor:
    found.__class__ = LeavingLogits
    return found


def _theirs(logits: torch.Tensor) -> DTensor:
    """The same as a plain DTensor, without a gradient."""
    made: Any = logits.detach()
    made.__class__ = DTensor
    found: DTensor = made
    return found


def _refuse_part(logits: Any, func: Any) -> None:
    """Numbers of a part would be taken for all of them, and a gather here would wait for ranks that do not ask."""
    if any(not placed.is_replicate() for placed in logits.placements):
        raise AutoplanError(
            f"{func.__name__} of logits of shape {list(logits.shape)} that are split over ranks",
            hint="gather them on every rank first: logits.full_tensor(), or autoplan.gather_logits(model)",
        )


def _beside_plain(args: Any, kwargs: Any) -> bool:
    """DTensor takes numbers that need no gradient; that of others would be a DTensor where nobody expects one."""
    return any(not isinstance(x, DTensor) and _counts(x) for _, x in flatten_tensors((args, kwargs)))


def _counts(x: torch.Tensor) -> bool:
    return x.dim() > 0 or x.requires_grad


def _loss_parallel() -> bool:
    """torch's own vocabulary-parallel loss takes plain targets, and gives a DTensor."""
    return torch.ops.aten.nll_loss_forward.default in DTensor._op_dispatcher._custom_op_handlers


def _with_plain(func: Any, args: Any, kwargs: Any) -> Any:
    mesh = next(x.device_mesh for _, x in flatten_tensors((args, kwargs)) if isinstance(x, LeavingLogits))
    if writes_in_place(func.__name__) and isinstance(args[0], LeavingLogits):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_spread(args, mesh), **_spread(kwargs, mesh))
    found = func(*_opened(args), **_opened(kwargs))
    return columns_in(found, lambda local, kind: leaving(local, mesh, kind.dim_from_end, kind.vocabulary))


def _spread(value: Any, mesh: DeviceMesh) -> Any:
    """Plain tensors, which every rank has alike, as DTensors: what is changed in place stays what it is."""
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and _counts(value):
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    if isinstance(value, dict):
        return {key: _spread(item, mesh) for key, item in value.items()}
    return type(value)([_spread(item, mesh) for item in value]) if type(value) in (tuple, list) else value


def _opened(value: Any) -> Any:
    """Arguments in which our logits are split ones as inside of a model, or whole."""
    if isinstance(value, LeavingLogits):
        placed, group = value.placements[0], RankGroup.of(value.device_mesh)
        if type(placed) is not Shard or not can_stay_split(value.shape[placed.dim], group):
            return value.full_tensor()
        kind = split_class(group, value.shape[placed.dim], placed.dim - value.dim())
        return dressed(value.to_local(), kind)
    if isinstance(value, dict):
        return {key: _opened(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)([_opened(item) for item in value])
    return value


def _kept(found: Any, given: Any) -> Any:
    """Results of ours are ours, and no result is a part of a sum."""
    if type(found) is DTensor and not any(found is x for _, x in flatten_tensors(given)):
        if any(placed.is_partial() for placed in found.placements):
            found = found.redistribute(placements=[Replicate()] * found.device_mesh.ndim)
        return _ours(found)
    if isinstance(found, (tuple, list)) and any(type(item) is DTensor for item in found):
        return type(found)([_kept(item, given) for item in found])
    return found

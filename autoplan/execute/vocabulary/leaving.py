"""Logits that leave the model: whole, sharded, or next to a loss."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.modules import module as calls

from autoplan.common.errors import AutoplanError
from autoplan.common.layout import chunk
from autoplan.common.nested import change_input, changed_inside, flatten_tensors
from autoplan.common.requirements import older_than
from autoplan.execute.collectives import RankGroup, gather_pieces, sum_over_ranks
from autoplan.execute.executors import Around, At, executes
from autoplan.execute.vocabulary.split_logits import as_kind, can_stay_split, columns_in, moved, split_class
from autoplan.ops.records.record import writes_in_place
from autoplan.patches.patched import Kept
from autoplan.patches.sharding_rules import left_untraced
from autoplan.values import SplitLogits, VocabularyTable

# Split logits in a caller's hands: a DTensor beside which plain tensors may stand.
#
# The problem: who trains computes a loss of their own, by `F.cross_entropy(logits.view(-1, size), labels.view(-1))`,
# by the divergence from a teacher, by `gather(logits, -1, ids)`. DTensor refuses to compute with plain tensors, and
# where it is asked for a number it gives one rank's part of it.
#
# So the logits that leave a model are a DTensor of a class of ours, and so is what is made of them. Beside plain
# tensors they do what they do beside a model's own loss (`split_logits.py`): a cross-entropy is the
# vocabulary-parallel one, and whatever is not understood gets whole logits. What comes out of sums over the
# vocabulary is summed over ranks at once, on every rank, so that a number that only one rank asks for later waits for
# nobody. Among themselves they are DTensors as any other, also under torch's `loss_parallel`.

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
            # Numbers of a part would be taken for all of them, and a gather here would wait for ranks that do not
            # ask.
            logits = args[0]
            if any(not placed.is_replicate() for placed in logits.placements):
                raise AutoplanError(
                    f"{func.__name__} of logits of shape {list(logits.shape)} that are split over ranks",
                    hint="gather them on every rank first: logits.full_tensor(), or autoplan.gather_logits(model)",
                )
        if func.__name__ in _WRITTEN_WHOLE and isinstance(args[0], LeavingLogits):
            return _write_whole(func, args, kwargs)
        if func.__name__ in _READ_WHOLE or (func is _T.__getitem__ and _has_list(args[1])):
            return _read_whole(func, args, kwargs)
        # DTensor takes numbers that need no gradient; that of others would be an unexpected DTensor.
        # torch's own vocabulary-parallel loss takes plain targets, and gives a DTensor.
        if any(not isinstance(x, DTensor) and _counts(x) for _, x in flatten_tensors((args, kwargs))) and not (
            func is F.cross_entropy
            and (torch.ops.aten.nll_loss_forward.default in DTensor._op_dispatcher._custom_op_handlers)
        ):
            mesh = next(x.device_mesh for _, x in flatten_tensors((args, kwargs)) if isinstance(x, LeavingLogits))
            if writes_in_place(func.__name__) and isinstance(args[0], LeavingLogits):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*_spread(args, mesh), **_spread(kwargs, mesh))
            found = func(*_opened(args), **_opened(kwargs))
            return columns_in(found, lambda local, kind: leaving(local, mesh, kind.dim_from_end, kind.vocabulary))
        try:
            with torch._C.DisableTorchFunctionSubclass():
                if func is _T.__deepcopy__:
                    return _ours(_T.__deepcopy__(_theirs(args[0]), *args[1:]))
                found = _kept(func(*args, **kwargs), args)
        except NotImplementedError:  # this version of DTensor does not know the op
            writes = writes_in_place(func.__name__) and isinstance(args[0], LeavingLogits)
            return _write_whole(func, args, kwargs) if writes else _read_whole(func, args, kwargs)
        return _excerpts(found.full_tensor()) if func is _T.__getitem__ and _is_copy(found, args) else found


_NUMBERS = frozenset((_T.item, _T.tolist, _T.numpy, _T.__array__, _T.__float__, _T.__int__, _T.__bool__, _T.__index__))


# What DTensor does not do along a dim that is split, or (cumsum) does wrong: measured by tests/execute/vocabulary/
_READ_WHOLE = frozenset((
    "__iter__", "_is_all_true", "argwhere", "bincount", "chunk", "corrcoef", "cov", "cummax", "cummin", "cumprod",
    "cumsum", "cumulative_trapezoid", "diagonal", "diff", "fft", "hist", "histc", "histogram", "hsplit",
    "log_sigmoid", "logcumsumexp", "logsigmoid", "median", "mode", "nanmedian", "nanquantile", "narrow", "nonzero",
    "norm", "prod", "quantile", "renorm", "rfft", "searchsorted", "select", "split", "split_with_sizes", "std",
    "std_mean", "tensor_split", "trapezoid", "trapz", "unbind", "unfold", "unique", "unique_consecutive", "var",
    "var_mean", "vector_norm", "vsplit",
    # DTensor of torch 2.11 cannot compute their gradients; 2.12 was not tried
    *(("max", "min", "sort", "topk") if older_than("torch", (2, 13)) else ()),
))  # fmt: skip
_VIEWS = frozenset((
    "__getitem__", "__iter__", "chunk", "diagonal", "hsplit", "narrow", "select", "split", "split_with_sizes",
    "tensor_split", "unbind", "unfold", "vsplit",
))  # fmt: skip
_WRITTEN_WHOLE = frozenset((
    "__setitem__", "cumprod_", "cumsum_", "fill_diagonal_", "index_add_", "index_copy_", "index_fill_", "index_put_",
    "index_reduce_", "masked_scatter_", "put_", "renorm_", "scatter_", "scatter_add_", "scatter_reduce_", "tril_",
    "triu_",
))  # fmt: skip
_warned: set[str] = set()


def _has_list(index: Any) -> bool:
    """Does an index hold a list of places? DTensor would make a plain tensor of it."""
    return any(isinstance(item, (list, range)) for item in (index if isinstance(index, tuple) else (index,)))


def _is_copy(found: Any, args: Any) -> bool:
    """Is it no view, where torch gives one: a part of the split dim by numbers and slices?"""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    views = all(item is None or item is Ellipsis or isinstance(item, (int, slice)) for item in index)
    was_split = any(placed.is_shard() for placed in args[0].placements)
    return views and was_split and not any(placed.is_shard() for placed in found.placements)


def _warn_once(func: Any) -> None:
    if func.__name__ not in _warned:
        _warned.add(func.__name__)
        warnings.warn(
            f"{func.__name__} of logits that are split over ranks needs whole rows: they were gathered for it on every "
            "rank. With autoplan.gather_logits(model, True) they leave the model whole. This is said once",
            stacklevel=4,
        )


def _whole(value: Any) -> Any:
    """Arguments with whole logits in the place of split ones."""
    return value.full_tensor() if isinstance(value, LeavingLogits) else changed_inside(value, _whole)


def _write_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Change whole rows, and take back the columns of this rank."""
    _warn_once(func)
    logits, *others = args
    whole = logits.full_tensor().clone()
    func(whole, *_whole(others), **_whole(kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        logits.copy_(_spread(whole, logits.device_mesh))
    return None if func is _T.__setitem__ else logits


def _read_whole(func: Any, args: Any, kwargs: Any) -> Any:
    _warn_once(func)
    found = func(*_whole(args), **_whole(kwargs))
    return _excerpts(found) if func.__name__ in _VIEWS and not _has_list(args[-1]) else found


class Excerpt(torch.Tensor):
    """A part of logits that was gathered where a view was asked for: writing into it would not reach the logits."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if writes_in_place(func.__name__) and args and isinstance(args[0], Excerpt):
            raise AutoplanError(
                f"{func.__name__} of a part of logits that are split over ranks: the part is a copy",
                hint="write into the logits themselves (z[..., 0] = value), or autoplan.gather_logits(model)",
            )
        found = func(*_plain(args), **_plain(kwargs))
        return _excerpts(found) if func.__name__ in _VIEWS else found


def _excerpts(found: Any) -> Any:
    if isinstance(found, torch.Tensor) and not isinstance(found, DTensor):
        return found.as_subclass(Excerpt)
    if isinstance(found, (tuple, list)):
        return type(found)([_excerpts(item) for item in found])
    return found if isinstance(found, torch.Tensor) else iter([_excerpts(item) for item in found])


def _plain(value: Any) -> Any:
    """Arguments without excerpts."""
    if isinstance(value, Excerpt):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(torch.Tensor)
    return changed_inside(value, _plain)


def _ours(found: DTensor) -> torch.Tensor:
    found.__class__ = LeavingLogits
    return found


def _theirs(logits: torch.Tensor) -> DTensor:
    """The same as a plain DTensor, without a gradient."""
    made: Any = logits.detach()
    made.__class__ = DTensor
    plain: DTensor = made
    return plain


def _counts(x: torch.Tensor) -> bool:
    return x.dim() > 0 or x.requires_grad


def _spread(value: Any, mesh: DeviceMesh) -> Any:
    """Plain tensors, which every rank has alike, as DTensors: what is changed in place stays what it is."""
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and _counts(value):
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return changed_inside(value, lambda item: _spread(item, mesh))


def _opened(value: Any) -> Any:
    """Arguments in which our logits are split ones as inside of a model, or whole."""
    if isinstance(value, LeavingLogits):
        placed, group = value.placements[0], RankGroup.of(value.device_mesh)
        if type(placed) is not Shard or not can_stay_split(value.shape[placed.dim], group):
            return value.full_tensor()
        kind = split_class(group, value.shape[placed.dim], placed.dim - value.dim())
        return as_kind(value.to_local(), kind)
    return changed_inside(value, _opened)


def _kept(found: Any, given: Any) -> Any:
    """Results of ours are ours, and no result is a part of a sum."""
    if type(found) is DTensor and not any(found is x for _, x in flatten_tensors(given)):
        if any(placed.is_partial() for placed in found.placements):
            found = _WholeGradient.apply(found.redistribute(placements=[Replicate()] * found.device_mesh.ndim))
        return _ours(found)
    if isinstance(found, (tuple, list)) and any(type(item) is DTensor for item in found):
        return type(found)([_kept(item, given) for item in found])
    return found


class _WholeGradient(torch.autograd.Function):
    """Sums a gradient that is a sum over ranks still: torch cannot make a part of a mean or of a maximum of it."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> DTensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if isinstance(gradient, DTensor) and any(placed.is_partial() for placed in gradient.placements):
            return gradient.redistribute(placements=[Replicate()] * gradient.device_mesh.ndim)
        return gradient


# The two ends of a language model on a rank: the table that takes token ids in, the head that gives logits out.


@executes(VocabularyTable)
def _table(planned: VocabularyTable, at: At) -> Around:
    """Token ids as rows of our piece; foreign ones look up row 0 and are zeroed afterwards."""
    group, names, where = at.group, at.names, at.where
    own = chunk(planned.rows, group.size, group.rank)
    masks: list[torch.Tensor] = []  # runs may nest

    def mask(ids: torch.Tensor) -> torch.Tensor:
        foreign = (ids < own.start) | (ids >= own.stop)
        masks.append(foreign)
        return (ids - own.start).masked_fill(foreign, 0)

    def leave(output: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(output.masked_fill(masks.pop().unsqueeze(-1), 0), group)

    return Around(lambda args, kwargs: change_input(args, kwargs, names, planned.path, mask, where), leave)


@executes(SplitLogits)
def _head(planned: SplitLogits, at: At) -> Around:
    """Whole, or split and knowing it, or (when nothing but the model's exit will read them) plain columns.

    Whole before a loss, too, if someone listens to the head's backward: torch then passes its output on by a function
    of autograd, which takes columns for what they show.

    Compiled code that is given such logits from outside, where a graph was broken between head and loss, leaves them as
    they are. (Inside of a graph they are traced: it begins before them.)
    """
    running, group, module = at.running, at.group, at.module
    columns = split_class(group, planned.columns, planned.dim)
    kept = Kept(left_untraced((LeavingLogits, *moved(columns))))
    stays = can_stay_split(planned.columns, group)

    def leave(output: torch.Tensor) -> torch.Tensor:
        if running.whole_logits or (running.loss and (not stays or _is_watched(module))):
            return gather_pieces(output, group, planned.dim, planned.columns)
        return as_kind(output, columns) if running.loss else output

    return Around(leave=leave, kept=kept)


def _is_watched(module: nn.Module) -> bool:
    """Do hooks wait for its backward?"""
    if torch.compiler.is_compiling():
        return False
    own = module._backward_hooks or module._backward_pre_hooks
    return bool(own or calls._global_backward_hooks or calls._global_backward_pre_hooks)

"""Logits that leave the model: gathered, sharded, or next to a loss."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.modules import module as calls

from autoplan.common.errors import AutoplanError
from autoplan.common.layout import chunk
from autoplan.common.nested import change_input, changed_inside, flatten_tensors
from autoplan.common.requirements import older_than
from autoplan.common.torch_internals import DisableTorchFunctionSubclass, backward_hooks, op_handlers
from autoplan.execute.collectives import RankGroup, gather_pieces, sum_over_ranks, with_sums
from autoplan.execute.executors import Around, At, executes
from autoplan.execute.vocabulary.split_logits import as_kind, can_stay_split, columns_in, moved, split_class
from autoplan.ops.records.record import writes_in_place
from autoplan.patches.patched import Kept
from autoplan.patches.sharding_rules import left_untraced
from autoplan.values import SplitLogits, VocabularyTable

# Sharded logits outside the model: a DTensor that may be combined with plain tensors.
#
# The problem: training code computes its own loss, by `F.cross_entropy(logits.view(-1, size), labels.view(-1))`, by the
# divergence from a teacher, by `gather(logits, -1, ids)`. DTensor refuses to compute with plain tensors, and a number
# read from it is one rank's partial value.
#
# So the logits that leave a model are of a subclass of DTensor, and so are results computed from them. With plain
# tensors they behave as with the model's own loss (`split_logits.py`): cross-entropy is vocabulary-parallel, and any op
# that is not understood gets gathered logits. Partial sums over the vocabulary are all-reduced at once on every rank,
# so that a number which only one rank reads later needs no communication. Combined with each other they are ordinary
# DTensors, also under torch's `loss_parallel`.

_T = torch.Tensor


def leaving(local: torch.Tensor, mesh: DeviceMesh, dim: int, size: int) -> torch.Tensor:
    """Return a rank's columns as logits that leave the model, sharded in `dim` over a 1-D mesh."""
    dim %= local.dim()
    shape = torch.Size([*local.shape[:dim], size, *local.shape[dim + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    logits = DTensor.from_local(local.contiguous(), mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
    return logits if torch.compiler.is_compiling() else _ours(logits)


class LeavingLogits(DTensor):
    """Logits that left the model sharded over the vocabulary: a DTensor that may be combined with plain tensors."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NUMBERS:
            # The local value would be taken for the global one, and a gather would hang if only some ranks read it.
            logits = args[0]
            if any(not placed.is_replicate() for placed in logits.placements):
                raise AutoplanError(
                    f"{func.__name__} of logits of shape {list(logits.shape)} that are sharded over ranks",
                    hint="gather them first: logits.full_tensor(), or autoplan.gather_logits(model)",
                )
        if func.__name__ in _WRITTEN_WHOLE and isinstance(args[0], LeavingLogits):
            return _write_whole(func, args, kwargs)
        if func.__name__ in _READ_WHOLE or (func is _T.__getitem__ and _has_list(args[1])):
            return _read_whole(func, args, kwargs)
        # DTensor takes scalars without gradient; the gradient of others would be an unexpected DTensor.
        # torch's own vocabulary-parallel loss takes plain targets, and returns a DTensor.
        if any(not isinstance(x, DTensor) and _counts(x) for _, x in flatten_tensors((args, kwargs))) and not (
            func is F.cross_entropy and (torch.ops.aten.nll_loss_forward.default in op_handlers())
        ):
            mesh = next(x.device_mesh for _, x in flatten_tensors((args, kwargs)) if isinstance(x, LeavingLogits))
            if writes_in_place(func.__name__) and isinstance(args[0], LeavingLogits):
                with DisableTorchFunctionSubclass():
                    return func(*_spread(args, mesh), **_spread(kwargs, mesh))
            result = func(*_opened(args), **_opened(kwargs))
            return columns_in(result, lambda local, kind: leaving(local, mesh, kind.dim_from_end, kind.full_size))
        try:
            with DisableTorchFunctionSubclass():
                if func is _T.__deepcopy__:
                    detached: Any = args[0].detach()
                    detached.__class__ = DTensor
                    return _ours(_T.__deepcopy__(detached, *args[1:]))
                result = _kept(func(*args, **kwargs), args)
        except NotImplementedError:  # this version of DTensor does not know the op
            writes = writes_in_place(func.__name__) and isinstance(args[0], LeavingLogits)
            return _write_whole(func, args, kwargs) if writes else _read_whole(func, args, kwargs)
        return _excerpts(result.full_tensor()) if func is _T.__getitem__ and _is_copy(result, args) else result


_NUMBERS = frozenset((_T.item, _T.tolist, _T.numpy, _T.__array__, _T.__float__, _T.__int__, _T.__bool__, _T.__index__))


# What DTensor cannot do along a sharded dim, or (cumsum) does wrong: measured by tests/execute/vocabulary/
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
    """Return whether an index contains a list of positions, of which DTensor would make a plain tensor."""
    return any(isinstance(item, (list, range)) for item in (index if isinstance(index, tuple) else (index,)))


def _is_copy(result: Any, args: Any) -> bool:
    """Return whether an index of numbers and slices into the sharded dim gave a copy where torch gives a view."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    views = all(item is None or item is Ellipsis or isinstance(item, (int, slice)) for item in index)
    was_split = any(placed.is_shard() for placed in args[0].placements)
    return views and was_split and not any(placed.is_shard() for placed in result.placements)


def _warn_once(func: Any) -> None:
    if func.__name__ not in _warned:
        _warned.add(func.__name__)
        warnings.warn(
            f"{func.__name__} of logits sharded over ranks needs full rows, so they were gathered on every rank. "
            "autoplan.gather_logits(model, True) makes the model return full logits. This warning is shown once",
            stacklevel=4,
        )


def _whole(value: Any) -> Any:
    """Return arguments with gathered logits instead of sharded ones."""
    return value.full_tensor() if isinstance(value, LeavingLogits) else changed_inside(value, _whole)


def _write_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Write into gathered logits, and copy this rank's columns back."""
    _warn_once(func)
    logits, *others = args
    whole = logits.full_tensor().clone()
    func(whole, *_whole(others), **_whole(kwargs))
    with DisableTorchFunctionSubclass():
        logits.copy_(_spread(whole, logits.device_mesh))
    return None if func is _T.__setitem__ else logits


def _read_whole(func: Any, args: Any, kwargs: Any) -> Any:
    _warn_once(func)
    result = func(*_whole(args), **_whole(kwargs))
    return _excerpts(result) if func.__name__ in _VIEWS and not _has_list(args[-1]) else result


class Excerpt(torch.Tensor):
    """A part of gathered logits where torch would give a view: writing into it would not reach the logits."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if writes_in_place(func.__name__) and args and isinstance(args[0], Excerpt):
            raise AutoplanError(
                f"{func.__name__} of a slice of logits that are sharded over ranks: the slice is a copy",
                hint="write into the logits themselves (z[..., 0] = value), or autoplan.gather_logits(model)",
            )
        result = func(*_plain(args), **_plain(kwargs))
        return _excerpts(result) if func.__name__ in _VIEWS else result


def _excerpts(result: Any) -> Any:
    if isinstance(result, torch.Tensor) and not isinstance(result, DTensor):
        return result.as_subclass(Excerpt)
    if isinstance(result, (tuple, list)):
        return type(result)([_excerpts(item) for item in result])
    return result if isinstance(result, torch.Tensor) else iter([_excerpts(item) for item in result])


def _plain(value: Any) -> Any:
    """Return arguments without excerpts."""
    if isinstance(value, Excerpt):
        with DisableTorchFunctionSubclass():
            return value.as_subclass(torch.Tensor)
    return changed_inside(value, _plain)


def _ours(logits: DTensor) -> torch.Tensor:
    logits.__class__ = LeavingLogits
    return logits


def _counts(x: torch.Tensor) -> bool:
    return x.dim() > 0 or x.requires_grad


def _spread(value: Any, mesh: DeviceMesh) -> Any:
    """Return plain tensors, which are equal on every rank, as replicated DTensors; other values stay as they are."""
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and _counts(value):
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return changed_inside(value, lambda item: _spread(item, mesh))


def _opened(value: Any) -> Any:
    """Return arguments in which leaving logits are SplitLogits, as inside the model, or gathered."""
    if isinstance(value, LeavingLogits):
        placed, group = value.placements[0], RankGroup.of(value.device_mesh)
        if type(placed) is not Shard or not can_stay_split(value.shape[placed.dim], group):
            return value.full_tensor()
        kind = split_class(group, value.shape[placed.dim], placed.dim - value.dim())
        return as_kind(value.to_local(), kind)
    return changed_inside(value, _opened)


def _kept(result: Any, args: Any) -> Any:
    """Return results of leaving logits as leaving logits too, and all-reduce partial ones."""
    if type(result) is DTensor and not any(result is x for _, x in flatten_tensors(args)):
        whole = with_sums(result)
        return _ours(result if whole is result else _WholeGradient.apply(whole))
    if isinstance(result, (tuple, list)) and any(type(item) is DTensor for item in result):
        return type(result)([_kept(item, args) for item in result])
    return result


class _WholeGradient(torch.autograd.Function):
    """Identity; all-reduces a partial gradient, from which torch could not compute that of a mean or a maximum."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> DTensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return with_sums(gradient) if isinstance(gradient, DTensor) else gradient


# The two ends of a language model on a rank: the token embedding and the head.


@executes(VocabularyTable)
def _table(planned: VocabularyTable, at: At) -> Around:
    """Map token ids to local rows of the table; foreign ids look up row 0 and are zeroed afterwards."""
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
    """Return logits gathered, as SplitLogits, or (if only the model's exit will read them) as plain columns.

    They are gathered before a loss, too, if the head has backward hooks: torch then passes its output through an
    autograd Function, which would take the columns for what they show.

    Compiled code that gets such logits from outside, after a graph break between head and loss, leaves them untraced.
    (Inside a graph they are traced: the graph begins before them.)
    """
    running, group, module = at.running, at.group, at.module
    columns = split_class(group, planned.columns, planned.dim)
    untraced = Kept(left_untraced((LeavingLogits, *moved(columns))))
    stays = can_stay_split(planned.columns, group)

    def leave(output: torch.Tensor) -> torch.Tensor:
        has_backward_hooks = not torch.compiler.is_compiling() and bool(
            backward_hooks(module)
            or module._backward_pre_hooks
            or calls._global_backward_hooks
            or calls._global_backward_pre_hooks
        )
        if running.whole_logits or (running.loss and (not stays or has_backward_hooks)):
            return gather_pieces(output, group, planned.dim, planned.columns)
        return as_kind(output, columns) if running.loss else output

    return Around(leave=leave, kept=untraced)

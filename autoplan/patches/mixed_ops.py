"""Ops on DTensors and plain tensors together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoplan.common.nested import flatten_tensors
from autoplan.common.torch_internals import dispatcher, schema_of
from autoplan.patches.patched import Hold, Kept, Place, Registered, apart, hold, while_split

# DTensor raises an error about mixed tensors in C++. Only if a flag of the thread allows them it asks Python methods
# how each tensor lies, and what to do. So the flag is set, and the methods let ops of a sharded model be computed by
# us; for all others they behave as without the flag. Autograd takes the flag along into its own threads. Ops of
# DTensors alone do not reach these methods, but for the first of a kind.

Answer = Callable[[Any, DeviceMesh, Any, Any], Any]  # to an op, with a mesh and arguments; NOT_OURS: torch's own

NOT_OURS = object()


def mixed_by(mixed: Answer, ordered: Answer, in_place: Answer) -> tuple[Hold, ...]:
    """Let `mixed` compute ops of DTensors and plain tensors, `ordered` those that depend on the order of rows, and
    `in_place` those that DTensor cannot make in place, in this thread, until the holds are released."""
    flag = _flag_of_this_thread()
    flag.kept = flag.kept or Kept(hold(mixed_ops_patch, _places(mixed, ordered, in_place)))
    allowed = Registered(flag, "allowed", True)
    return hold(mixed_ops_patch, _places(mixed, ordered, in_place)), hold(mixed_ops_patch, [allowed])


class _Flag:
    """The flag of one thread, as a dict of one entry. `kept`: keeps the methods as long as the flag is set. `asked`:
    whether someone else, by `implicit_replication()`, wants plain tensors to be replicated ones."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.kept: Kept | None = None
        self.asked = False

    def get(self, key: str, absent: object) -> object:
        return True if _read() else absent

    def __setitem__(self, key: str, value: bool) -> None:
        torch._C._set_dtensor_allow_implicit_replication(value)

    def pop(self, key: str, _: object) -> None:
        if threading.get_ident() == self.thread:  # else it stays set, and so do the methods, until the thread ends
            torch._C._set_dtensor_allow_implicit_replication(self.asked)
            self.kept = None


def _read() -> bool:
    return bool(torch._C._get_dtensor_allow_implicit_replication())


_of_thread = threading.local()


def _flag_of_this_thread() -> _Flag:
    if not hasattr(_of_thread, "flag"):
        _of_thread.flag = _Flag()
    return _of_thread.flag


def _places(mixed: Answer, ordered: Answer, in_place: Answer) -> Iterator[Place]:
    dispatcher_class = type(dispatcher())

    def asked(self: Any) -> bool:
        return _flag_of_this_thread().asked

    def ask(self: Any, value: bool) -> None:
        _flag_of_this_thread().asked = value
        torch._C._set_dtensor_allow_implicit_replication(True)

    def laid(plain: Any) -> Any:
        def _try_replicate_spec_for_scalar_tensor(self: Any, op: Any, tensor: torch.Tensor, mesh: Any) -> Any:
            if tensor.numel() == 1 or asked(self) or mixed(None, mesh, (), {}) is NOT_OURS:
                return plain(self, op, tensor, mesh)
            flag = _flag_of_this_thread()
            flag.asked = True
            try:
                return plain(self, op, tensor, mesh)
            finally:
                flag.asked = False

        return _try_replicate_spec_for_scalar_tensor

    def answered(plain: Any) -> Any:
        def _propagate_op_sharding_dispatch_slow_path(
            self: Any, op: Any, args: Any, kwargs: Any, info: Any, *more: Any, **others: Any
        ) -> Any:
            tensors = flatten_tensors((args, kwargs)) if not asked(self) else ()
            if any(not isinstance(tensor, DTensor) and tensor.numel() != 1 for _, tensor in tensors):
                result = mixed(op, info.compute_mesh, args, kwargs)
            else:
                result = ordered(op, info.compute_mesh, args, kwargs) if op.overloadpacket in _OF_ORDER else NOT_OURS
            if result is not NOT_OURS:
                return result
            try:
                return plain(self, op, args, kwargs, info, *more, **others)
            except RuntimeError:
                result = in_place(op, info.compute_mesh, args, kwargs) if schema_of(op).is_mutable else NOT_OURS
                if result is NOT_OURS:
                    raise
                return result

        return _propagate_op_sharding_dispatch_slow_path

    def ended(plain: Any) -> Any:
        def _dispatch_fast_path_python_tail(self: Any, op: Any, args: Any, *more: Any) -> Any:
            if args and isinstance(args[0], torch.Tensor) and not isinstance(args[0], DTensor) and more[-2]:
                return args[0]  # changed in place, by an op whose sharding torch knew: no method was asked
            return plain(self, op, args, *more)

        return _dispatch_fast_path_python_tail

    yield Place(dispatcher_class, "_allow_implicit_replication", lambda _: property(asked, ask))
    yield Place(dispatcher_class, "_try_replicate_spec_for_scalar_tensor", laid)
    yield Place(dispatcher_class, "_propagate_op_sharding_dispatch_slow_path", answered)
    yield Place(dispatcher_class, "_dispatch_fast_path_python_tail", ended)


_ATEN = torch.ops.aten
_OF_ORDER = frozenset(
    (_ATEN.cumsum, _ATEN.cumprod, _ATEN.cummax, _ATEN.cummin, _ATEN.logcumsumexp, _ATEN.flip, _ATEN.roll)
    + (_ATEN.sort, _ATEN.topk, _ATEN.argmax, _ATEN.argmin, _ATEN.tril, _ATEN.triu, _ATEN.diagonal, _ATEN.slice)
    + (_ATEN.select, _ATEN.split, _ATEN.split_with_sizes, _ATEN.unbind, _ATEN.index, _ATEN.index_select, _ATEN.gather)
    + (_ATEN.constant_pad_nd, _ATEN.unfold, _ATEN.cat, _ATEN.convolution)
)


@while_split(
    name="mixed ops",
    replaces="_allow_implicit_replication, _try_replicate_spec_for_scalar_tensor, "
    "_propagate_op_sharding_dispatch_slow_path and _dispatch_fast_path_python_tail of the class of "
    "DTensor._op_dispatcher, and the flag of torch._C._set_dtensor_allow_implicit_replication in the thread",
    why="a function of a parameter on ranks and plain tensors, outside of the model, ends in an error",
    without="functions of parameters on ranks and plain tensors end in torch's error; `autoplan.full_tensors` returns "
    "plain ones",
)
def mixed_ops_patch() -> bool:
    """Return whether DTensor asks these methods about mixed tensors, in this thread, and takes a result for one."""
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    x = torch.ones(2)
    lying = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    seen: list[Any] = []

    def mixed(op: Any, where: Any, args: Any, kwargs: Any) -> Any:
        seen.append((op, where))
        return torch.full((2,), 7.0)

    before = _read()
    with apart():
        holds = mixed_by(mixed, *[lambda *_: NOT_OURS] * 2)
        try:
            result = lying + x
        finally:
            for each in holds:
                each.release()
    asked_for = [where for op, where in seen if op is torch.ops.aten.add.Tensor]
    return result.tolist() == [7, 7] and asked_for == [mesh] and _read() == before

"""Sharding rules that DTensor lacks, its ops with plain tensors, and losses in compiled models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoplan.common.nested import flatten_tensors
from autoplan.common.torch_internals import dispatcher, op_handlers, schema_of
from autoplan.patches.patched import Hold, Kept, Place, Registered, apart, hold, patch, while_split

# Ops that DTensor does not know, by which torch inspects parameters and gradients.
#
# `torch.autograd.detect_anomaly` checks each gradient for NaN, and forward derivatives check the memory layout of
# parameters before they call the model (which then refuses). With DTensor both would fail for want of a sharding rule.


def asked_of_all() -> Hold:
    """Register rules for these ops, on full tensors, until the hold is released."""
    return hold(sharding_rules_patch, _places())


def _places() -> Iterator[Registered]:
    strategies, schemas = _tables()
    for op, (strategy, schema) in _made().items():
        yield Registered(strategies, op, strategy)
        yield Registered(schemas, op, schema)


def _tables() -> tuple[Any, Any]:
    """Return the tables in which DTensor keeps the sharding of ops, and which of their arguments count."""
    sharding_propagator = dispatcher().sharding_propagator
    return sharding_propagator.op_strategy_funcs, sharding_propagator.op_to_schema_info


@cache
def _made() -> dict[Any, tuple[Any, Any]]:
    """Return torch's strategy and schema of each op's rule, by registering it and removing it again."""
    from torch.distributed.tensor.experimental import register_sharding  # a slow import: it loads context parallel

    aten, tables, registered = torch.ops.aten, _tables(), {}
    rules: dict[Any, Callable[..., Any]] = {aten._is_any_true.default: lambda x: [([Replicate()], [Replicate()])]}
    for op in (aten._has_same_storage_numel.default, aten._new_zeros_with_same_feature_meta.default):
        rules[op] = lambda x, y, **_: [([Replicate()], [Replicate(), Replicate()])]
    for op, rule in rules.items():
        before = [table.get(op) for table in tables]
        try:
            register_sharding(op)(rule)
            strategy, schema = (table[op] for table in tables)
        finally:
            for table, entry in zip(tables, before, strict=True):
                table.pop(op, None)
                if entry is not None:
                    table[op] = entry
        registered[op] = strategy, schema
    return registered


@while_split(
    name="sharding rules of ops",
    replaces="entries of DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs and op_to_schema_info, which "
    "torch.distributed.tensor.experimental.register_sharding makes",
    why="anomaly detection and forward-mode AD run ops on parameters for which DTensor has no rule",
    without="anomaly detection and forward-mode AD of a sharded model fail with a missing sharding rule",
)
def sharding_rules_patch() -> bool:
    """Return whether DTensor looks such ops up in these two tables, and finds ours there."""
    tables = _tables()
    before = [dict(table) for table in tables]
    with apart(), asked_of_all():
        inside = all(tables[0].get(op) is strategy and tables[1].get(op) is schema
                     for op, (strategy, schema) in _made().items())  # fmt: skip
    asks = type(dispatcher().sharding_propagator).propagate_op_sharding_non_cached.__code__.co_names
    return inside and [dict(table) for table in tables] == before and "op_strategy_funcs" in asks


# Ops for which DTensor uses the local shard: numbers for Python, and random draws in place.
#
# It reads a rank's own number where others have theirs (`float(gradient.norm())`), and on CPUs draws the same numbers
# for the shards of all ranks.

Handler = Callable[[Any, Any, Any], Any]  # an op, its arguments


def numbers_and_draws(number: Handler, draw: Handler) -> Hold:
    """Let `number` handle the number in a sharded DTensor, and `draw` draws in place, until the hold is released."""
    handlers = op_handlers()
    drawing = (Registered(handlers, op, draw) for op in _DRAWS)
    return hold(ops_by_whole_patch, (Registered(handlers, _NUMBER, number), *drawing))


def answered_by_torch(op: Any, args: Any, kwargs: Any) -> Any:
    """Return torch's own result of an op, from within a handler."""
    handlers = op_handlers()
    handler = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = handler


_NUMBER = torch.ops.aten._local_scalar_dense.default
_DRAWS = (
    torch.ops.aten.uniform_.default,
    torch.ops.aten.normal_.default,
    torch.ops.aten.bernoulli_.float,
    torch.ops.aten.exponential_.default,
)


@while_split(
    name="ops by the whole",
    replaces="entries of DTensor._op_dispatcher._custom_op_handlers",
    why="DTensor returns local numbers of sharded values to Python, and draws the same numbers for all shards",
)
def ops_by_whole_patch() -> bool:
    """Return whether DTensor has such handlers, and none of its own for these ops."""
    handlers = op_handlers()
    before = dict(handlers)

    def answer(op: Any, args: Any, kwargs: Any) -> Any:
        return op

    with apart(), numbers_and_draws(answer, answer):
        inside = all(handlers.get(op) is answer or op in before for op in (_NUMBER, *_DRAWS))
    return inside and dict(handlers) == before


# Split logits in compiled code: an `nn.CrossEntropyLoss` inside of it, and logits from outside.
#
# torch's compiler replaces the module by the function, and bypasses `__torch_function__` of its arguments. For logits
# that are a rank's columns the loss would be that of the columns alone, or an error about a target out of bounds. With
# the patch the function is dispatched like any other.
#
# After a graph break between head and loss, compiled code gets such logits from outside. torch keeps a set of classes
# that it does not trace then (per thread, like all settings of its compiler), to which theirs are added.


def heard_by_classes() -> Hold:
    """Dispatch compiled losses of this class to the classes of their tensors, until the hold is released."""
    return hold(compiled_loss_patch, _loss_places())


def _loss_places() -> Iterator[Place]:
    from torch._dynamo.variables import LambdaVariable
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.torch_function import can_dispatch_torch_function
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    def asking(plain: Any) -> Any:
        def _call_cross_entropy_loss(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            built = plain(self, tx, args, kwargs)

            def loss(input: Any, target: Any) -> Any:
                if can_dispatch_torch_function(tx, (input, target), {}):
                    function = VariableTracker.build(tx, F.cross_entropy)
                    return function.call_function(tx, [input, target, *args], kwargs)
                return built.call_function(tx, [input, target], {})

            return LambdaVariable(loss)

        return _call_cross_entropy_loss

    yield Place(UserDefinedClassVariable, "_call_cross_entropy_loss", asking)


class _Heard(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.cross_entropy:
            return args[1] + kwargs["ignore_index"]
        return super().__torch_function__(func, types, args, kwargs or {})


@while_split(
    name="compiled losses",
    replaces="torch._dynamo.variables.user_defined.UserDefinedClassVariable._call_cross_entropy_loss",
    why="inside a compiled model, sharded logits must dispatch to their own loss",
    without="compiled models need full logits: gather_logits=True",
)
def compiled_loss_patch() -> bool:
    """Return whether a compiled loss reaches the class of its tensor, with all of its settings."""

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.CrossEntropyLoss(ignore_index=5)(logits, target)

    with apart(), heard_by_classes():
        compiled = torch.compile(loss, backend="eager", fullgraph=True)
        dispatched = compiled(torch.ones(1, 3).as_subclass(_Heard), torch.tensor([1]))
        plain = compiled(torch.ones(1, 3), torch.tensor([1]))
    return dispatched.tolist() == [6] and abs(float(plain) - 1.0986) < 1e-3


def left_untraced(classes: Iterable[type]) -> Hold:
    """Make compilers not trace functions of tensors of these classes from outside, until the hold is released."""
    import torch._dynamo.config

    untraced = torch._dynamo.config.nontraceable_tensor_subclasses
    return hold(untraced_logits_patch, (Registered(untraced, kind) for kind in classes))


@patch(
    name="untraced logits",
    replaces="torch._dynamo.config.nontraceable_tensor_subclasses, to which the classes of split logits are added",
    why="after a graph break between head and loss, sharded logits run eagerly in their own code",
    scope="while a model whose head returns sharded logits, or a copy of it, is alive",
    undone="each class is removed when the last such model is collected or undone",
    where="autoplan/execute/vocabulary/leaving.py",
    without="compiled models need full logits: gather_logits=True",
)
def untraced_logits_patch() -> bool:
    """Return whether code with such a tensor is compiled before and after, and not inside."""

    class Apart(torch.Tensor):
        pass

    def compiled() -> int:
        graphs: list[object] = []

        def backend(module: torch.fx.GraphModule, inputs: object) -> Any:
            graphs.append(module)
            return module.forward

        function = torch.compile(lambda x: x.sin() + 1, backend=backend)
        function(torch.ones(2).as_subclass(Apart))
        return len(graphs)

    before = compiled()
    with apart(), left_untraced((Apart,)):
        inside = compiled()
    return (before, inside, compiled()) == (1, 0, 1)


# Ops on DTensors and plain tensors together.
#
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
    flag.kept = flag.kept or Kept(hold(mixed_ops_patch, _mixed_places(mixed, ordered, in_place)))
    allowed = Registered(flag, "allowed", True)
    return hold(mixed_ops_patch, _mixed_places(mixed, ordered, in_place)), hold(mixed_ops_patch, [allowed])


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


def _mixed_places(mixed: Answer, ordered: Answer, in_place: Answer) -> Iterator[Place]:
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
            tensors = list(flatten_tensors((args, kwargs))) if not asked(self) else []
            meshes = {tensor.device_mesh for _, tensor in tensors if isinstance(tensor, DTensor)}  # FSDP2 adds a dim
            if len(meshes) > 1 or any(not isinstance(x, DTensor) and x.numel() != 1 for _, x in tensors):
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

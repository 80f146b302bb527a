"""Sharding rules that DTensor lacks, and losses in compiled models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate

from autoplan.common.torch_internals import dispatcher, op_handlers
from autoplan.patches.patched import Hold, Place, Registered, apart, hold, patch, while_split

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

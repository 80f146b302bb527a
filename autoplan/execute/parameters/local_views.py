"""Let a module's own code see plain local tensors while everyone else sees DTensors.

The problem: parameters are DTensors (so that optimizers, FSDP2 and checkpoints know their placements), but forward code
must compute with the local shard. *Every* reader needs it, not only the owner's forward: a tied head, attention that
passes `self.out_proj.weight` to a fused function, a recurrent layer with its list of flat weights; and again when
activation checkpointing recomputes a block in backward.

So each module gets a subclass of its own class (same name, `isinstance` holds) in which every parameter name is a
property, which returns the local tensor while code of the model runs. That is one flag per model, set by every module's
`_call_impl`: below `__call__`, `torch.compile` and activation checkpointing alike, and reset after any error. The local
tensor is a differentiable view: its gradient becomes the DTensor's gradient, all-reduced first where every rank
computes a partial one (`ParameterRule.gradient`).
A DTensor on more than one mesh dim is FSDP2's sharded parameter between uses. No forward may compute with it, and FSDP2
reads it through the attribute: it is returned unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.common.errors import AutoplanError
from autoplan.common.torch_internals import (
    DisableTorchFunction,
    function_mode_is_active,
    local_part,
    local_spec,
    outside_of_vmap,
    own_parameters,
    unwrapped,
)
from autoplan.execute.collectives import (
    RankGroup,
    Recorded,
    all_reduce,
    copy_to_ranks,
    gather_over_ranks,
    part_of_sum,
    recorded_again,
)
from autoplan.execute.guard.marks import GRADIENT, PART, looking_on
from autoplan.execute.hooks.unseen import SHAPE_ERRORS, refuse_transforms, unseen_path
from autoplan.execute.parameters.held import (
    Held,
    is_local_of,
    is_made_of_summed,
    part_of_whole,
    record_of,
    sum_shared_rows,
    sum_together,
)
from autoplan.execute.parameters.new_forward import has_new_forward, is_read_by_a_new_forward
from autoplan.execute.parameters.state_dict import gathered, local_piece
from autoplan.patches.classes import reduced, subclass_of


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
        local = _held_view(parameter, held)
    elif summed is not None and parameter is summed[0]:
        local = part_of_whole(parameter, held, summed[1])
    elif summed is not None and is_made_of_summed(parameter):  # put in its place by `torch.func.functional_call`
        return parameter
    elif isinstance(parameter, DTensor) and (not lies_on_tp or held.read.group == held.group):
        return parameter  # FSDP2's sharded parameter
    else:
        local = part_of_whole(_held_view(parameter, held), held, None)
    # last, so that what autograd saves for it is saved by the module's own run, and again by a checkpoint's
    if held is not None and held.divide and held.group.size > 1 and lies_on_tp:
        local = part_of_sum(local, held.group.size)
    asked = parameter.requires_grad and not local.requires_grad  # also where no gradients are recorded
    return local.detach().requires_grad_() if asked and not torch.compiler.is_compiling() else local


def _held_view(parameter: Any, held: Held | None) -> Any:
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
            local = sum_shared_rows(local, held.group, held.dim, shared.positions, shared.places, shared.count)
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


@contextmanager
def reading_locally(model: nn.Module) -> Iterator[None]:
    """Read a model's parameters as local tensors in the block, for methods besides forward (`get_image_features`)."""
    record = record_of(model)
    if record is None:
        yield
        return
    before = record.reading.inside
    record.reading.inside = True
    try:
        yield
    finally:
        record.reading.inside = before


@cache
def view_class(cls: Any, names: tuple[str, ...]) -> type:
    """Return the subclass of `cls` whose parameters `names` read as local tensors while the model runs."""
    namespace: dict[str, Any] = {
        "_call_impl": _reading_call(cls),
        "_apply": _keeping_attributes(cls),
        "get_parameter": _reading_by_name(cls),
        "__setattr__": _tying(cls),
        "__reduce_ex__": _reduce_to(cls, names),
    }
    # Public methods whose code reads one of the parameters (`get_image_features`) compute with local tensors too when
    # they are called from outside.
    for name in dir(cls):
        method: Any = getattr(cls, name, None)
        if not isinstance(method, FunctionType) or hasattr(nn.Module, name) or name.startswith("_"):
            continue
        if len(inspect.signature(method).parameters) > 1:
            code = getattr(inspect.unwrap(method), "__code__", None)
            if code is not None and not set(names).isdisjoint(code.co_names):
                namespace[name] = _reading_method(name, method)
    namespace.update((name, _parameter_property(name, getattr(cls, name, None))) for name in names)
    if issubclass(cls, nn.RNNBase):
        namespace["_flat_weights"] = _flat_weights_property()
        # Views are new tensors each time, which recurrent layers would take for changed weights.
        namespace["_update_flat_weights"] = lambda self: None
    return subclass_of(cls, namespace)


def _reading_call(cls: type) -> Callable[..., Any]:
    base: Any = cls._call_impl  # type: ignore[attr-defined]

    def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        record = record_of(self)
        if record is None:  # another instance, made by code that called `type(module)`
            return base(self, *args, **kwargs)
        reading = record.reading
        if reading.inside:  # inside of a module that does the rest
            return base(self, *args, **kwargs)
        refuse_transforms(self)
        guard = None if torch.compiler.is_compiling() else reading.guard
        reading.new_forward = not torch.compiler.is_compiling() and has_new_forward(self)
        reading.inside = True
        sum_together(self, reading, _held_view)
        try:
            if guard is None:
                return base(self, *args, **kwargs)
            guard.enter(self, "", args, kwargs)
            return guard.leave(self, "", base(self, *args, **kwargs))
        except SHAPE_ERRORS as error:
            named = None if torch.compiler.is_compiling() else unseen_path(self, error)
            if named is None:
                raise
            raise named from error
        finally:
            reading.inside = False
            while reading.summed:
                reading.summed.pop().summed.clear()
            if guard is not None:
                guard.close()

    return _call_impl


def _keeping_attributes(cls: type) -> Callable[..., Any]:
    """Wrap `_apply` (`to`, `float`, …), which replaces DTensors and would lose attributes of the old parameter."""
    base: Any = cls._apply  # type: ignore[attr-defined]

    def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        noted = {name: vars(parameter) for name, parameter in own_parameters(self).items() if parameter is not None}
        result = base(self, *args, **kwargs)
        for name, parameter in own_parameters(self).items():
            if parameter is not None and name in noted and noted[name] is not vars(parameter):
                vars(parameter).update({key: value for key, value in noted[name].items() if key not in vars(parameter)})
        return result

    return _apply


def _reading_by_name(cls: type) -> Callable[..., Any]:
    base: Any = cls.get_parameter  # type: ignore[attr-defined]

    def get_parameter(self: nn.Module, target: str) -> Any:
        path, _, last = target.rpartition(".")
        owner = self.get_submodule(path)
        return getattr(owner, last) if last in own_parameters(owner) else base(self, target)

    return get_parameter


def _tying(cls: type) -> Callable[..., Any]:
    """Wrap `__setattr__`: a tied parameter that a forward assigns again (`head.weight = table.weight`) is a local
    tensor, which torch does not accept. FSDP2 assigns parameters in a forward: torch would read the old one first."""
    base: Any = cls.__setattr__

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        parameters = own_parameters(self) if "training" in vars(self) else {}
        if type(value) is torch.Tensor and (own := parameters.get(name)) is not None:
            if is_local_of(value, own):
                return
            raise AutoplanError(f"a forward ties {type(self).__name__}.{name}", hint="tie weights before planning")
        if base is nn.Module.__setattr__ and name in parameters and isinstance(value, nn.Parameter):
            parameters[name] = value
        else:
            base(self, name, value)

    return __setattr__


def _reading_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def read(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        record = record_of(self)
        outermost = record is not None and not record.reading.inside and not torch.compiler.is_compiling()
        guard = record.reading.guard if record is not None and outermost else None
        with reading_locally(self):
            if guard is None:
                return method(self, *args, **kwargs)
            try:
                guard.enter(self, name, args, kwargs)
                return guard.leave(self, name, method(self, *args, **kwargs))
            finally:
                guard.close()

    return read


def stored_tensor(module: nn.Module, name: str) -> Any:
    """Return the tensor stored under a name, whatever property its class defines: local while the model runs."""
    parameter, record = own_parameters(module)[name], record_of(module)
    if record is None or not record.reading.inside:
        return parameter
    return local_view(parameter, record.parameters.get(name), record.summed.get(name))


def _parameter_property(name: str, computed: Any = None) -> property:
    """Return the property for a parameter. `computed`: a class's own property, which computes its weight from the
    stored one."""

    def read(self: nn.Module) -> Any:
        parameters = own_parameters(self)
        if name not in parameters:  # removed: weight_norm and the like set a plain attribute instead
            if name in self.__dict__:
                return self.__dict__[name]
            raise AttributeError(name)  # nn.Module.__getattr__ goes on, and raises the usual error
        record = record_of(self)
        if record is None:  # a module that has our class but no record of its own
            if isinstance(parameters[name], DTensor):
                raise AutoplanError(
                    f"a {type(self).__name__} was created in the forward from the sharded parameter {name!r} "
                    f"({list(parameters[name].shape)} in full), without its sharding",
                    hint="call the module itself, or copy it with copy.copy; or replicate it: "
                    "overrides={name: 'replicate'}",
                )
            return parameters[name]
        if not record.reading.inside:
            gathered = record.reading.gathered
            return parameters[name] if gathered is None else gathered.as_sharded(parameters[name])
        if isinstance(computed, property) and computed.fget is not None:
            return computed.fget(self)
        held = record.parameters.get(name)
        if record.reading.new_forward and not torch.compiler.is_compiling() and is_read_by_a_new_forward(self):
            return whole_view(parameters[name], held)
        if not function_mode_is_active():
            return local_view(parameters[name], held, record.summed.get(name))
        with DisableTorchFunction():  # a scoped function mode must not count these calls
            local = local_view(parameters[name], held, record.summed.get(name))
        if held is not None and local is not None and not torch.compiler.is_compiling():
            if (marks := looking_on()) is not None and local is not parameters[name]:
                marks.weights[local] = name
            if marks is not None and (held.dim is not None or held.gradient != "local"):
                whole = None if held.dim is None else tuple(parameters[name].shape)
                marks.add(local, GRADIENT if whole is None else PART, whole)
        return local

    def write(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = value

    def delete(self: nn.Module) -> None:
        if name not in self.__dict__:
            raise AttributeError(name)
        del self.__dict__[name]

    return property(read, write, delete)


def refresh_flat_weights(module: nn.Module) -> None:
    """Let a recurrent layer compute with the parameters that it holds now."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [own_parameters(module).get(name) for name in module._flat_weights_names]


def _flat_weights_property() -> property:
    """Return the property for the list of weights that recurrent layers keep and compute with."""

    def read(self: Any) -> Any:
        if "_flat_weights" not in self.__dict__:
            raise AttributeError("_flat_weights")
        record = record_of(self)
        if record is None or not record.reading.inside:
            return self.__dict__["_flat_weights"]
        return [getattr(self, name, None) for name in self._flat_weights_names]

    def write(self: Any, value: Any) -> None:
        self.__dict__["_flat_weights"] = value

    return property(read, write)


def _reduce_to(cls: type, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return a `__reduce_ex__` that rebuilds the subclass, which copies and pickles cannot find by its name."""
    return lambda self, protocol: reduced(view_class(cls, names), _rebuild, (cls, names), self, protocol)


def _rebuild(cls: type, names: tuple[str, ...]) -> nn.Module:
    subclass: Any = view_class(cls, names)
    return subclass.__new__(subclass)

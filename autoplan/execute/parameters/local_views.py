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
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.common.errors import AutoplanError
from autoplan.common.torch_internals import (
    DisableTorchFunction,
    function_mode_is_active,
    local_part,
    own_modules,
    own_parameters,
    transforms_are_active,
)
from autoplan.execute.guard.marks import GRADIENT, PART, looking_on
from autoplan.execute.hooks.unseen import SHAPE_ERRORS, refuse_transforms, unseen_path
from autoplan.execute.parameters.held import ModuleRecord, attributes_of, is_local_of, record_of
from autoplan.execute.parameters.views import local_view, sum_together, whole_view
from autoplan.patches.classes import reduced, subclass_of


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
        if not before:
            record.reading.forget_views()


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
        reading.new_forward = not torch.compiler.is_compiling() and _has_new_forward(self)
        reading.inside = True
        sum_together(self, reading)
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
            reading.forget_views()
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


def _one_view(name: str, parameter: Any, record: ModuleRecord) -> Any:
    """Return what a call reads of a parameter: the same tensor each time, of tied ones too, with the parameter's
    attributes. A gradient may be asked for by it after a layer has used it (`torch.autograd.grad(loss, weight)`)."""
    held, reading = record.parameters.get(name), record.reading
    if not isinstance(parameter, DTensor) or torch.compiler.is_compiling() or transforms_are_active():
        return local_view(parameter, held, record.summed.get(name))
    local, key = local_part(parameter), (id(local_part(parameter)), torch.is_grad_enabled())
    alone = not (held is not None and (held.read is not None or held.divide)) and not torch.is_inference_mode_enabled()
    earlier = reading.views.get(key) if alone else None
    if (
        earlier is not None
        and (earlier[2] is held or earlier[2] == held)
        and earlier[3].requires_grad is parameter.requires_grad
    ):
        return earlier[3]
    view = local_view(parameter, held, record.summed.get(name))
    if view is not parameter and view is not None:
        vars(view).update(attributes_of(parameter))
    if alone:
        reading.views[key] = local, parameter, held, view
    return view


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
        if record.reading.new_forward and not torch.compiler.is_compiling() and _is_read_by_a_new_forward(self):
            return whole_view(parameters[name], held)
        if not function_mode_is_active():
            return _one_view(name, parameters[name], record)
        with DisableTorchFunction():  # a scoped function mode must not count these calls
            local = _one_view(name, parameters[name], record)
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


# A forward that a library set on a model (a fused head: log-probabilities without logits).
#
# It may read weights of modules that it does not call. No hooks of the plan run there, and each rank computes the same:
# it reads full tensors (`whole_view`), and each rank keeps its rows of the gradient.

_CALLED = nn.Module._call_impl.__code__


def _has_new_forward(module: nn.Module, depth: int = 3) -> bool:
    """Return whether a library set a forward on a module, or on a model inside of it (which adapters wrap)."""
    if "forward" in vars(module) or not depth:
        return "forward" in vars(module)
    return any(_has_new_forward(child, depth - 1) for child in own_modules(module).values() if child is not None)


def _is_read_by_a_new_forward(module: nn.Module) -> bool:
    """Return whether a forward that was set on another module, not that of its class, reads this module."""
    frame: Any = sys._getframe(2)
    if frame.f_locals.get("self") is module:
        return False
    passed: set[CodeType | None] = set()
    while frame.f_code is not _CALLED:
        passed.add(frame.f_code)
        if frame.f_back is None:
            return False
        frame = frame.f_back
    caller = frame.f_locals["self"]
    if caller is module or "forward" not in vars(caller):
        return False
    new, cls = vars(caller)["forward"], caller.__class__
    running = getattr(getattr(new, "__func__", new), "__code__", None)  # hooks of the caller read parameters, too
    return running in passed and _code_of_forward(cls) not in passed


@cache
def _code_of_forward(cls: Any) -> CodeType | None:
    return getattr(inspect.unwrap(cls.forward), "__code__", None)

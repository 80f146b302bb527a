"""Let a module's own code see plain local tensors while everyone else sees DTensors.

The problem: parameters live as DTensors (so optimizers, FSDP2 and checkpoints know how they lie), but forward code must
compute with this rank's piece. The piece is needed by *every* reader, not only by the owner's forward: a tied head that
calls `F.linear(x, self.embed.weight)`, attention that hands `self.out_proj.weight` to a fused function, a recurrent
layer with its list of flat weights; and again when activation checkpointing runs a block a second time, from backward.

So each module is given a subclass of its own class (same name, `isinstance` holds) in which every parameter name is a
property. It reads `_parameters`, the one place torch itself keeps them, and while code of the model runs it returns the
local tensor. "While code of the model runs" is one flag per model, raised by every module's `_call_impl`: below
`__call__`, `torch.compile` and activation checkpointing alike, and lowered again whatever is raised.

The local tensor is a differentiable view: its gradient becomes the DTensor's gradient, summed over ranks first where
every rank computes only a part of it (`ParameterRule.gradient`).

A forward that a library sets on a model (a fused head: log-probabilities without logits) may read weights of modules
that it does not call. Nothing of the plan is done there, and each rank computes the same: it reads whole tensors, and
each rank keeps its rows of the gradient.

A DTensor on more than one mesh dim is the form FSDP2 keeps between uses. No forward may compute with it, and FSDP2 does
read it through the attribute: it is handed out as it is.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.common.errors import AutoplanError
from autoplan.execute.collectives import (
    RankGroup,
    Recorded,
    all_reduce,
    copy_rows,
    copy_to_ranks,
    gather_over_ranks,
    part_of_sum,
    recorded_again,
)
from autoplan.execute.guard.marks import GRADIENT, PART, looking_on
from autoplan.execute.hooks.unseen import SHAPE_ERRORS, refuse_transforms, unseen_path
from autoplan.execute.parameters.held import NOTHING, Held, part_of_whole, record_of, summed_together
from autoplan.execute.parameters.state_dict import gathered, local_piece
from autoplan.patches.classes import subclass_of

# --------------------------------------------------------------------------------------------------------- the view


def local_view(
    parameter: torch.Tensor | None, held: Held | None, summed: Mapping[int, torch.Tensor] = NOTHING
) -> torch.Tensor | None:
    """The plain tensor this rank computes with."""
    lies_on_tp = isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1
    if parameter is None or held is None or held.read is None:
        local = _held_view(parameter, held)
    elif id(parameter) in summed:
        local = part_of_whole(parameter, held, summed[id(parameter)])
    elif isinstance(parameter, DTensor) and (not lies_on_tp or held.read.group == held.group):
        return parameter  # as FSDP2 keeps it
    else:
        local = part_of_whole(_held_view(parameter, held), held, None)
    # last of all: what is saved for it is saved where the module runs, and again where a checkpoint runs it again
    if held is not None and held.divide and held.group.size > 1 and lies_on_tp:
        return part_of_sum(local, held.group.size)
    return local


def _held_view(parameter: Any, held: Held | None) -> Any:
    """What this rank of tp holds of it, undivided."""
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
            local = _SumSharedRows.apply(local, held.group, held.dim, shared.positions, shared.places, shared.count)
    return local


def whole_view(parameter: torch.Tensor | None, held: Held | None) -> torch.Tensor | None:
    """The whole tensor, for code that computes the same with it on every rank of tp."""
    if not isinstance(parameter, DTensor) or held is None:
        return parameter
    if parameter.device_mesh.ndim > 1:  # in an FSDP2 unit that does not run: it is not gathered
        whole: torch.Tensor = _WholeOfUnit.apply(parameter, held)
        return whole
    local = held.held_of(_local(parameter))
    return local if held.dim is None else gather_over_ranks(local, held.group, held.dim, held.rows)


class _WholeOfUnit(Recorded):
    """A parameter as FSDP2 keeps it, whole. Its gradient is the mean of the data-parallel ranks', as FSDP2's."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, held: Held) -> torch.Tensor:
        ctx.spec, ctx.held = parameter._spec, held
        return held.to_checkpoint_order(gathered(parameter.detach(), held.room if held.dim is not None else None))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        spec, held = ctx.spec, ctx.held
        for dim in range(spec.mesh.ndim - 1):
            group = RankGroup.of(spec.mesh.get_group(dim))
            gradient = all_reduce(gradient, group) / group.size
        piece = local_piece(gradient, held, spec.mesh, spec.placements)
        return DTensor(piece.contiguous(), spec, requires_grad=False), None


_CALLED = nn.Module._call_impl.__code__


def _has_new_forward(module: nn.Module, depth: int = 3) -> bool:
    """Has a library set a forward on it, or on a model inside of it (which adapters wrap)?"""
    if "forward" in vars(module):
        return True
    return depth > 0 and any(_has_new_forward(one, depth - 1) for one in module._modules.values() if one is not None)


def _is_read_by_a_new_forward(module: nn.Module) -> bool:
    """Does the forward that someone set on another module read it, and not the forward of that module's class?"""
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
    running = getattr(getattr(new, "__func__", new), "__code__", None)  # hooks of the module read, too
    return running in passed and _code_of_forward(cls) not in passed


@cache
def _code_of_forward(cls: Any) -> CodeType | None:
    code: CodeType | None = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code


def _local(parameter: DTensor) -> torch.Tensor:
    """As `to_local`, without the search for how a gradient lies: it lies as its parameter does."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return parameter.to_local()
    local: torch.Tensor = _ToLocal.apply(parameter)
    return local


class _ToLocal(Recorded):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        local = parameter._local_tensor
        ctx.spec, ctx.stride = parameter._spec, local.stride()
        ctx.set_materialize_grads(False)
        return local.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> DTensor | None:
        if gradient is None:
            return None
        gradient, spec = (
            gradient.to_dense() if gradient.is_sparse else gradient,
            ctx.spec,
        )  # no DTensor holds a sparse one
        if recorded_again() or gradient.dtype != spec.tensor_meta.dtype:
            return DTensor.from_local(
                gradient, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
            )
        if gradient.stride() != ctx.stride:  # it is kept as its parameter lies in any case
            gradient = gradient.new_empty_strided(gradient.shape, ctx.stride).copy_(gradient)
        return DTensor(gradient, spec, requires_grad=False)


class _SumSharedRows(Recorded):
    """Identity whose gradient is summed over the holders of each row that several ranks hold."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _SumRows.apply(gradient, *ctx.how), None, None, None, None, None


class _SumRows(Recorded):
    """The sum over the holders of each row that several ranks hold; for a second derivative, each holder's as it is."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: RankGroup,
        dim: int,
        positions: tuple[int, ...],
        places: tuple[int, ...],
        count: int,
    ) -> torch.Tensor:
        ctx.how = group, dim, positions, places, count
        shape = list(x.shape)
        shape[dim] = count
        parts, summed = x.new_zeros(shape), x.clone()
        copy_rows(parts, places, x, positions, dim)
        copy_rows(summed, positions, all_reduce(parts, group), places, dim)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _SumSharedRows.apply(gradient, *ctx.how), None, None, None, None, None


@contextmanager
def reading_locally(model: nn.Module) -> Iterator[None]:
    """For methods of a model that are not its forward (`get_image_features`): its parameters read as local tensors."""
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


# ------------------------------------------------------------------------------------------------------ the subclass


@cache
def view_class(cls: Any, names: tuple[str, ...]) -> type:
    """The subclass of `cls` whose parameters `names` read as local tensors while the model runs."""
    namespace: dict[str, Any] = {
        "_call_impl": _reading_call(cls),
        "_apply": _keeping_attributes(cls),
        "get_parameter": _reading_by_name(cls),
        "__reduce_ex__": _reduce_to(cls, names),
    }
    # Public methods besides forward whose code mentions one of the parameters: called from outside
    # (`get_image_features`), they compute with local tensors too.
    found: dict[str, Any] = {}
    for name in dir(cls):
        method: Any = getattr(cls, name, None)
        if not isinstance(method, FunctionType) or hasattr(nn.Module, name) or name.startswith("_"):
            continue
        if len(inspect.signature(method).parameters) > 1:
            code = getattr(inspect.unwrap(method), "__code__", None)
            if code is not None and not set(names).isdisjoint(code.co_names):
                found[name] = _reading_method(name, method)
    namespace.update(found)
    namespace.update((name, _parameter_property(name, getattr(cls, name, None))) for name in names)
    if issubclass(cls, nn.RNNBase):
        namespace["_flat_weights"] = _flat_weights_property()
        namespace["_update_flat_weights"] = _keep_flat_weights
    subclass: type = subclass_of(cls, namespace)
    return subclass


def _reading_call(cls: type) -> Callable[..., Any]:
    base: Any = cls._call_impl  # type: ignore[attr-defined]

    def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        record = record_of(self)
        if record is None:  # another module of the class, made by code that asked for `type(module)`
            return base(self, *args, **kwargs)
        reading = record.reading
        if reading.inside:  # below a module that does the rest
            return base(self, *args, **kwargs)
        refuse_transforms(self)
        guard = None if torch.compiler.is_compiling() else reading.guard
        reading.new_forward = not torch.compiler.is_compiling() and _has_new_forward(self)
        reading.inside = True
        reading.summed = summed_together(self, _held_view) if reading.summing else {}
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
            reading.inside, reading.summed = False, {}
            if guard is not None:
                guard.close()

    return _call_impl


def _keeping_attributes(cls: type) -> Callable[..., Any]:
    """`to`, `float` and their like swap a DTensor for a new one, and what was noted on a parameter would go with it."""
    base: Any = cls._apply  # type: ignore[attr-defined]

    def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        noted = {name: vars(one) for name, one in self._parameters.items() if one is not None}
        made = base(self, *args, **kwargs)
        for name, one in self._parameters.items():
            if one is not None and name in noted and noted[name] is not vars(one):
                vars(one).update({key: value for key, value in noted[name].items() if key not in vars(one)})
        return made

    return _apply


def _reading_by_name(cls: type) -> Callable[..., Any]:
    base: Any = cls.get_parameter  # type: ignore[attr-defined]

    def get_parameter(self: nn.Module, target: str) -> Any:
        path, _, last = target.rpartition(".")
        owner = self.get_submodule(path)
        return getattr(owner, last) if last in owner._parameters else base(self, target)

    return get_parameter


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
    """What a module keeps under a name, whatever its class makes of that: local while the model runs."""
    parameter, record = module.__dict__["_parameters"][name], record_of(module)
    if record is None or not record.reading.inside:
        return parameter
    return local_view(parameter, record.parameters.get(name), record.reading.summed)


def _parameter_property(name: str, computed: Any = None) -> property:
    """`computed`: the property of a class that makes its weight out of what is stored under the same name."""

    def read(self: nn.Module) -> Any:
        parameters = self.__dict__["_parameters"]
        if name not in parameters:  # taken out by someone: weight_norm and its like set a plain attribute instead
            if name in self.__dict__:
                return self.__dict__[name]
            raise AttributeError(name)  # nn.Module.__getattr__ looks further and words the error
        record = record_of(self)
        if record is None:
            return _unrecorded(self, name, parameters[name])
        if not record.reading.inside:
            return parameters[name]
        if isinstance(computed, property) and computed.fget is not None:
            return computed.fget(self)
        held = record.parameters.get(name)
        if record.reading.new_forward and not torch.compiler.is_compiling() and _is_read_by_a_new_forward(self):
            return whole_view(parameters[name], held)
        if not torch._C._is_torch_function_mode_enabled():
            return local_view(parameters[name], held, record.reading.summed)
        with torch._C.DisableTorchFunction():  # a scoped function mode counts the module's calls, not ours
            local = local_view(parameters[name], held, record.reading.summed)
        if held is not None and local is not None and not torch.compiler.is_compiling():
            marks = looking_on()
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


def _unrecorded(module: nn.Module, name: str, parameter: Any) -> Any:
    """A parameter of a module that has our class and nothing of what we know of the module that it was taken from."""
    if isinstance(parameter, DTensor):
        raise AutoplanError(
            f"a {type(module).__name__} was made during the forward with the parameter {name!r} of one that lies on "
            f"ranks ({list(parameter.shape)} in all), and does not know how it lies",
            hint="call the module itself, or copy it with copy.copy; or keep it whole: overrides={name: 'replicate'}",
        )
    return parameter


def _flat_weights_property() -> property:
    """Recurrent layers keep a list of their weights next to the attributes and compute with the list."""

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


def _keep_flat_weights(self: nn.Module) -> None:
    """Views are new tensors each time; recurrent layers take that for changed weights and would store them."""


# ------------------------------------------------------------------------------------------------ copies and pickles


def _reduce_to(cls: type, names: tuple[str, ...]) -> Callable[..., Any]:
    """The subclass cannot be found by its name, so copies and pickles say how to make it again."""

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        made: Any = view_class(cls, names)
        how, what, *rest = super(made, self).__reduce_ex__(max(2, protocol))
        if getattr(how, "__name__", "") == "__newobj__" and what == (made,):
            return (_rebuild, (cls, names), *rest)
        return (how, what, *rest)  # a class derived from ours, or with its own way: theirs to rebuild

    return __reduce_ex__


def _rebuild(cls: type, names: tuple[str, ...]) -> nn.Module:
    made: Any = view_class(cls, names)
    module: nn.Module = made.__new__(made)
    return module

"""Buffers and parameters seen from outside: rebuild buffers, gather full tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.options import check_argument
from autoplan.common.random_values import BUILDING
from autoplan.common.torch_internals import own_buffers, own_parameters, transient_buffers
from autoplan.execute.agreement import fail_together, meet, same_model, voters_of
from autoplan.execute.collectives import all_reduce_over
from autoplan.execute.parameters.held import held_parameters, plain_name, record_of
from autoplan.execute.parameters.optimizer import mark_parameters
from autoplan.execute.parameters.state_dict import whole_tensor

# Rebuild the non-persistent buffers of a meta model.
#
# The problem: rotary frequencies, slopes and masks are computed when a model is built and are in no checkpoint; on the
# meta device there is nothing to compute them from later. A model of a known library can be built again, so a twin of
# the same class is built, with its parameters on meta (which cost nothing) and its buffers real. Other modules have no
# such recipe and are refused by name.
#
# Adapters of a meta model are on meta, too. The twin gets such adapters as their library makes them, on weights that
# are all NaN and take no memory: an adapter computed from weights is NaN as well.


Rebuilt = tuple[dict[str, Any], str, torch.Tensor]  # the place that a tensor belongs to, and the tensor


def rebuild_buffers(model: nn.Module) -> None:
    """Complete a sharded model after `to_empty`: restore what a distributed checkpoint does not fill.

    Buffers that no checkpoint holds (rotary frequencies) are computed again, tied weights are tied again, and
    parameters get their marks back. Call it after `model.to_empty(device=...)`, before the weights are loaded and the
    optimizer is made.
    """
    check_argument("model", model, nn.Module, "pass the model itself, an nn.Module")
    mark_parameters(model)
    # One parameter under all its names, as before `to_empty`.
    first: dict[int, nn.Parameter] = {}
    for module in model.modules():
        record = record_of(module)
        for name, held in record.parameters.items() if record is not None else ():
            parameter = own_parameters(module)[name]
            if parameter is not None:
                own_parameters(module)[name] = first.setdefault(id(held), parameter)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    wanted = {
        (path, name): (path, module, name)
        for path, module in model.named_modules()
        for name in transient_buffers(module)
        if own_buffers(module).get(name) is not None
    }
    passing = [*wanted.values(), *(place for place in _passing_meta(model) if place[::2] not in wanted)]
    for where, name, value in _rebuilt(model, passing, device):
        where[name] = value


def rebuilt_passing_tensors(model: nn.Module, device: torch.device) -> list[Rebuilt]:
    """Return a replacement for every meta tensor that no checkpoint holds: non-persistent buffers, and tensors in plain
    attributes. The model does not change before they are put in their places."""
    return _rebuilt(model, list(_passing_meta(model)), device)


def new_adapters(model: nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return these adapter parameters and buffers, full, as their library makes them. Draws from this rank's stream."""
    if not names:
        return {}
    twins, adapters = _twin_modules(model, list(names)), {}
    for name in names:
        path, _, own = name.rpartition(".")
        value = getattr(twins.get(path), own, None)
        if not isinstance(value, torch.Tensor) or value.is_meta:
            raise _cannot_rebuild([name])
        if value.is_floating_point() and value.isnan().any():
            raise AutoplanError(
                f"{name} is computed from the model's weights, which were on meta when the adapter was created",
                hint="add the adapter to a model with real weights, or use one whose initialisation does not need them "
                "(such as LoRA's)",
            )
        adapters[name] = value.detach()
    return adapters


def _rebuilt(model: nn.Module, wanted: list[tuple[str, nn.Module, str]], device: torch.device) -> list[Rebuilt]:
    if not wanted:
        return []
    places: list[Rebuilt] = []
    names = sorted(f"{path}.{name}".lstrip(".") for path, _, name in wanted)
    twins = _twin_modules(model, names)
    for path, module, name in wanted:
        twin = twins.get(plain_name(path))
        built = getattr(twin, name, None) if twin is not None else None
        if not isinstance(built, torch.Tensor) or built.is_meta:
            raise _cannot_rebuild([f"{path}.{name}"])
        value = built.detach().to(device=device)
        if name in own_buffers(module):
            record, old = record_of(module), own_buffers(module)[name]
            held = record.buffers.get(name) if record is not None else None
            value = held.buffer(value) if held is not None else value
            places.append((own_buffers(module), name, value.to(old.dtype) if old is not None else value))
        else:
            places.append((module.__dict__, name, value))
    return places


def _passing_meta(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for path, module in model.named_modules():
        for name, buffer in own_buffers(module).items():
            if buffer is not None and buffer.is_meta and name in transient_buffers(module):
                yield path, module, name
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                yield path, module, name


def _cannot_rebuild(names: list[str]) -> AutoplanError:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return AutoplanError(
        f"{', '.join(names[:5])}{more} are in no checkpoint, and were created on the meta device",
        hint="set these buffers to real tensors before load_weights, or build the model with real buffers",
    )


def _twin_modules(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    base = conventions().base_of(model)
    record = record_of(base)
    build = conventions().builder_of(record.original if record is not None else type(base), base)
    if build is None:
        raise _cannot_rebuild(names)
    for empty_is_meta in (True, False):  # a few models make a buffer from an empty tensor
        state = torch.get_rng_state()
        try:
            with BUILDING, _parameters_on_meta(empty_is_meta), torch.no_grad():
                twin = build()
        finally:
            torch.set_rng_state(state)
        if not any(True for _ in _passing_meta(twin)):
            break
    if conventions().base_names(model):
        # Replace the meta parameters by real ones that expand a single NaN.
        filled: dict[int, nn.Parameter] = {}
        for module in twin.modules():
            for name, old in own_parameters(module).items():
                if old is not None:
                    number = torch.nan if old.is_floating_point() else 0
                    value = torch.full((), number, dtype=old.dtype, device="cpu").expand(old.shape)
                    own_parameters(module)[name] = filled.setdefault(id(old), nn.Parameter(value, old.requires_grad))
        with torch.no_grad():
            twin = conventions().adapted_as(model, twin)
    return dict(twin.named_modules(remove_duplicate=False))


@contextmanager
def _parameters_on_meta(empty_is_meta: bool) -> Iterator[None]:
    """Build parameters of this thread on meta; with `empty_is_meta` their memory is never even allocated."""
    thread = threading.get_ident()

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        if empty_is_meta:
            with _EmptyOnMeta():
                yield
        else:
            yield
    finally:
        handle.remove()


class _EmptyOnMeta(TorchFunctionMode):
    """A mode in which `torch.empty` without a device, as modules call it for parameters, returns a meta tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None and kwargs.get("out") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


# Gather full tensors: parameters or gradients under the checkpoint's names, in its shapes and row order.
#
# `DTensor.full_tensor()` of a packed weight is in rank order, so comparing it to anything outside is silently wrong.
# `full_tensors` is right for every parameter, under FSDP2 too.


def full_tensors(model: nn.Module, grads: bool = False) -> dict[str, torch.Tensor]:
    """Return every parameter (or its gradient, if it has one) as a plain full tensor. Tied names share one tensor.

    Collective: every rank of the mesh must call it. A gradient that only some ranks have counts as zero on the others.
    """
    check_argument("model", model, nn.Module, "pass the model itself, an nn.Module")
    with fail_together(voters_of(model), "full_tensors"):
        parameters = list(held_parameters(model))
        meet(same_model(model))
        owners = {id(parameter): parameter for _, parameter, _ in parameters}
        present = [True] * len(owners)
        if grads:
            # A gradient is gathered if at least one rank has it.
            flags = torch.tensor([parameter.grad is not None for parameter in owners.values()], dtype=torch.int32)
            meshes = [parameter.device_mesh for parameter in owners.values() if isinstance(parameter, DTensor)]
            mesh = max(meshes, key=lambda mesh: mesh.ndim, default=None)
            if mesh is not None:
                flags = all_reduce_over(flags.to(mesh.device_type), mesh, "max")
            present = [bool(flag) for flag in flags.tolist()]
        wanted = dict(zip(owners, present, strict=True))
        whole: dict[int, torch.Tensor] = {}
        result: dict[str, torch.Tensor] = {}
        for fqn, parameter, held in parameters:
            if not wanted[id(parameter)]:
                continue
            if id(parameter) not in whole:
                tensor: torch.Tensor = parameter
                if grads:
                    tensor = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                whole[id(parameter)] = whole_tensor(tensor, held)
            result[fqn] = whole[id(parameter)]
        return result

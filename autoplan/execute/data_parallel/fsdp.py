"""FSDP2 on top of tensor parallelism, and the parameters that it must skip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.torch_version import TorchVersion

from autoplan.common.errors import AutoplanError
from autoplan.common.nested import change_at, flatten_tensors
from autoplan.common.options import DataParallel
from autoplan.common.torch_internals import local_part, local_spec, place_local, unset_fake_temporarily
from autoplan.execute.collectives import all_reduce_over, in_backward, like, mesh_device
from autoplan.execute.data_parallel.lost import list_sharded, refuse_copy, watch_lost
from autoplan.execute.data_parallel.units import Units, choose_units, cut_dim, is_stack
from autoplan.execute.quantised.modules import compute_in, is_packed
from autoplan.execute.tensor_parallel import applied, record
from autoplan.values import Stack

# Ranks that skip a block still gather its FSDP2 unit, and add zeros to its gradients.
#
# The problem: FSDP2 gathers a unit when it runs. A rank whose batch has no image does not run the vision tower, so its
# next all-gather meets another rank's all-gather of the tower: a deadlock. No rank knows what the others skip.
#
# So ranks exchange their positions wherever they may diverge: at the first block of a stack, where the class of its
# blocks changes, at every other unit, and at the end of the forward. While they are at different places, those at the
# first one run on, and the others walk through it: its unit is gathered and freed as if it ran, with a scalar for
# activations. The graph of each unit joins the next value, so that backward visits the same units in the same order on
# every rank. A unit that all ranks skip is not gathered.
#
# Ranks do this after `model.set_reduce_scatter_unused_params(True)`, FSDP2's own call for parameters that only some
# ranks use. It costs one all-reduce of a few integers at each of these places, and at each block that others walk
# through. If all ranks enter blocks of one class together, they must leave them together.


@dataclass(frozen=True)
class Place:
    """The entry of one unit. `parting`: ranks always exchange positions here; elsewhere only once they have diverged.
    `problem`: why it cannot be walked through."""

    names: tuple[str, ...]
    parting: bool = True
    problem: str = ""
    block: bool = False


@dataclass
class Places:
    """All places of a model, in the order in which they are walked through, and one rank's progress along them."""

    model: nn.Module
    mesh: DeviceMesh
    places: tuple[Place, ...]
    asked: bool = False
    accompanied: bool = False  # whether others walk through what runs on this rank
    joining: list[torch.Tensor] = field(default_factory=list)  # values for backward to visit: they join the next one

    def watch_rest(self) -> None:
        """Register the hooks of units, after FSDP2 has wrapped them: these run around FSDP2's."""
        self.model.register_forward_pre_hook(self._begin)
        for number, place in enumerate(self.places):
            for name in place.names:
                module = self.model.get_submodule(name)
                module.register_forward_pre_hook(partial(self._arrive, number), prepend=True, with_kwargs=True)
                if place.block:
                    module.register_forward_hook(self._leave)

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.joining.clear()
        self.accompanied = False
        self.asked = any(
            getattr(group, "reduce_scatter_unused_params", False)
            for place in self.places
            for group in getattr(self._unit(place)._get_fsdp_state(), "_fsdp_param_groups", ())
        )

    def _arrive(self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.asked or in_backward() or not (self.accompanied or self.places[number].parting):
            return None
        inputs = [(path, x) for path, x in flatten_tensors((args, kwargs)) if x.is_floating_point()]
        inputs.sort(key=lambda item: not item[1].requires_grad)
        self._meet(number, [x for _, x in inputs])
        if not self.joining or not inputs:
            return None
        changed = change_at((args, kwargs), inputs[0][0], self._joined, type(module).__name__)
        self.joining.clear()
        return changed

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Keep an output for backward: others walk backward through this unit, so this rank must visit it too, used or
        not."""
        if self.accompanied and not in_backward():
            self.joining += [x for _, x in flatten_tensors(output) if x.requires_grad][:1]

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self.asked:
            return None
        self._meet(len(self.places), [])
        for path, x in flatten_tensors(output) if self.joining else ():
            output = change_at(output, path, self._joined, type(module).__name__) if x.requires_grad else output
        self.asked = False
        return output

    def _meet(self, here: int, given: Sequence[torch.Tensor]) -> None:
        """Walk through the units of other ranks until the unit here, whose inputs are `given`, may run."""
        self.accompanied = False
        while True:
            # Every place where a rank is: 2 where backward will visit the unit there, else 1.
            recorded = bool(given) and any(x.requires_grad for x in (*given, *self.joining))
            at_places = torch.zeros(len(self.places) + 1, dtype=torch.int32)
            at_places[here] = 1 + recorded
            at_places = all_reduce_over(at_places.to(mesh_device(self.mesh)), self.mesh, "max")
            positions = {place: value > 1 for place, value in enumerate(at_places.tolist()) if value}
            if positions.keys() == {here}:
                return
            first = min(positions)
            if self.places[first].problem:
                raise AutoplanError(
                    f"some ranks skip {self.places[first].names[0]}: {self.places[first].problem}",
                    hint="run it on every rank, with zeros where a rank has no input for it",
                )
            if first == here:
                self.accompanied = True
                return  # the others walk through this unit now
            self._walk(self._unit(self.places[first]), positions[first])

    def _walk(self, unit: FSDPModule, recorded: bool) -> None:
        """Gather and free a unit without computing, and record it for backward where a run would be."""
        assert isinstance(unit, nn.Module)
        value = torch.zeros((), device=mesh_device(self.mesh), requires_grad=recorded and torch.is_grad_enabled())
        if value.requires_grad and self.joining:
            value = self._joined(value)
            self.joining.clear()
        state = unit._get_fsdp_state()
        (value,), _ = state._pre_forward(unit, (value,), {})
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in unit.parameters()):
            value = value if value.requires_grad else value.detach().requires_grad_()
        self.joining.append(state._post_forward(unit, (value,), value * 1))

    def _joined(self, x: torch.Tensor) -> torch.Tensor:
        return _Joined.apply(x, *self.joining)

    def _unit(self, place: Place) -> FSDPModule:
        unit = self.model.get_submodule(place.names[0])
        assert isinstance(unit, FSDPModule)
        return unit


class _Joined(torch.autograd.Function):
    """Identity; in backward the values that join it get zero gradients."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *joining: torch.Tensor) -> torch.Tensor:
        ctx.joining = [(x.shape, x.dtype, x.device) for x in joining]
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.joining)


def places_of(model: nn.Module, mesh: DeviceMesh, stacks: Sequence[Stack], units: Units) -> Places | None:
    """Return the places of a model in FSDP2 units; None where all blocks are of one class in one stack."""
    blocks = {unit.names[0] for unit in units.units if unit.block}
    inner = {n for unit in units.units for n in unit.names if any(n.startswith(f"{block}.") for block in blocks)}
    others = [unit for unit in units.units if not unit.block and not inner.intersection(unit.names)]
    early = [Place(unit.names) for unit in others if len(unit.names) == 1 and not unit.last]
    late = [
        Place(unit.names, problem=f"{', '.join(unit.names)} are one FSDP2 unit" if len(unit.names) > 1 else "")
        for unit in others if len(unit.names) > 1 or unit.last
    ]  # fmt: skip
    towers: list[Place] = []
    trunks: list[Place] = []
    for stack in stacks:
        before = None
        for name in (name for name in stack.fqns if name in blocks):
            units_inside = sorted(unit for unit in inner if unit.startswith(f"{name}."))
            problem = f"{units_inside[0]} inside it is an FSDP2 unit of its own" if units_inside else ""
            kind = type(model.get_submodule(name))  # blocks of another class (cross-attention) may be skipped alone
            place = Place((name,), kind is not before, problem, block=True)
            (trunks if stack.kind == "decoder" else towers).append(place)
            before = kind
    if len(stacks) < 2 and sum(place.parting for place in (*towers, *trunks)) < 2:
        return None
    return Places(model, mesh, (*towers, *early, *trunks, *late))


# Fully sharded data parallelism (FSDP2) over the blocks, after tensor parallelism and checkpointing.
#
# Each unit (`units.py`) is gathered before its forward and freed after it. The last block of a stack stays gathered,
# because backward begins with it; so does the model's own unit. Prefetching can look further ahead than FSDP2's one
# unit.


def _precision(options: DataParallel, model: nn.Module) -> MixedPrecisionPolicy:
    """Return the given policy, or one that only sums half-precision gradients in float32."""
    if isinstance(options.mp_policy, MixedPrecisionPolicy):
        return options.mp_policy
    if options.mp_policy:
        return default_precision()
    half = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters() if p.requires_grad)
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)


def default_precision() -> MixedPrecisionPolicy:
    """Return the policy that computes in bfloat16 and sums gradients and returns outputs in float32."""
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)


def shard_data_parallel(
    model: nn.Module, mesh: DeviceMesh, stacks: tuple[Stack, ...], options: DataParallel, *, kept: bool = False
) -> None:
    """Wrap every unit, then the model itself. `kept`: blocks stay gathered by default."""
    if kept and options.reshard_after_forward is None:
        options = replace(options, reshard_after_forward=False)
    record_before = applied(model)
    assert record_before is not None, "what was done is recorded first"
    # FSDP2 of torch 2.11 supports parameters of floats only
    integers = next((name for name, p in model.named_parameters() if not (p.is_floating_point() or p.is_complex())), "")
    if integers and TorchVersion(torch.__version__) < (2, 12):
        raise AutoplanError(
            f"{integers} holds integers, but FSDP2 of torch {torch.__version__} shards only floating-point parameters",
            hint="install torch 2.12 or later, or leave data parallelism out",
        )
    casts = _precision(options, model).param_dtype
    units = choose_units(model, stacks, frozen=options.frozen, casts=casts is not None)
    for module in model.modules() if casts is not None else ():
        if is_packed(module):
            compute_in(module, casts)
    with unset_fake_temporarily():  # a mesh must return ranks as numbers
        _wrap(model, mesh, units, options, places_of(model, mesh, stacks, units))
    sizes = (mesh.size(0), mesh.size(1)) if mesh.ndim == 2 else (1, mesh.size())
    names = (*(unit.names for unit in units.units), ("",))
    notes = (*record_before.notes, *units.notes)
    record(model, record_before.plan, units=names, data_parallel=sizes, notes=notes)


@torch.no_grad()
def _make_contiguous(model: nn.Module) -> None:
    """Lay parameters out as FSDP2 requires: those of `torch.linalg.qr` or a transposed tensor are in column order."""
    for parameter in model.parameters():
        local = local_part(parameter) if isinstance(parameter, DTensor) else parameter
        if parameter.is_contiguous() and local.is_contiguous():
            continue
        local = local.detach().contiguous()
        if not isinstance(parameter, DTensor):
            parameter.data = local
            continue
        mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
        stride = torch.empty(shape, device="meta").stride()
        sharded = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        torch.Tensor.data.__set__(parameter, sharded)
        place_local(parameter, local_part(sharded), local_spec(sharded))


def _wrap(model: nn.Module, mesh: DeviceMesh, units: Units, options: DataParallel, places: Places | None) -> None:
    _make_contiguous(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    policy = _precision(options, model)
    inner = replace(policy, output_dtype=None)  # cast the model's outputs, not those of its units
    offload = options.offload_policy if options.offload_policy is not None else OffloadPolicy()
    if options.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    elif getattr(offload, "pin_memory", False) and not torch.accelerator.is_available():
        raise AutoplanError(
            f"offload_policy={offload!r} pins memory for an accelerator, but torch finds none",
            hint="CPUOffloadPolicy(pin_memory=False), or cpu_offload=True, which pins where there is a GPU",
        )
    shared: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
    if any(_few_matrices(parameter, mesh) for parameter in model.parameters()):
        shared["shard_placement_fn"] = partial(_few_matrices, mesh=mesh)
    if units.ignored:
        shared["ignored_params"] = units.ignored
    for unit in units.units:
        reshard = not unit.last if options.reshard_after_forward is None else options.reshard_after_forward
        unit_modules = [modules[name] for name in unit.names]
        fully_shard(
            unit_modules if len(unit_modules) > 1 else unit_modules[0],
            reshard_after_forward=reshard,
            mp_policy=replace(inner, param_dtype=None, cast_forward_inputs=False) if unit.kept_dtype else inner,
            **shared,
        )
    if places is not None:  # before FSDP2 wraps the model itself, so that it runs before FSDP2's
        model.register_forward_hook(places.end)
    fully_shard(model, reshard_after_forward=False, mp_policy=policy, **shared)
    if places is not None:
        places.watch_rest()
    wrapped = [*((name, modules[name]) for unit in units.units for name in unit.names), ("", model)]
    watch_lost(wrapped, units.ignored)
    list_sharded(model, units.ignored)
    vars(model)["__deepcopy__"] = refuse_copy
    if _writes_text(model) and any(_writes_text(module) for module in model.modules() if module is not model):
        register_fsdp_forward_method(model, "generate")  # a wrapper's generate calls the inner model's forward only
    forward, backward = options.depths  # to prefetch
    blocks = [block for unit in units.units if unit.block and isinstance(block := modules[unit.names[0]], FSDPModule)]
    for place, block in enumerate(blocks):
        if forward and blocks[place + 1 : place + 1 + forward]:
            block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + forward])
        if backward and place:
            block.set_modules_to_backward_prefetch(blocks[max(0, place - backward) : place][::-1])
    for _, parameter in units.scalars:
        if parameter.requires_grad:
            parameter.register_hook(partial(_averaged, mesh=mesh))


def _few_matrices(parameter: nn.Parameter, mesh: DeviceMesh) -> Shard | None:
    """Return a placement in another dim than the first where a stack has fewer matrices than there are ranks."""
    if not is_stack(parameter):
        return None
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    dim = cut_dim(local.shape, mesh.size(mesh.ndim - 1))
    return Shard(dim) if dim else None


def _writes_text(module: nn.Module) -> bool:
    return callable(getattr(module, "generate", None))


def _averaged(gradient: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    local = all_reduce_over(local, mesh) / mesh.size()
    return like(local, gradient) if isinstance(gradient, DTensor) else local

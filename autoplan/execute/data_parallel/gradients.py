"""Norms and clipping of sharded gradients, each value counted once.

The problem: a replicated gradient summed over ranks counts tp times, a row that two ranks hold counts twice, gradients
on different meshes cannot be stacked, and a scaled copy of a low-precision gradient changes nothing. Placements tell
which rank holds what, and the first holder of each value counts it.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from autoplan.common.errors import AutoplanError
from autoplan.common.options import check_argument
from autoplan.common.torch_internals import backward_hooks, is_fake, local_part, own_parameters, version_of
from autoplan.execute.collectives import all_reduce_over, in_backward, index_of, mesh_device, with_sums
from autoplan.execute.parameters.held import FREE, Held, held_by, held_parameters, record_of
from autoplan.execute.parameters.local_views import reading_locally
from autoplan.execute.parameters.optimizer import answered_for, repeats
from autoplan.patches.tensors import told_of_inputs


@contextmanager
def unshard(model: nn.Module) -> Iterator[nn.Module]:
    """Gather every FSDP2 unit of `model` inside the block; afterwards all are resharded, even after an error.

    Parameters that tensor parallelism shards stay so: the model's code reads them as it does in its forward.
    """
    check_argument("model", model, nn.Module, "pass the model itself, an nn.Module")
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    with ExitStack() as stack:
        for unit in units:
            stack.callback(unit.reshard)
        for unit in units:
            unit.unshard()
        stack.enter_context(reading_locally(model))
        yield model


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; any other tensor unchanged."""
    check_argument("tensor", tensor, torch.Tensor, "pass a tensor")
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


Source: TypeAlias = nn.Module | torch.Tensor | Iterable[torch.Tensor]
_Member: TypeAlias = tuple[torch.Tensor, Held | None]  # a parameter, and its record


def global_norm(source: Source, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients of a model, or of parameters: that of the unsharded ones, the same on every
    rank.

    It is collective over every mesh that the parameters lie on. Without any gradient it is 0.
    """
    check_argument("norm_type", norm_type, (int, float), "pass a positive number, or float('inf')")
    if not norm_type > 0:
        raise AutoplanError(f"norm_type={norm_type!r}", hint="pass a positive number, or float('inf')")
    parameters = list(_parameters(_given(source)))
    meshes: dict[DeviceMesh | None, list[_Member]] = {}
    for parameter, held in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        meshes.setdefault(mesh, []).append((parameter, held))
    parts = [_over_mesh(mesh, members, norm_type) for mesh, members in meshes.items()]
    if not parts:
        return torch.zeros(())
    device = parts[-1].device
    totals = torch.stack([part.to(device) for part in parts])
    return totals.max() if math.isinf(norm_type) else totals.sum() ** (1.0 / norm_type)


def clip_gradients(
    source: Source, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale the gradients of a model, or of one or more parameters, in place, so that their norm is at most `max_norm`.

    Return the norm before clipping. It is collective, like `global_norm`.
    """
    check_argument("max_norm", max_norm, (int, float, torch.Tensor), "pass a number")
    if not isinstance(max_norm, torch.Tensor) and not max_norm >= 0:
        raise AutoplanError(f"max_norm={max_norm!r}", hint="pass a number ≥ 0")
    parameters = _given(source)
    norm = global_norm(parameters, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise AutoplanError(
            f"the norm of the gradients is {float(norm)}, so they cannot be clipped",
            hint="find the parameter with autoplan.full_tensors(model, grads=True)",
        )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for parameter, _ in _parameters(parameters):
            if parameter.grad is not None:
                local = to_local(parameter.grad)
                local.mul_(scale.to(local.device))
    return norm


def _given(source: Source) -> nn.Module | list[torch.Tensor]:
    """Return a model unchanged, and tensors as a list; refuse anything else."""
    if isinstance(source, nn.Module):
        return source
    if isinstance(source, torch.Tensor):
        return [source]
    tensors = list(source) if isinstance(source, Iterable) else None
    odd = [source] if tensors is None else [item for item in tensors if not isinstance(item, torch.Tensor)]
    if tensors is None or odd:
        holding = "" if tensors is None else f" holding {type(odd[0]).__name__}"
        raise AutoplanError(
            f"the source of gradients is {type(source).__name__}{holding}, not a model or parameters",
            hint="pass the model, one parameter, or a list of parameters, such as model.parameters()",
        )
    return tensors


def _parameters(source: nn.Module | list[torch.Tensor]) -> Iterator[_Member]:
    """Yield every parameter once, with its record."""
    seen: set[int] = set()
    if isinstance(source, nn.Module):
        pairs: Iterable[_Member] = ((p, held) for _, p, held in held_parameters(source))
    else:
        pairs = ((p, held_by(p)) for p in source)
    for parameter, held in pairs:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield parameter, held


def _over_mesh(mesh: DeviceMesh | None, members: list[_Member], norm_type: float) -> torch.Tensor:
    """Return the sum of powers (or the maximum) over all members and over the mesh."""
    values = [_counted(p.grad, held) for p, held in members if p.grad is not None]
    device = members[0][0].device if mesh is None else mesh_device(mesh)
    wide = any(value.dtype == torch.float64 for value in values) or members[0][0].dtype == torch.float64
    dtype = torch.float64 if wide else torch.float32
    total = torch.zeros((), dtype=dtype, device=device)
    for value in values:
        if value.numel():
            norm_dtype = dtype.to_complex() if value.is_complex() else dtype
            size = torch.linalg.vector_norm(value, norm_type, dtype=norm_dtype).to(dtype).to(device)
            total = torch.maximum(total, size) if math.isinf(norm_type) else total + size**norm_type
    return total if mesh is None else all_reduce_over(total, mesh, "max" if math.isinf(norm_type) else "sum")


def _counted(gradient: torch.Tensor, held: Held | None) -> torch.Tensor:
    """Return the values of a gradient that this rank counts."""
    gradient = gradient.detach()
    if not isinstance(gradient, DTensor):
        return gradient
    gradient = with_sums(gradient)
    mesh, local = gradient.device_mesh, gradient.to_local()
    for dim, placement in enumerate(gradient.placements):
        if placement.is_replicate() and mesh.get_local_rank(dim) > 0:
            return local.new_zeros(0)
    if held is not None and repeats(held):
        assert held.dim is not None
        rows = answered_for(held, gradient)
        local = local.index_select(held.dim, index_of(rows, local.device))
    return local


# Refuse what FSDP2 loses silently: changes of gathered parameters, hooks on parameters, gradients by them. And
# copies.
#
# FSDP2 gathers the parameters of a unit into memory of its own, and frees it after the forward: what a forward writes
# into a parameter (a clamp, a moving average) is gone. It cannot be carried back, since data-parallel ranks write
# what their own data says. And FSDP2 sets gradients itself, so that hooks on parameters never run, and gradients that
# are asked for by parameters (`torch.autograd.grad`) are those of gathered ones, which the caller has not.
#
# Gathered parameters stay in place after a forward, until its backward (after an evaluation: for good).
# `parameters()` of any module and attributes (`model.head.weight`) return the sharded ones in their place: an
# optimizer would update copies, whose memory FSDP2 frees. If the sharded ones are changed, they are gathered anew.
# Reading frees nothing, since one rank may read alone, and ranks must gather together.


def watch_lost(units: Iterable[tuple[str, nn.Module]], ignored: Container[nn.Parameter]) -> None:
    """Check units, inner ones first, at each forward. FSDP2 has wrapped all of them already: these hooks run while
    parameters are gathered. `ignored`: parameters that FSDP2 leaves alone."""
    inside: set[nn.Module] = set()
    for name, unit in units:
        own = [(f"{name}.{path}".strip("."), module) for path, module in unit.named_modules() if module not in inside]
        inside.update(module for _, module in own)
        watched = [
            (f"{path}.{key}".lstrip("."), module, key, parameter)
            for path, module in own
            for key, parameter in own_parameters(module).items()
            if parameter is not None and parameter not in ignored
        ]
        if watched:
            watch = _Watch(watched)
            unit.register_forward_pre_hook(watch.begin)
            unit.register_forward_hook(watch.end, prepend=True)


def _refuse_inputs(inputs: list[Any]) -> None:
    """Refuse gradients that are asked for by parameters: the graph holds what was gathered."""
    for gathered, x in product(list(_alive), inputs):
        name = next((name for name, place in gathered.names.items() if gathered.sharded[place] is x), None)
        if name is not None:
            raise AutoplanError(
                f"a gradient is asked for by the parameter {name}, which FSDP2 shards: the graph holds gathered copies",
                hint="call backward() without inputs= and read .grad; or leave dp_shard out of the mesh",
            )


class _Watch:
    """The parameters of one unit: name, module and key, and the parameter as it lies on ranks."""

    def __init__(self, watched: list[tuple[str, nn.Module, str, nn.Parameter]]) -> None:
        self.watched = watched
        self.versions: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {}
        self.sums: dict[str, int] = {}
        self.modes = Counter[tuple[bool, bool]]()

    def begin(self, unit: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        self.versions.clear()
        self.sums.clear()
        self.modes[unit.training, torch.is_grad_enabled()] += 1
        summed = self.modes[unit.training, torch.is_grad_enabled()] <= _SUMMED
        for name, module, key, on_ranks in self.watched:
            if any(not _is_known(hook) for hook in (backward_hooks(on_ranks) or {}).values()):
                raise AutoplanError(
                    f"a hook on the parameter {name} would never run: FSDP2 sets its gradient without it",
                    hint="register_post_accumulate_grad_hook, or change gradients after backward",
                )
            gathered = own_parameters(module).get(key)
            if gathered is not None and gathered is not on_ranks and not gathered.is_inference():
                self.versions[name] = gathered, _versions(gathered)
                if summed and not gathered.is_meta and not is_fake(gathered):
                    self.sums[name] = _sum_of_bits(gathered)

    def end(self, unit: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for name, (gathered, version) in self.versions.items():
            if _versions(gathered) != version or (name in self.sums and _sum_of_bits(gathered) != self.sums[name]):
                raise AutoplanError(
                    f"the forward of {type(unit).__name__} changes the parameter {name} in place: FSDP2 gathers it "
                    "for the forward and loses the change",
                    hint="change it outside of the forward, after the optimizer's step; or leave dp_shard out of the "
                    "mesh",
                )
        self.versions.clear()
        self.sums.clear()


_SUMMED = 2  # forwards of a unit in each mode in which writes are found that torch does not count (`weight.data.mul_`)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(x: torch.Tensor) -> int:
    local = (local_part(x) if isinstance(x, DTensor) else x).detach()
    local = torch.view_as_real(local) if local.is_complex() else local
    return int(local.contiguous().view(_BITS[local.element_size()]).sum())


def _versions(x: torch.Tensor) -> tuple[int, ...]:
    """Return the versions of a tensor and of a DTensor's shard: a write to one is not counted by the other."""
    if x.is_inference():
        return ()
    return (version_of(x), version_of(local_part(x))) if isinstance(x, DTensor) else (version_of(x),)


def _is_known(hook: Any) -> bool:
    """Return whether a hook is autoplan's (for gradients that do not come from the forward) or a tool's of torch."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] in ("autoplan", "torch")


def list_sharded(model: nn.Module, ignored: Container[nn.Parameter]) -> None:
    """Let `parameters()`, `named_parameters()` and attributes return sharded parameters also after a forward, and
    refuse gradients that are asked for by them. `ignored`: as for `watch_lost`."""
    gathered = _Gathered(model, ignored)
    _alive.add(gathered)
    told_of_inputs(_refuse_inputs).until_gone(model)
    vars(model)[FREE] = gathered.free
    for module in model.modules():
        vars(module)["named_parameters"] = partial(gathered.named_parameters, module)
        record = record_of(module)
        if record is not None:
            record.reading.gathered = gathered
        if own_parameters(module):
            handle = module.register_load_state_dict_pre_hook(lambda *loaded: gathered.free())
            module._load_state_dict_pre_hooks.move_to_end(handle.id, last=False)  # before what reads the placements


class _Gathered:
    """What FSDP2 leaves gathered after a forward (`left`, by id), with the sharded parameter in whose place it is."""

    def __init__(self, model: nn.Module, ignored: Container[nn.Parameter]) -> None:
        self.units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.running: set[nn.Module] = set()
        self.sharded: dict[tuple[nn.Module, str], nn.Parameter] = {}
        self.names: dict[str, tuple[nn.Module, str]] = {}
        for path, module in model.named_modules():
            for key, parameter in own_parameters(module).items():
                if parameter is not None:
                    self.sharded[module, key] = parameter
                if parameter is not None and parameter not in ignored:
                    self.names[f"{path}.{key}".lstrip(".")] = module, key
        self.left: dict[int, tuple[torch.Tensor, nn.Parameter, tuple[int, ...]]] = {}
        for unit in self.units:
            unit.register_forward_pre_hook(self.begin, prepend=True)
            unit.register_forward_hook(self.end, always_call=True)

    def begin(self, unit: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        if not self.running:
            if any(_versions(sharded) != versions for _, sharded, versions in self.left.values()):
                self.free()
            for (module, key), before in self.sharded.items():
                now = own_parameters(module).get(key)
                if now is not None and now is not before and _mesh_dims(now) == _mesh_dims(before):
                    self.sharded[module, key] = now  # replaced, as by `model.to`
        self.running.add(unit)

    def end(self, unit: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.running.discard(unit)
        if not self.running:
            self.left.clear()
            for (module, key), sharded in self.sharded.items():
                now = own_parameters(module).get(key)
                if now is not None and now is not sharded:
                    self.left[id(now)] = now, sharded, _versions(sharded)

    def free(self) -> None:
        """Free what is gathered. All ranks must do so, since they gather it again together."""
        if not self.running and not torch.compiler.is_compiling() and not in_backward():
            self.left.clear()
            for unit in self.units:
                unit.reshard()

    def as_sharded(self, parameter: Any) -> Any:
        """Return the sharded parameter in whose place one was gathered, outside of a forward or backward."""
        gathered, sharded, _ = self.left.get(id(parameter), (None, None, ()))
        return sharded if gathered is parameter is not None and not self.running and not in_backward() else parameter

    def named_parameters(self, module: nn.Module, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in type(module).named_parameters(module, *args, **options):
            yield name, self.as_sharded(parameter)


def _mesh_dims(parameter: torch.Tensor) -> int:
    return parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0


_alive = weakref.WeakSet[_Gathered]()


def refuse_copy(memo: Any) -> Any:
    """Say what to do instead of `copy.deepcopy(model)`, which FSDP2 does not support."""
    raise AutoplanError(
        "a model in FSDP2 units cannot be copied: each unit gathers parameters into memory of its own",
        hint="copy the model before autoplan.parallelize and shard the copy too; or average state_dict()s",
    )

"""A folded copy of a model without storage, sharded by its plan, in a world of fake ranks: what a step is recorded on.

Few blocks of each kind are kept, under their own names; what the plan says of others is said of those that stand for
them. Data parallelism is laid over the recording (memory.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoplan.capture.dry_run import enter_first_in_a_lasting_thread, fake_mode
from autoplan.capture.fold import Folded, fold
from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.options import Checkpointing, Options, TensorParallel
from autoplan.common.torch_internals import FakeTensorMode, own_modules, own_parameters
from autoplan.execute.data_parallel.mesh_dims import WITH_CONTEXT
from autoplan.execute.data_parallel.units import choose_units, cut_dim, is_stack
from autoplan.execute.parallelize import shard_model, within
from autoplan.forecast.recording.record import Marks, local_piece
from autoplan.forecast.recording.tape import LeftOut
from autoplan.hf.configs import take_flash_attention
from autoplan.patches.simulated_ranks import world_per_thread
from autoplan.values import Fold, Plan
from autoplan.values.estimate import JOINED


@contextmanager
def fake_mesh(dims: Mapping[str, int], rank: int = 0, device_type: str = "cpu") -> Iterator[DeviceMesh]:
    """A mesh of these dims ({"dp_shard": 8, "tp": 8}) as rank `rank` sees it."""
    ranks = math.prod(dims.values())
    if not 0 <= rank < ranks:
        raise AutoplanError(f"no rank {rank}: the mesh has {ranks}", hint=f"choose 0 to {ranks - 1}")
    enter_first_in_a_lasting_thread()
    with world_per_thread():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            yield init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))
        finally:
            dist.destroy_process_group()


def group_names(mesh: DeviceMesh) -> dict[str, str]:
    """Process group -> the dim of the mesh that it is of, or the dims. FSDP2 shards over "dp_shard" and "cp" together,
    and a plan that cuts weights and the sequence may sum over the ranks of both."""
    dims = mesh.mesh_dim_names or ()
    names = {mesh.get_group(dim).group_name: dim for dim in dims}
    both = [dim for dim in dims if dim in ("cp", "tp")]
    for flat, text in ((WITH_CONTEXT, "dp_shard"), ("_".join(both), JOINED.join(sorted(both)))):
        with suppress(KeyError):  # no dims were flattened
            names.setdefault(mesh[flat].get_group().group_name, text)
    return names


@dataclass(frozen=True)
class Held:
    """One parameter as it lies on a rank of tp. `stack`: of matrices, which FSDP2 may cut inside of each. `packed`:
    bytes of an element where a frozen weight stays quantised; None: it is plain."""

    name: str
    shape: tuple[int, ...]
    size: int  # bytes of an element of the plain weight
    trained: bool
    stack: bool
    packed: float | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def cut_inside(self, ranks: int) -> bool:
        """Return whether FSDP2 shards it along another dim than the first."""
        return self.stack and cut_dim(self.shape, ranks) > 0

    def padded(self, ranks: int) -> int:
        """Elements when every one of FSDP2's ranks holds as many as the first."""
        if self.cut_inside(ranks) or not self.shape:
            return self.elements
        return -(-self.shape[0] // ranks) * ranks * math.prod(self.shape[1:])


@dataclass(frozen=True)
class UnitSize:
    """The parameters of an FSDP unit itself, without units inside it. `last`: of its stack."""

    name: str
    parameters: tuple[Held, ...]
    last: bool
    block: bool


@dataclass(frozen=True)
class Copy:
    """The sharded copy, its units (those left out too), and how many bytes of buffers it has."""

    module: nn.Module
    mode: FakeTensorMode
    marks: Marks
    units: tuple[UnitSize, ...]
    left_out: LeftOut
    buffers: int
    flash: bool = False  # does the flash kernel stand for eager attention?


def sharded_copy(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype | None = None,
    checkpointing: Checkpointing = Checkpointing(),  # noqa: B008 - frozen
    tensor: TensorParallel = TensorParallel(),  # noqa: B008 - frozen
    folded: Folded | None = None,
    averaged: bool = False,
) -> Copy:
    """Copy `model`, or its blocks that are `folded`, without storage and shard the copy. `averaged`: FSDP2 sums
    gradients over ranks of cp."""
    mode = fake_mode()
    module = fold(folded.module if folded else model, faker(mode, compute_dtype), fold=False).module
    folds = folded.folds if folded else ()
    stored = {name: p.element_size() for name, p in model.named_parameters()}
    as_on_a_gpu(module)
    flash = take_flash_attention(module)
    fitted = _fitted(plan, module)
    options = Options(tensor=tensor, checkpointing=checkpointing)
    shard_model(module, mesh, fitted, options, averaged=averaged)
    units = choose_units(module, fitted.layers, frozen="units")
    named = [*((unit.names[0], unit.names) for unit in units.units), ("", ("",))]
    recorded = list(_sizes(module, named, units, stored))
    left_out = _left_out(model, folds)
    blocks = tuple(
        f"{group.container}.{key}" for group in folds for key in own_modules(module.get_submodule(group.container))
    )
    if not folds:  # too few blocks to leave any out
        blocks = tuple(name for stack in fitted.layers for name in stack.fqns)
    inside = tuple(f"{name}." for name in (*blocks, *(n for stack in fitted.layers for n in stack.fqns)))
    places = tuple(name for name, part in module.named_modules() if not f"{name}.".startswith(inside)
                   and name and not any(True for _ in part.children()))  # fmt: skip
    buffers = sum(local_piece(b).nbytes for b in module.buffers())
    lasts = {stack.fqns[-1] for stack in plan.layers if stack.fqns}
    everything = (*recorded, *_units_left_out(recorded, left_out, lasts))
    return Copy(module, mode, Marks(tuple(named), blocks, places), everything, left_out, buffers, flash)


def faker(mode: FakeTensorMode, dtype: torch.dtype | None) -> Callable[[torch.Tensor, str], torch.Tensor]:
    def fake(tensor: torch.Tensor, name: str) -> torch.Tensor:
        cast = dtype if dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else None
        with mode:
            empty = torch.empty(tensor.shape, dtype=cast or tensor.dtype, device="cpu")
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

    return fake


def as_on_a_gpu(module: nn.Module) -> None:
    """Let experts run as they do on a GPU; the copy for analysis runs another form of the same."""
    for part in module.modules():
        for value in list(vars(part).values()):
            for setting, choice in conventions().kernels_on_gpu if hasattr(value, "to_dict") else ():
                if hasattr(value, setting):
                    setattr(value, setting, choice)


def _fitted(plan: Plan, module: nn.Module) -> Plan:
    """The plan without what it says of blocks that the copy does not have."""
    tensors = [n for n, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())]
    return within(plan, [name for name, _ in module.named_modules(remove_duplicate=False)], tensors)


def _sizes(
    module: nn.Module, named: list[tuple[str, tuple[str, ...]]], units: Any, stored: Mapping[str, int]
) -> Iterator[UnitSize]:
    modules = dict(module.named_modules(remove_duplicate=False))
    own = {id(modules[n]) for _, names in named for n in names}
    kinds = {unit.names[0]: unit for unit in units.units}
    seen: set[int] = set()
    for name, names in named:
        parameters = []
        for inner, part in (pair for path in names for pair in _inside(path, modules[path], own)):
            for key, parameter in own_parameters(part).items():
                if parameter is None or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                held, local = f"{inner}.{key}" if inner else key, local_piece(parameter)
                size, shape = stored.get(held, local.element_size()), tuple(local.shape)
                parameters.append(Held(held, shape, size, parameter.requires_grad, is_stack(parameter)))
        kind = kinds.get(name)
        yield UnitSize(name, tuple(parameters), kind is None or kind.last, kind is not None and kind.block)


def _inside(name: str, module: nn.Module, own: set[int]) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    for key, child in module.named_children():
        if id(child) not in own:
            yield from _inside(f"{name}.{key}" if name else key, child, own)


def _left_out(model: nn.Module, folds: tuple[Fold, ...]) -> LeftOut:
    left_out: dict[str, tuple[tuple[str, str], ...]] = {}
    for group in folds:
        stands = dict(group.members)
        last = ""
        for key in own_modules(model.get_submodule(group.container)):
            if key in stands:
                pair = (f"{group.container}.{key}", f"{group.container}.{stands[key]}")
                left_out[last] = (*left_out.get(last, ()), pair)
            else:
                last = f"{group.container}.{key}"
    return left_out


def _units_left_out(recorded: list[UnitSize], left_out: LeftOut, lasts: set[str]) -> Iterator[UnitSize]:
    for block, by in (pair for pairs in left_out.values() for pair in pairs):
        for unit in recorded:
            if f"{unit.name}.".startswith(f"{by}."):
                name = block + unit.name[len(by) :]
                yield replace(unit, name=name, last=name in lasts)

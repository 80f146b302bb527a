"""Record one step of a sharded copy on fake tensors in a world of fake ranks: each op, each storage made and freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from autoplan.common.nested import call_with, flatten_tensors
from autoplan.common.stages import Round, counted
from autoplan.common.torch_internals import (
    DisableTorchFunction,
    DispatchMode,
    collectives_by_name,
    local_part,
    schema_of,
    storage_id,
)
from autoplan.forecast.recording.fused import Fusion
from autoplan.forecast.recording.kernels import (
    flops_of,
    grouped_in_any_dtype,
    held_meanwhile,
    is_attention,
    kernels_of_a_gpu,
    layer_of,
)
from autoplan.forecast.recording.known_ops import KnownOps
from autoplan.forecast.recording.tape import (
    ATTENTION,
    Block,
    Changed,
    Item,
    Message,
    Place,
    Storage,
    Tape,
    UnitEvent,
    Worked,
)
from autoplan.patches.simulated_ranks import asks_for_a_shape

LOSS = "the loss"  # what is computed after the model has run
_COLLECTIVES = ("_c10d_functional", "c10d", "_dtensor", "c10d_functional")
_SENDS = {"all_gather_into_tensor": "all-gather", "_allgather_base_": "all-gather", "allgather_": "all-gather",
          "reduce_scatter_tensor": "reduce-scatter", "_reduce_scatter_base_": "reduce-scatter",
          "all_reduce": "all-reduce", "all_reduce_": "all-reduce", "allreduce_": "all-reduce",
          "broadcast_": "broadcast", "all_to_all_single": "all-to-all", "alltoall_base_": "all-to-all"}  # fmt: skip


@dataclass(frozen=True)
class Marks:
    """Modules whose runs are told apart: units of data parallelism, blocks of folded stacks, and others (`places`)."""

    units: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (name of the unit, its modules)
    blocks: tuple[str, ...] = ()
    places: tuple[str, ...] = ()


@dataclass
class _Living:
    bytes: int
    collective: bool
    forward: bool
    gradient: bool = False
    output: bool = False  # of a forward that nothing follows
    freed: bool | None = None  # in the forward?
    lasts: int = 0  # bytes that a cache in the result holds of it


@dataclass
class _Log:
    """The log of a recording so far."""

    items: list[Item] = field(default_factory=list)
    storages: list[_Living] = field(default_factory=list)
    known: dict[int, int] = field(default_factory=dict)  # id of a living storage -> its number
    holders: dict[int, Any] = field(default_factory=dict)
    modules: list[str] = field(default_factory=lambda: [""])
    forward: bool = True
    ended: int = 0
    open: bool = True
    fusion: Fusion = field(default_factory=Fusion)
    length: int = 0  # of the sequence
    pairs: dict[str, float] = field(default_factory=dict)

    def enter(self, name: str, *_: Any) -> None:
        self.modules.append(name)

    def leave(self, *_: Any) -> None:
        if len(self.modules) > 1:
            self.modules.pop()

    def at(self, name: str, *_: Any) -> None:
        self.items.append(Place(name))

    def made(self, tensor: torch.Tensor, collective: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage_id(tensor)
        if key in self.known:
            return
        number = len(self.storages)
        self.storages.append(_Living(storage.nbytes(), collective, self.forward))
        self.known[key] = number
        self.holders[number] = weakref.ref(storage, lambda _: self._freed(key, number))
        self.items.append(Changed(number, 1, self.modules[-1]))
        if self.forward and self.length and list(tensor.shape).count(self.length) > 1:
            self.pairs[self.modules[-1]] = max(storage.nbytes(), self.pairs.get(self.modules[-1], 0))

    def sized(self, tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
        """Return the number of each tensor's storage (-1: none), and its bytes."""
        return [(self.known.get(storage_id(t), -1), t.numel() * t.element_size()) for t in tensors]

    def held(self, size: int) -> None:
        """Memory that comes and goes within one op."""
        if size:
            number = len(self.storages)
            self.storages.append(_Living(size, False, self.forward, freed=self.forward))
            self.items.extend(Changed(number, sign, self.modules[-1]) for sign in (1, -1))

    def _freed(self, key: int, number: int) -> None:
        if self.known.get(key) == number:
            del self.known[key]
        self.holders.pop(number, None)
        if self.open:
            self.storages[number].freed = self.forward
            self.items.append(Changed(number, -1, self.modules[-1]))

    def gradient_of(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if grad is not None and (number := self.known.get(storage_id(local_piece(grad)))) is not None:
            self.storages[number].gradient = True

    def returned(self, result: Any) -> None:
        """Tensors that stand in the result themselves; what an object in it holds is a cache."""
        values = result.values() if isinstance(result, Mapping) else result if isinstance(result, tuple) else (result,)
        for tensor in (local_piece(value) for value in values if isinstance(value, torch.Tensor)):
            number = self.known.get(storage_id(tensor), -1)
            if number >= 0:
                self.storages[number].output = True

    def cached(self, value: Any, seen: set[int]) -> None:
        """What an object in the result holds of storages: views of the last tokens hold few."""
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            value = local_piece(value)
            number = self.known.get(storage_id(value), -1)
            if number >= 0:
                held = self.storages[number]
                held.lasts = min(held.bytes, held.lasts + value.numel() * value.element_size())
        elif isinstance(value, (Mapping, list, tuple)):
            for item in value.values() if isinstance(value, Mapping) else value:
                self.cached(item, seen)
        elif not isinstance(value, (type, nn.Module)):
            for item in list(getattr(value, "__dict__", {}).values()):
                self.cached(item, seen)

    def rounds(self, work: Round, parts: Sequence[slice]) -> None:
        """Record a loop whose rounds do the same: the first round stands for all, unless something is left."""
        first = len(self.items)
        work(parts[0])
        did = self.items[first:]
        if sum(item.sign for item in did if isinstance(item, Changed)):
            for part in parts[1:]:
                work(part)
        else:
            self.items += did * (len(parts) - 1)

    def worked(self, flops: int, dtype: str) -> None:
        self.items.append(Worked(flops, 0, dtype, self.modules[-1]))

    def tape(self, kernels: Iterable[str]) -> Tape:
        storages = tuple(map(_storage, self.storages))
        return Tape(storages, tuple(self.items), self.ended, tuple(sorted(kernels)), self.pairs)


def _storage(living: _Living) -> Storage:
    if living.gradient:
        return Storage(living.bytes, "gradient")
    if living.output:
        return Storage(living.bytes, "temporary")
    if living.forward and living.freed is not True:
        return Storage(living.bytes, "kept", living.lasts)
    return Storage(living.bytes, "communication" if living.collective else "temporary")


def local_piece(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor) if isinstance(tensor, DTensor) else tensor


class _Watching(DispatchMode):
    """Sees every op on local tensors."""

    def __init__(self, log: _Log, groups: Mapping[str, str], known: KnownOps | None) -> None:
        super().__init__()
        self.log, self.groups, self.known = log, groups, known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # autograd asks every tensor: most of all calls
            return getattr(args[0], "fake_device", None) or func(*args)
        with DisableTorchFunction():
            return self.watch(func, types, args, kwargs)

    def watch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if asks_for_a_shape():  # of a whole tensor, which no rank holds
            return func(*args, **kwargs)
        if func is collectives_by_name.wait_tensor.default:
            return args[0]  # as it is on a device; without storage torch would make another tensor of it
        grouped = grouped_in_any_dtype(func, args, kwargs)
        if grouped is not None:
            result = grouped
        else:
            result = func(*args, **kwargs) if self.known is None else self.known.run(func, args, kwargs)
        log, space = self.log, func.namespace
        collective = space in _COLLECTIVES
        # On meta only shapes are computed. `is_meta` of a fake tensor would be an op
        devices = ((one, getattr(one, "fake_device", None) or one.device) for one in tensors_within(result))
        results = [one for one, device in devices if device.type != "meta"]
        if collective:
            log.fusion.kernel += 1
            self._message(func, args, kwargs, results)
        for tensor in results:
            log.made(tensor, collective)
        log.held(held_meanwhile(func, args))
        if not collective and not func.is_view and results:
            inputs = list(tensors_within((args, kwargs)))
            read, written = log.sized(inputs), log.sized(results)
            flops = flops_of(func, args, kwargs, result)
            fused, moved = log.fusion.moved(read, written, flops > 0), sum(size for _, size in (*read, *written))
            dtype = str(results[0].dtype).removeprefix("torch.")
            if is_attention(func):  # what a fused kernel of attention reads is in its rate
                dtype, fused, moved = ATTENTION + dtype, 0, 0
            layer = layer_of(func, result) if flops else ""
            log.items.append(Worked(flops, moved, dtype, log.modules[-1], layer, fused))
        return result

    def _message(self, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        kind = _SENDS.get(schema_of(func).name.partition("::")[2])
        if kind is None:
            return
        inputs = list(tensors_within((args, kwargs)))
        sent = inputs[-1] if len(inputs) > 1 else inputs[0]
        out = results[0] if results else inputs[0]
        names = (_group_name(value) for value in (*args, *kwargs.values()))
        group = next((name for name in names if name in self.groups), "")
        dim = self.groups.get(group, "")
        self.log.items.append(Message(kind, dim, sent.nbytes, out.nbytes, self.log.modules[-1]))


def _group_name(value: Any) -> str:
    """Return a process group's name, as functional collectives and others pass it."""
    if isinstance(value, torch.ScriptObject):
        try:
            return str(ProcessGroup.unbox(value).group_name)
        except RuntimeError:  # another object: how to reduce, for how long to wait
            return ""
    return value if isinstance(value, str) else ""


class _Passing(torch.autograd.Function):
    """An identity on a module's inputs; when all its gradients are there, backward has left the module."""

    @staticmethod
    def forward(ctx: Any, after: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.after = after
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.after()
        return (None, *gradients)


Maker = Callable[[Any, Any], Item]  # of (before or after, phase)


class _Follower:
    """The hooks of one module whose runs are told apart: as a block of a stack (outside), as a unit, or as both."""

    def __init__(self, log: _Log, first: list[Maker], last: list[Maker]) -> None:
        self.log, self.first, self.last = log, first, last

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._write(self.first, "before", "forward")
        places = [t for t in tensors_within((args, kwargs)) if t.requires_grad and torch.is_grad_enabled()]
        if not places or not self.first:
            return None
        passed = _Passing.apply(lambda: self._write(self.first[::-1], "after", "backward"), *places)
        others = {id(old): new for old, new in zip(places, passed, strict=True)}
        return _put(args, others), _put(kwargs, others)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._write(self.last[::-1], "after", "forward")
        seen: list[bool] = []

        def reached(gradient: torch.Tensor) -> None:
            if not seen:
                seen.append(True)
                self._write(self.last, "before", "backward")

        for tensor in tensors_within(dict(output) if isinstance(output, Mapping) else output) if self.last else ():
            if tensor.requires_grad:
                tensor.register_hook(reached)

    def _write(self, makers: list[Maker], when: str, phase: str) -> None:
        self.log.items += [maker(when, phase) for maker in makers]


def _put(value: Any, others: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return others.get(id(value), value)
    if type(value) in (tuple, list):
        return type(value)([_put(item, others) for item in value])
    if type(value) is dict:
        return {key: _put(item, others) for key, item in value.items()}
    return value


@contextmanager
def _followed(model: nn.Module, marks: Marks, log: _Log) -> Iterator[None]:
    modules = dict(model.named_modules(remove_duplicate=False))
    handles: list[Any] = []
    for name, module in {id(m): (n, m) for n, m in reversed(modules.items())}.values():
        handles.append(module.register_forward_pre_hook(partial(log.enter, name)))
        handles.append(module.register_forward_hook(log.leave))
    first, last = (dict[str, list[Maker]]({name: [partial(Block, name)] for name in marks.blocks}) for _ in range(2))
    for unit, names in marks.units:
        first.setdefault(names[0], []).append(partial(UnitEvent, unit))
        last.setdefault(names[-1], []).append(partial(UnitEvent, unit))
    for name in sorted({*first, *last}, key=len):
        follower = _Follower(log, first.get(name, []), last.get(name, []))
        handles.append(modules[name].register_forward_pre_hook(follower.before, with_kwargs=True, prepend=True))
        handles.append(modules[name].register_forward_hook(follower.after, with_kwargs=True))
    for name in marks.places:
        handles.append(modules[name].register_forward_pre_hook(partial(log.at, name), prepend=True))
        handles.append(modules[name].register_forward_hook(partial(log.at, name)))
    for parameter in model.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(log.gradient_of))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record_step(
    model: nn.Module, inputs: Mapping[str, Any], marks: Marks, groups: Mapping[str, str], *,
    loss_of: Callable[[Any], torch.Tensor | None] | None, whole: bool = False, length: int = 0,
    known: KnownOps | None = None,
) -> Tape:  # fmt: skip
    """Run one step in the active fake mode. `loss_of` None: forward only, what it returns is kept.

    `groups`: names of process groups, and the dim of the mesh of each. `whole`: no layer is cut over ranks. `length`:
    of the sequence, if values of sequence × sequence are to be found.
    """
    log = _Log(length=length)
    for tensor in (*map(local_piece, model.parameters()), *map(local_piece, model.buffers()), *tensors_within(inputs)):
        log.known[storage_id(tensor)] = -1
    with (
        kernels_of_a_gpu(model, whole, log.worked) as used, _Watching(log, groups, known), _followed(model, marks, log),
        counted(log.rounds),
    ):  # fmt: skip
        result = call_with(model, inputs)
        log.at(LOSS)
        log.enter(LOSS)
        loss = None if loss_of is None else loss_of(result)
        if loss_of is None:
            log.returned(result)
            log.cached(result, set())
        log.ended, log.forward = len(log.items), False
        if loss is not None:
            del log.modules[1:]
            del result  # as a loop does that asks for the loss alone
            # Function modes are off inside a torch function of a tensor; of an edge it is none.
            edge = torch.autograd.graph.get_gradient_edge(loss) if not isinstance(loss, DTensor) else loss
            torch.autograd.backward(edge)
            log.items.append(UnitEvent("", "after", "backward"))
    log.open = False
    return log.tape(used)


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    return (tensor for _, tensor in flatten_tensors(value))

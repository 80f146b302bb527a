"""Policies of checkpointing: what selective ones save, and copies of caches and of written buffers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, _VersionWrapper, create_selective_checkpoint_contexts

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.nested import flatten_tensors
from autoplan.common.torch_internals import TorchDispatchMode, own_buffers, schema_of, version_of
from autoplan.execute.parameters.held import memory_of
from autoplan.ops import op_record
from autoplan.ops.records.answers import Drawn

# Selective checkpointing decides op by op: keep the result, or recompute it.

_GATHERED = ("all_gather", "_allgather", "allgather")


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts for one call that keep every other matmul, attention and all-reduces; the rest is recomputed.

    Gathers are not kept: those of sequence parallelism return full sequences, which are sharded to save memory.
    """
    return create_selective_checkpoint_contexts(_Policy())


def intact_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return `selective_contexts` for a call that is not compiled, where an op may change a kept result in place."""
    first, again = create_selective_checkpoint_contexts(_Policy())

    @contextmanager
    def keeping_intact() -> Iterator[None]:
        with _CopyBeforeChange(first.storage), first:
            yield

    return keeping_intact(), again


def all_but_drawn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts for one compiled call on a CPU that recompute all but ops with random numbers (attention may be
    one).

    torch's partitioner saves a generator state for each of those, and on a CPU puts it after the meshes that gradients
    of DTensors need: each is then taken for the other, and the forward fails. On a GPU it passes generators
    differently.
    """

    def keep_drawn(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        draws = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
        return CheckpointPolicy.MUST_SAVE if draws else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keep_drawn)


class _Policy:
    """A policy that counts matmuls in forward and recomputation separately, so that both runs keep the same ones."""

    def __init__(self) -> None:
        self.matmuls = {False: 0, True: 0}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op.overloadpacket.__name__ if hasattr(op, "overloadpacket") else str(op)
        if getattr(op, "namespace", "") in ("_c10d_functional", "c10d"):
            again = name.startswith(_GATHERED) or name == "wait_tensor"
            return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
        drawn = op_record(name).drawn
        if drawn is Drawn.ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if drawn is Drawn.CONTRACTION:
            self.matmuls[context.is_recompute] += 1
            odd = self.matmuls[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if odd else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE


class _CopyBeforeChange(TorchDispatchMode):
    """A mode that replaces a kept result by a copy before an op changes it in place (`(x @ w).add_(bias)`). torch keeps
    an alias, and refuses it in backward once it was changed. The recomputation makes the change again."""

    supports_higher_order_operators = True

    def __init__(self, storage: Mapping[Any, Any]) -> None:
        super().__init__()
        self.storage = storage

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = schema_of(func)
        if schema.is_mutable:
            arguments = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | (kwargs or {})
            written = [arguments.get(argument.name) for argument in schema.arguments if argument.is_write]
            changed = {memory_of(tensor) for _, tensor in flatten_tensors(written)}
            for saved in _wrapped(list(self.storage.values())):
                if isinstance(saved.val, torch.Tensor) and memory_of(saved.val) in changed:
                    saved.val = saved.val.clone()
                    saved.version = version_of(saved.val)
        return func(*args, **(kwargs or {}))


def _wrapped(storage: Any) -> Iterator[_VersionWrapper]:
    if isinstance(storage, _VersionWrapper):
        yield storage
    elif isinstance(storage, (dict, list, tuple)):
        for item in storage.values() if isinstance(storage, dict) else storage:
            yield from _wrapped(item)


# Key/value caches in calls that are recomputed: the recomputation gets a copy of the original cache.
#
# Most models can be told to use no cache, and are told so in training. Some make one all the same, and some share keys
# and values between blocks through it. The recomputation must find the cache as the first run did, and must not fill it
# twice. So it gets a copy, made before the first run. Tensors that require a gradient are not copied: an in-place
# change of one is an error, never a wrong gradient.


def is_cache(value: Any) -> bool:
    """Return whether an object is one that collects keys and values, or states."""
    if value is None or isinstance(value, (torch.Tensor, str, int, float, Mapping, Sequence, Set, nn.Module, type)):
        return False
    return any(callable(getattr(value, name, None)) for name in dir(type(value)) if name.startswith("update"))


@dataclass
class CacheCopies:
    """Copies of the caches among a call's arguments, by position or name."""

    args: dict[int, Any]
    kwargs: dict[str, Any]
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CacheCopies | None:
        """Return copies for a recomputation; None where no cache is passed."""
        caches = cls(
            {place: value for place, value in enumerate(args) if is_cache(value)},
            {name: value for name, value in kwargs.items() if is_cache(value)},
        )
        return caches._copied(caches.versions) if caches.args or caches.kwargs else None

    def put_into(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with copies of the original caches, which stay unused for yet another run."""
        if any(version_of(tensor) != version for tensor, version in self.versions):
            raise AutoplanError(
                "a cache was changed in place after a checkpointed block read it, so the block cannot be recomputed",
                hint=f"train without a cache ({conventions().cache_switch}=False)",
            )
        fresh = self._copied([])
        return tuple(fresh.args.get(place, value) for place, value in enumerate(args)), {**kwargs, **fresh.kwargs}

    def _copied(self, versions: list[tuple[torch.Tensor, int]]) -> CacheCopies:
        seen: dict[int, Any] = {}
        args = {place: _copy(value, seen, versions) for place, value in self.args.items()}
        kwargs = {name: _copy(value, seen, versions) for name, value in self.kwargs.items()}
        return CacheCopies(args, kwargs, versions)


def _copy(value: Any, seen: dict[int, Any], versions: list[tuple[torch.Tensor, int]]) -> Any:
    """Copy containers and caches deeply, and tensors without gradient; anything else stays the same object."""
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            versions.append((value, version_of(value)))
        seen[id(value)] = value if value.requires_grad else value.clone()
    elif type(value) in (list, tuple, set):
        seen[id(value)] = type(value)(_copy(item, seen, versions) for item in value)
    elif isinstance(value, dict):
        copied = seen[id(value)] = copy.copy(value)
        copied.update({key: _copy(item, seen, versions) for key, item in value.items()})
    elif is_cache(value) and hasattr(value, "__dict__"):
        copied = seen[id(value)] = copy.copy(value)
        vars(copied).update({name: _copy(item, seen, versions) for name, item in vars(value).items()})
    else:
        return value
    return seen[id(value)]


class WrittenBuffers:
    """Buffers that a block's forward writes to (running statistics), as they were: a recomputation starts from copies,
    and writes to these."""

    def __init__(self, block: nn.Module) -> None:
        self.buffers = [
            (module, name, buffer, version_of(buffer), buffer.detach().clone())
            for module in block.modules()
            for name, buffer in own_buffers(module).items()
            if module.training and buffer is not None and not buffer.is_inference()
        ]

    def forget_others(self) -> None:
        """Forget buffers that the forward did not write to. Norms of torch write without counting it."""
        self.buffers = [
            (module, name, buffer, version, before)
            for module, name, buffer, version, before in self.buffers
            if getattr(module, "track_running_stats", False)
            or own_buffers(module).get(name) is not buffer
            or version_of(buffer) != version
        ]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        now = [own_buffers(module).get(name) for module, name, *_ in self.buffers]
        for module, name, _, _, before in self.buffers:
            own_buffers(module)[name] = before.clone()
        try:
            yield
        finally:
            for (module, name, *_), buffer in zip(self.buffers, now, strict=True):
                own_buffers(module)[name] = buffer

"""Activation checkpointing: keep a block's inputs, recompute the rest in backward.

The problem: the recomputation must repeat the forward exactly. So the checkpoint is inside FSDP2's hooks (which gather
parameters and cast inputs once) and outside tensor parallelism's (whose all-reduces, function modes and random streams
belong to the computation). And it must not change the model for anyone else: no wrapper modules, so names, isinstance
checks and state dicts stay as they are; no config is written; key/value caches are turned off call by call while
training, and where a block gets one all the same, the recomputation fills a copy.

A checkpoint is an instance's own `forward` around its class's. It is active whenever gradients are recorded, so
generation and evaluation run as before.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.options import Checkpointing, Request
from autoplan.common.torch_internals import own_parameters
from autoplan.execute.checkpointing.policies import (
    CacheCopies,
    WrittenBuffers,
    all_but_drawn,
    intact_contexts,
    is_cache,
    selective_contexts,
)
from autoplan.execute.executors import Running
from autoplan.execute.parameters.held import record_of
from autoplan.execute.tensor_parallel import applied, record
from autoplan.values import Stack

_STATE = "_autoplan_checkpoint"
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


@dataclass
class Runs:
    """The number of calls that `kept` only inputs for backward, and of runs `again` in backward."""

    kept: int = 0
    again: int = 0


@dataclass
class _State:
    """The state of one checkpointed module: the hooks that now run inside, its former forward, the running state."""

    hooks: dict[str, OrderedDict[int, Any]]
    forward: Callable[..., Any] | None  # an instance's own, if it had one
    selective: bool
    running: Running | None
    runs: Runs = field(default_factory=Runs)


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether this very module is a checkpoint."""
    return _STATE in module.__dict__


def runs_of(model: nn.Module) -> dict[str, Runs]:
    """Return how often each checkpoint in a model was used so far; compiled calls are not counted."""
    return {name: m.__dict__[_STATE].runs for name, m in model.named_modules() if is_checkpointed(m)}


def install_checkpoints(model: nn.Module, wanted: Mapping[str, str], running: Running | None) -> Callable[[], None]:
    """Checkpoint the modules named in `wanted` ({name: mode}), and turn caches off in training calls around them.
    Return a function that undoes it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    undo: list[Callable[[], None]] = []
    for name, mode in wanted.items():
        module = modules[name]
        if is_checkpointed(module):
            raise AutoplanError(f"{name} is already checkpointed", hint="build a fresh model")
        undo.append(_install(module, mode == "selective", running))
    for name, module in modules.items():
        inside = any(other.startswith(f"{name}." if name else "") for other in wanted)
        if inside and conventions().cache_switch in _parameters_of(module):
            undo.append(module.register_forward_pre_hook(_without_cache, prepend=True, with_kwargs=True).remove)

    def remove() -> None:
        while undo:
            undo.pop()()

    return remove


def _parameters_of(module: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return []


def _without_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Turn the cache off in a training call."""
    if not (module.training and torch.is_grad_enabled()):
        return None
    switch = conventions().cache_switch
    place = _parameters_of(module).index(switch)
    if place < len(args):
        return (*args[:place], False, *args[place + 1 :]), kwargs
    return args, {**kwargs, switch: False}


def _install(module: nn.Module, selective: bool, running: Running | None) -> Callable[[], None]:
    own = module.__dict__.get("forward")
    state = _State({name: module.__dict__[name] for name in _HOOKS}, own, selective, running)
    for name in _HOOKS:  # later hooks, such as FSDP2's, run outside the checkpoint
        module.__dict__[name] = OrderedDict()
    module.__dict__[_STATE] = state
    function = inspect.unwrap(own) if own is not None else type(module).forward
    module.__dict__["forward"] = types.MethodType(_checkpointed(function), module)

    def remove() -> None:
        for name, hooks in state.hooks.items():
            hooks.update(module.__dict__[name])
            module.__dict__[name] = hooks
        del module.__dict__["forward"], module.__dict__[_STATE]
        if own is not None:
            module.__dict__["forward"] = own

    return remove


def _checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward with the signature of `function` that decides, call by call, whether to checkpoint."""

    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: _State = self.__dict__[_STATE]
        if not torch.is_grad_enabled():
            return _run(self, state, args, kwargs)
        if not torch.compiler.is_compiling():
            return _recorded(self, state, args, kwargs)
        # Traced once: the compiler recomputes inside of what it traced.
        if any(is_cache(value) for value in (*args, *kwargs.values())):
            return _run(self, state, args, kwargs)
        if state.running is not None and state.running.draws:  # a graph cannot switch streams
            return _uncompiled(self, state, args, kwargs)
        options: dict[str, Any] = {"context_fn": selective_contexts} if state.selective else {}
        if not options and state.running is not None and state.running.mesh.device_type == "cpu":
            options["context_fn"] = all_but_drawn
        return checkpoint(_run, self, state, args, kwargs, use_reentrant=False, **options)

    return forward


def _recorded(module: nn.Module, state: _State, args: Any, kwargs: Any) -> Any:
    options: dict[str, Any] = {"context_fn": intact_contexts} if state.selective else {}
    return checkpoint(_Calls(module, state), args, kwargs, use_reentrant=False, preserve_rng_state=True, **options)


_uncompiled = torch.compiler.disable(_recorded)


class _Calls:
    """One checkpointed call: the first run is the forward, any other a recomputation in backward."""

    def __init__(self, module: nn.Module, state: _State) -> None:
        self.module, self.state, self.ran = module, state, False
        self.caches: CacheCopies | None = None
        self.written = WrittenBuffers(module)
        self.modes = _get_current_function_mode_stack()
        state.runs.kept += 1
        self.random = state.running is not None and state.running.randomness.active
        self.records = [record for below in module.modules() if (record := record_of(below)) is not None]
        self.summed = [record.summed.copy() for record in self.records]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.ran:
            self.ran = True
            self.caches = CacheCopies.of(args, kwargs)
            result = _run(self.module, self.state, args, kwargs)
            self.written.forget_others()
            return result
        self.state.runs.again += 1
        if self.caches is not None:
            args, kwargs = self.caches.put_into(args, kwargs)
        with self._inside_the_model():
            return _run(self.module, self.state, args, kwargs)

    @contextmanager
    def _inside_the_model(self) -> Iterator[None]:
        """Restore what the forward had set up around a block: backward recomputes it outside of the model's forward."""
        running = self.state.running
        reading = next((record.reading for record in self.records), None)  # one per model
        with ExitStack() as stack:
            # Function modes of the forward (such as `with torch.device(...)`) are off in backward.
            active = _get_current_function_mode_stack()
            for mode in self.modes:
                if not any(mode is other for other in active):
                    stack.enter_context(mode)
            stack.enter_context(_unconverted(self.module))
            if reading is not None:
                stack.callback(setattr, reading, "inside", reading.inside)
                stack.callback(setattr, reading, "views", reading.views)
                reading.inside, reading.views = True, {}
            for record, summed in zip(self.records, self.summed, strict=True):
                stack.callback(setattr, record, "summed", record.summed)
                record.summed = summed
            stack.enter_context(self.written.as_before())
            if running is not None:
                # Random streams count as switched; the checkpoint itself restores their state.
                stack.callback(running.frames.__setitem__, slice(None), list(running.frames))
                running.frames.clear()
                if self.random:
                    running.randomness.outside.append(None)
                    stack.callback(running.randomness.outside.pop)
            yield


@contextmanager
def _unconverted(block: nn.Module) -> Iterator[None]:
    """Keep modules that convert others in their forward (`self.gate.to(self.dtype)`) from converting them again. torch
    would replace DTensors even if nothing changes, and backward waits for the old ones."""
    changed = []
    for module in block.modules():
        if any(isinstance(parameter, DTensor) for parameter in own_parameters(module).values()):
            module.__dict__["_apply"] = functools.partial(_apply_if_needed, module)
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            module.__dict__.pop("_apply", None)


def _apply_if_needed(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], *rest: Any) -> nn.Module:
    tensors = [*module.parameters(), *module.buffers()]
    with torch.no_grad():
        if all(function(tensor) is tensor for tensor in tensors):
            return module
    return type(module)._apply(module, function, *rest)


def _run(module: nn.Module, state: _State, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the former forward with the hooks that were there when the checkpoint was installed."""
    hooks = state.hooks
    forward = state.forward or functools.partial(type(module).forward, module)
    called: set[int] = set()
    result: Any = None
    try:
        for key, hook in list(hooks["_forward_pre_hooks"].items()):
            if key in hooks["_forward_pre_hooks_with_kwargs"]:
                changed = hook(module, args, kwargs)
                args, kwargs = changed if changed is not None else (args, kwargs)
            else:
                new_args = hook(module, args)
                if new_args is not None:
                    args = new_args if isinstance(new_args, tuple) else (new_args,)
        result = forward(*args, **kwargs)
        for key, hook in list(hooks["_forward_hooks"].items()):
            called.add(key)
            changed = _post(module, hooks, key, hook, args, kwargs, result)
            result = result if changed is None else changed
        return result
    except BaseException:  # run the hooks that are always called, then raise
        for key in [k for k in hooks["_forward_hooks_always_called"] if k not in called]:
            _post(module, hooks, key, hooks["_forward_hooks"][key], args, kwargs, result)
        raise


def _post(module: nn.Module, hooks: Any, key: int, hook: Any, args: Any, kwargs: Any, result: Any) -> Any:
    with_kwargs = key in hooks["_forward_hooks_with_kwargs"]
    return hook(module, args, kwargs, result) if with_kwargs else hook(module, args, result)


# The modules that activation checkpointing takes, and an estimate of what that saves.
#
# The problem: a request for checkpointing that has no effect is noticed when a full-size run is out of memory. So
# whatever is skipped is noted, nothing wrapped is an error, and an estimate of the saving is in the record.


def checkpoint_blocks(
    model: nn.Module, stacks: tuple[Stack, ...], request: Request, scope: str | Iterable[str] = "all"
) -> Callable[[], None]:
    """Checkpoint the requested blocks, after tensor parallelism and before FSDP2; return a function that undoes it."""
    before = applied(model)
    assert before is not None, "what was done is recorded first"
    wanted, notes = _choose(model, stacks, request, scope)
    switch, ending = conventions().own_checkpointing
    for name, module in model.named_modules():  # the library's own, inside ours, would recompute everything twice
        if getattr(module, switch, False) is True:
            hint = f"call model.{ending}() before parallelize"
            raise AutoplanError(f"{name or 'the model'} already has {switch} on", hint=hint)
    modules = dict(model.named_modules(remove_duplicate=False))
    saved = sum(saved_bytes_per_token(modules[name], mode) for name, mode in wanted.items())
    remove = install_checkpoints(model, wanted, before.running)
    record(model, before.plan, checkpointed=tuple(wanted), saved_bytes=saved, notes=(*before.notes, *notes))
    return remove


def _choose(
    model: nn.Module, stacks: tuple[Stack, ...], request: Request, scope: str | Iterable[str]
) -> tuple[dict[str, str], list[str]]:
    """Return the modules to checkpoint, {name: mode}, and notes of what is left out. Frozen blocks are skipped unless a
    callable asks for them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = Checkpointing(request, scope).kinds()
    wanted: dict[str, str] = {}
    notes: list[str] = []
    chosen_ids: set[int] = set()
    for stack in stacks:
        if stack.kind not in kinds:
            notes.append(f"{stack.name}: {len(stack.fqns)} blocks are not checkpointed: {stack.kind} is out of scope")
            continue
        frozen = 0
        for fqn in stack.fqns:
            mode = _mode_for(fqn, modules[fqn], request)
            if mode is None and not callable(request):
                frozen += 1
            elif mode:
                chosen = {fqn: mode}
                if mode == "submodule":
                    chosen = {}
                    for name, part in _parts(modules[fqn]):
                        parameters = list(part.parameters())
                        # A lone matmul or table saves no more than its input.
                        saves = any(True for _ in part.children()) or all(p.dim() < 2 for p in parameters)
                        if parameters and saves:
                            chosen[f"{fqn}.{name}"] = "block"
                    if not chosen:
                        notes.append(f"{fqn} has no submodules that save activations: it is checkpointed as a whole")
                        chosen = {fqn: "block"}
                wanted.update({n: m for n, m in chosen.items() if id(modules[n]) not in chosen_ids})
                chosen_ids.update(id(modules[n]) for n in chosen)
        if frozen:
            notes.append(f"{stack.name}: {frozen} of {len(stack.fqns)} blocks are frozen and not checkpointed")
    if not wanted:
        shown = "a function" if callable(request) else repr(request)
        raise AutoplanError(
            f"activation_checkpointing={shown} was requested, but no block of {type(model).__name__} was wrapped",
            hint="; ".join(notes) or "autoplan.layers(model) finds no repeated blocks: checkpoint the model by hand",
        )
    return wanted, notes


def _mode_for(fqn: str, block: nn.Module, request: Request) -> str | None:
    """Return the mode for one block; "" for none; None if it is frozen."""
    if callable(request):
        answer = request(fqn, block)
        if answer is False or answer is None:
            return ""
        Checkpointing(answer)
        return "block" if answer is True else str(answer)
    if not any(parameter.requires_grad for parameter in block.parameters()):
        return None
    return "block" if request is True else str(request)


def _parts(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Yield the child modules, with module lists opened."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from ((f"{name}.{inner}", part) for inner, part in _parts(child))
        else:
            yield name, child


def saved_bytes_per_token(module: nn.Module, mode: str = "block") -> int:
    """Return the bytes per token that checkpointing saves: the layers' inputs and outputs, less the module's own input.

    An estimate from widths: normalisations and activation functions between layers keep about as much as layers return;
    every layer is assumed to see every token, so a mixture of experts is overestimated.
    """
    widths: list[tuple[int, int, int]] = []  # read, written, bytes of an element
    for parameter in module.parameters():
        if parameter.dim() > 1:
            weight = parameter.detach()
            weight = weight.to_local() if isinstance(weight, DTensor) else weight
            reads, writes = (weight.shape[1], weight.shape[0]) if weight.dim() == 2 else weight.shape[:-3:-1]
            widths.append((int(reads), int(writes), weight.element_size()))
    if not widths:
        return 0
    total = sum((reads + writes) * size for reads, writes, size in widths)
    checkpointed = widths[0][0] * widths[0][2]
    if mode == "selective":
        checkpointed += sum(writes * size for _, writes, size in widths[::2])
    return max(0, total - checkpointed)

"""A live model is changed fully, or is left bit for bit as it was, whatever interrupts the change.

The problem: sharding changes parameters, buffers, hooks, classes, integers and forwards of hundreds of modules, partly
in code of FSDP2 that cannot undo itself; and an error or Ctrl-C may come between any two lines, even between a change
and the record of how to undo it. So nothing is undone step by step: before the first change everything that a model
consists of is recorded (references, no copies of tensors), and any exception restores all of it.

Patches of other packages made meanwhile (`patched.py`) and the random state are restored, too.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping

from autoplan.common.torch_internals import gradient_hooks, own_buffers, own_parameters, put_gradient_hooks
from autoplan.patches.classes import give_class
from autoplan.patches.patched import Hold, note_holds

_open = threading.local()  # simulated ranks are threads: each changes a model of its own
_CONTAINERS = (dict, list, set)


class whole_or_as_it_was:
    """Restore the model if the block raises. Nested blocks for the same model leave that to the outer one.

    This is a class, not a generator: an interrupt while the block is left must not undo, later, a complete change.
    Nothing needs cleanup either: the block is open as long as this object lives.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.holds: list[Hold] = []
        self.before: _Before | None = None

    def __enter__(self) -> None:
        if not hasattr(_open, "blocks"):
            _open.blocks = weakref.WeakValueDictionary()
        if id(self.model) not in _open.blocks:
            self.before = _Before.of(self.model)
            _open.blocks[id(self.model)] = self
            note_holds(self)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        while kind is not None and self.before is not None:
            try:
                for hold in list(self.holds):
                    hold.release()
                self.before.put_back()
                self.before = None
            except KeyboardInterrupt:  # try again: what is restored already stays so
                continue
        if _open.blocks.get(id(self.model)) is self:
            del _open.blocks[id(self.model)]


@dataclass
class _Before:
    """Everything that makes up a model, by reference."""

    modules: list[_Module] = field(default_factory=list)
    tensors: list[_Tensor] = field(default_factory=list)
    random: torch.Tensor = field(default_factory=lambda: torch.get_rng_state())
    cuda: torch.Tensor | None = None
    gradients: bool = field(default_factory=torch.is_grad_enabled)

    @staticmethod
    def of(model: nn.Module) -> _Before:
        before = _Before(cuda=torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None)
        seen: dict[int, torch.Tensor] = {}
        for module in model.modules():
            before.modules.append(_Module.of(module))
            values = (*own_parameters(module).values(), *own_buffers(module).values(), *module.__dict__.values())
            seen.update((id(value), value) for value in values if isinstance(value, torch.Tensor))
        before.tensors = [_Tensor.of(tensor) for tensor in seen.values()]
        return before

    def put_back(self) -> None:
        for module in self.modules:
            module.put_back()
        for tensor in self.tensors:
            tensor.put_back()
        torch.set_grad_enabled(self.gradients)
        torch.set_rng_state(self.random)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


@dataclass
class _Module:
    """A module: its class, its attributes, and the contents of those that are changed in place (parameters, hooks)."""

    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any]
    contents: list[tuple[Any, list[Any]]]
    state: Any  # FSDP2's state of the module, which is kept elsewhere

    @staticmethod
    def of(module: nn.Module) -> _Module:
        attributes = dict(module.__dict__)
        contents = [(value, _items(value)) for value in attributes.values() if isinstance(value, _CONTAINERS)]
        return _Module(module, type(module), attributes, contents, _module_state_mapping.get(module))

    def put_back(self) -> None:
        give_class(self.module, self.kind)
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for container, items in self.contents:
            if not _same(_items(container), items):
                container.clear()
                container.extend(items) if isinstance(container, list) else container.update(items)
        if self.state is not None:
            _module_state_mapping[self.module] = self.state
        else:
            _module_state_mapping.pop(self.module, None)


@dataclass
class _Tensor:
    """A parameter or buffer: its class, its memory, its gradient, its hooks, and the attributes that libraries set."""

    tensor: torch.Tensor
    kind: type
    data: torch.Tensor
    grad: torch.Tensor | None
    requires_grad: bool
    attributes: dict[str, Any]
    hooks: tuple[Any, Any]
    contents: list[tuple[Any, list[Any]]]

    @staticmethod
    def of(tensor: torch.Tensor) -> _Tensor:
        hooks = gradient_hooks(tensor)
        contents = [(hook, _items(hook)) for hook in hooks if isinstance(hook, dict)]
        grad = tensor.grad if tensor.is_leaf else None
        return _Tensor(
            tensor, type(tensor), tensor.detach(), grad, tensor.requires_grad, dict(vars(tensor)), hooks, contents
        )

    def put_back(self) -> None:
        tensor: Any = self.tensor
        if type(tensor) is not self.kind:  # one that was replaced
            tensor.__class__ = self.kind
        if tensor.device != self.data.device:  # FSDP2 moves a parameter to the mesh's device in place
            tensor.data = self.data
        if tensor.is_leaf:
            if tensor.grad is not self.grad:
                tensor.grad = self.grad
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad_(self.requires_grad)
        for hooks, items in self.contents:
            hooks.clear()
            hooks.update(items)
        if any(now is not before for now, before in zip(gradient_hooks(tensor), self.hooks, strict=True)):
            put_gradient_hooks(tensor, *self.hooks)
        vars(tensor).clear()
        vars(tensor).update(self.attributes)


def _items(container: Any) -> list[Any]:
    return list(container.items()) if isinstance(container, dict) else list(container)


def _same(now: list[Any], before: list[Any]) -> bool:
    """Return whether both lists hold the very same objects in the same order."""
    return len(now) == len(before) and all(
        new is old or (isinstance(new, tuple) and isinstance(old, tuple) and _same(list(new), list(old)))
        for new, old in zip(now, before, strict=True)
    )

"""Undo what a run leaves in a model.

The problem: a forward may keep a state (a cache, a memory, a slow copy of its own weights), and a rank's model goes
through all checks, one after the other. Unsharded, each check has a fresh copy. So ranks put the model back after each.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Put back parameters, buffers, attributes of modules and what is in their containers."""
    undo = [*map(_of_tensor, _tensors(model)), *(_of_container(vars(module)) for module in model.modules())]
    try:
        yield
    finally:
        with torch.no_grad():
            for put_back in reversed(undo):
                put_back()


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    kept = (value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))
    return list({id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *kept)}.values())


def _of_tensor(tensor: torch.Tensor) -> Callable[[], None]:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
    values = local.clone()

    def put_back() -> None:
        if isinstance(tensor, DTensor):
            tensor._local_tensor = local  # `.data = x` replaces it
        now = local if isinstance(tensor, DTensor) else tensor.detach()
        if now.shape == values.shape and not torch.equal(now, values):
            now.copy_(values)

    return put_back


def _of_container(container: Any) -> Callable[[], None]:
    """Return the function that puts back the items of a container and of the containers in it, the same objects."""
    items = list(container.items()) if isinstance(container, dict) else list(container)
    values = container.values() if isinstance(container, dict) else items
    inner = [_of_container(value) for value in values if type(value) in _CONTAINERS]

    def put_back() -> None:
        for one in inner:
            one()
        now = list(container.items()) if isinstance(container, dict) else list(container)
        parts = _flat(now), _flat(items)
        if len(parts[0]) != len(parts[1]) or any(a is not b for a, b in zip(*parts, strict=True)):
            container.clear()
            container.extend(items) if isinstance(container, list | deque) else container.update(items)

    return put_back


# Hooks are put back too: a library may set them in its first forward, and keep an attribute that says so
_CONTAINERS = (dict, OrderedDict, list, set, deque)


def _flat(items: list[Any]) -> list[Any]:
    return [part for item in items for part in (item if isinstance(item, tuple) else (item,))]

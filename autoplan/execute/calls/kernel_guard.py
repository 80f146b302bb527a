"""Kernels that take a layer's weight must not do without what the plan does at that layer.

A fused kernel may be given the weight of a norm or of an output projection and do their work itself, on a GPU, in
training, where its library is installed: no trace on a CPU shows it, and no hook of that layer is reached. On a rank's
shard of the weights the result would be wrong without a word. So where such a kernel is handed a parameter of a layer
at which the plan does something, its reference in plain torch runs in its place; where there is none, that is an error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.common.errors import PlanMismatchError
from autoplan.execute.parameters.held import record_of
from autoplan.patches.kernels import KERNEL_GUARDS, OptionalKernel, optional_kernels
from autoplan.patches.patched import Alone, Hold, Place, hold

_alone = Alone()  # simulated ranks are threads


class _Guard:
    """Stands where a kernel stood, for as long as a planned model needs it."""

    def __init__(self, kernel: OptionalKernel) -> None:
        self.kernel = kernel
        self.function: Callable[..., Any] | None = None
        self.planned: WeakSet[nn.Module] = WeakSet()

    def instead_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.function = function

        def guarded(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        # where parameters lie is nothing that a compiler could rely on
        return torch.compiler.disable(functools.wraps(function)(guarded))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.function is not None
        taken = self._taken((*args, *kwargs.values()))
        if taken is None:
            return self.function(*args, **kwargs)
        if self.kernel.reference is None:
            raise PlanMismatchError(
                f"the kernel {self.kernel.name!r} of {self.kernel.package} takes a weight of {type(taken).__name__}, "
                "whose sums over ranks it would leave out",
                hint=f"make the model run without {self.kernel.package}",
            )
        parameters = inspect.signature(self.kernel.reference).parameters
        return self.kernel.reference(*args, **{name: value for name, value in kwargs.items() if name in parameters})

    def _taken(self, values: Iterable[Any]) -> nn.Module | None:
        """The planned layer whose parameter is handed over, or a view of it: it lies in the same memory."""
        given = {_memory(value) for value in values if isinstance(value, torch.Tensor)} - {0}  # 0: it holds nothing
        planned: list[nn.Module] = []
        _alone.run(lambda: planned.extend(self.planned))
        planned = [module for module in planned if record_of(module) is not None]  # or it was put back
        own = ((module, p) for module in planned for p in module._parameters.values() if p is not None)
        return next((module for module, parameter in own if _memory(parameter) in given), None)


def _memory(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


_guards: WeakValueDictionary[tuple[int, str], _Guard] = WeakValueDictionary()  # what stands in a place keeps its guard


def guard_kernels(model: nn.Module, planned: Iterable[nn.Module], undo: list[Callable[[], None]]) -> None:
    """Put a guard before each optional kernel that is installed and that the model's code may call."""
    mine = list(planned)
    for kernel in optional_kernels(model) if mine else ():
        if kernel.installed:
            guard = _guard_of(kernel, mine)
            kept = hold(KERNEL_GUARDS, [Place(kernel.home, kernel.name, guard.instead_of)])
            kept.until_gone(model)
            undo.append(partial(_release, guard, mine, kept))


def _guard_of(kernel: OptionalKernel, mine: list[nn.Module]) -> _Guard:
    """The guard that stands before a kernel, or a new one, which now knows of these layers."""
    found: list[_Guard] = []

    def find() -> None:
        found.append(_guards.setdefault((id(kernel.home), kernel.name), _Guard(kernel)))
        found[0].planned.update(mine)

    _alone.run(find)
    return found[0]


def _release(guard: _Guard, planned: list[nn.Module], kept: Hold) -> None:
    _alone.run(partial(guard.planned.difference_update, planned))
    kept.release()

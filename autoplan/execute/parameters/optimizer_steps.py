"""Steps of optimizers that compute with more than each element of a parameter by itself.

The problem: most optimizers go element by element, and need not know that a parameter lies on ranks. Others take means
of rows, dot products of all gradients, or orthogonal matrices. Some of that DTensor cannot do, and says so in the
middle of a step, in words about its own operators. And where a parameter has more rows than the checkpoint (some lie on
several ranks), they would count twice, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Muon, Optimizer

from autoplan.common.errors import AutoplanError
from autoplan.execute.parameters.held import held_by

__all__ = ["watch_steps"]

_OF_WHOLE_PARAMETERS = (LBFGS, Muon)


def watch_steps(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Refuse what would count rows twice, and have what fails in a step say why."""
    for parameter in parameters if isinstance(optimizer, _OF_WHOLE_PARAMETERS) else ():
        held = held_by(parameter)
        if held is not None and tuple(parameter.shape) != held.shape:
            raise AutoplanError(
                f"{type(optimizer).__name__} on a parameter of {list(held.shape)}, of which some rows lie on several "
                f"ranks ({list(parameter.shape)} in all): it would count them more than once",
                hint="an optimizer that goes element by element, such as AdamW; or keep the parameter whole: "
                "overrides={name: 'replicate'}",
            )
    plain = optimizer.step

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        closure = _Closure(self, args[0] if args else kwargs.get("closure"))
        if args:
            args = (closure.given and closure, *args[1:])
        elif "closure" in kwargs:
            kwargs["closure"] = closure.given and closure
        try:
            return plain(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, (AutoplanError, torch.OutOfMemoryError)) or error is closure.error:
                raise
            raise AutoplanError(
                f"{type(self).__name__} cannot make a step on parameters that lie on ranks: {error}",
                hint="an optimizer that goes element by element, such as AdamW or SGD, works",
            ) from error
        finally:
            closure.forget()

    optimizer.step = MethodType(step, optimizer)


class _Closure:
    """The closure of a step; its errors are its own. LBFGS puts a plain zero where a parameter got no gradient, beside
    which DTensors cannot stand: there it is one of theirs, for as long as the step takes."""

    def __init__(self, optimizer: Optimizer, given: Callable[[], Any] | None) -> None:
        self.optimizer, self.given = optimizer, given
        self.error: BaseException | None = None
        self.filled: list[torch.Tensor] = []

    def __call__(self) -> Any:
        assert self.given is not None
        self.forget()
        try:
            loss = self.given()
        except BaseException as error:
            self.error = error
            raise
        if isinstance(self.optimizer, LBFGS):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None and isinstance(parameter, DTensor):
                        parameter.grad = torch.zeros_like(parameter, requires_grad=False)
                        self.filled.append(parameter)
        return loss

    def forget(self) -> None:
        """No gradient again where there was none."""
        for parameter in self.filled:
            parameter.grad = None
        self.filled.clear()

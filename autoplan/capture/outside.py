"""Refuse runs that reach weights past their own model.

The problem: what a model does is learnt from runs of copies, and it is sharded by putting other tensors in place of its
own. Code that reaches a weight in a way that follows neither (a global, a closure of a class, the weight itself kept in
a list) computes with the tensor that was there before: the trace shows no use of the model's weight, the plan is wrong,
and a comparison of copies with each other says that all is well. So each copy knows the parameters of what it was
copied from, a sharded model those that it had before, and a run that meets one of them is refused by name.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoplan.common.errors import OutsideError
from autoplan.common.nested import flatten_tensors
from autoplan.common.torch_internals import BASE, DisableTorchFunction

_Known: TypeAlias = Mapping[int, tuple[weakref.ref[torch.Tensor], str]]


@dataclass(frozen=True)
class Outsiders:
    """Parameters, by identity, that a model's run must not meet: those of the model it was copied from, with their
    views, and those that were replaced in it, whose views may rightly be its own."""

    originals: _Known
    replaced: _Known

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the foreign parameter that a tensor is, or is a view of; None if it is none."""
        name = _found(self.originals, tensor) or _found(self.replaced, tensor)
        if name is None and self.originals:
            with DisableTorchFunction():
                base = BASE.__get__(tensor)
            name = None if base is None else _found(self.originals, base)
        return name

    def refuse(self, tensor: torch.Tensor, where: str) -> None:
        """Raise OutsideError if the tensor is one of them."""
        name = self.name_of(tensor)
        if name is not None:
            raise OutsideError(
                f"the forward of {where or 'the model'} uses the parameter {name!r} from outside the "
                "model: through a global, a class, or a reference that is not an attribute of its module",
                hint="read it from the module that owns it (self.module.weight), so that a copy or a sharded "
                "model uses its own",
            )


def _found(known: _Known, tensor: torch.Tensor) -> str | None:
    reference, name = known.get(id(tensor), (None, None))
    return name if reference is not None and reference() is tensor else None


_NOBODY = Outsiders({}, {})
_remembered: weakref.WeakKeyDictionary[nn.Module, Outsiders] = weakref.WeakKeyDictionary()


def remember_original(new: nn.Module, original: nn.Module) -> None:
    """Record that a run of the copy must not meet parameters of the original, nor of what that was copied from."""
    outsiders = outsiders_of(original)
    own = {id(parameter) for parameter in new.parameters()}
    originals = {**outsiders.originals, **outsiders.replaced, **_parameters(original)}
    _remembered[new] = Outsiders({key: entry for key, entry in originals.items() if key not in own}, {})


def replacing(model: nn.Module, change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Apply a change to the model and return it; a run of it must not meet the parameters that it had before."""
    before, outsiders = _parameters(model), outsiders_of(model)
    changed = change(model)
    own = {id(parameter) for parameter in changed.parameters()}
    gone = {key: entry for key, entry in {**outsiders.replaced, **before}.items() if key not in own}
    _remembered[changed] = Outsiders(outsiders.originals, gone)
    return changed


def outsiders_of(model: nn.Module) -> Outsiders:
    """Return the parameters that a run of the model must not meet."""
    return _remembered.get(model, _NOBODY)


def _parameters(model: nn.Module) -> dict[int, tuple[weakref.ref[torch.Tensor], str]]:
    return {id(parameter): (weakref.ref(parameter), name) for name, parameter in model.named_parameters()}


@contextmanager
def refusing_outsiders(model: nn.Module) -> Iterator[None]:
    """Raise OutsideError when a torch function inside is passed a parameter that a run of the model must not meet."""
    outsiders = outsiders_of(model)
    if outsiders is _NOBODY:
        yield
        return
    with _Refusing(model, outsiders):
        yield


class _Refusing(TorchFunctionMode):
    def __init__(self, model: nn.Module, outsiders: Outsiders) -> None:
        super().__init__()
        self.model, self.outsiders = model, outsiders

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not str(getattr(func, "__name__", "")).startswith("__get__"):  # a query of dtype or device reads no values
            for _, tensor in flatten_tensors((args, kwargs)):
                if self.outsiders.name_of(tensor) is not None:
                    self.outsiders.refuse(tensor, self._where())
        return func(*args, **kwargs)

    def _where(self) -> str:
        """Return the name of the module whose method is running."""
        names = {id(module): name for name, module in self.model.named_modules()}
        frame = sys._getframe(1)
        while frame is not None:
            name = names.get(id(frame.f_locals.get("self")))
            if name is not None:
                return name
            frame = frame.f_back  # type: ignore[assignment]
        return ""

"""Parameters that a model had before it was sharded.

The problem: sharding puts other parameters in their place, and whoever still holds the old ones (an optimizer that was
made before, a list of a module, a closure) works on weights that the model no longer has: a step changes nothing,
without an error. So an old parameter says so where it is differentiated, where its gradient or data is asked for, and
where it is changed. Its values, its shape and a copy of it can be read as before, without gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoplan.common.errors import AutoplanError
from autoplan.common.nested import flatten_tensors
from autoplan.common.torch_internals import DisableTorchFunctionSubclass
from autoplan.patches.classes import give_class

_NAME = "_autoplan_replaced"


class _Replaced(nn.Parameter):
    """The class of such a parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            if func in _ASKED or _changes(func):
                _refuse(args[0], getattr(func, "__name__", "") in ("__get__", "__set__"))
            result = func(*args, **(kwargs or {}))
            if torch.is_grad_enabled() and any(x.requires_grad for _, x in flatten_tensors(result)):
                for _, tensor in flatten_tensors((args, kwargs or {})):
                    _refuse(tensor, False)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with DisableTorchFunctionSubclass():
            copy = nn.Parameter(self.detach().clone(), self.requires_grad)
        mark_replaced(copy, vars(self)[_NAME])
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        with DisableTorchFunctionSubclass():
            return super().__reduce_ex__(protocol)


_ASKED: tuple[Any, ...] = (
    torch.Tensor.grad.__get__,
    torch.Tensor.data.__get__,
    torch.Tensor.data.__set__,
    torch.Tensor.requires_grad.__set__,
)


def _changes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return func == torch.Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__"))


def _refuse(tensor: Any, asked: bool) -> None:
    if type(tensor) is not _Replaced:
        return
    how = "is asked for its gradient or data" if asked else "is used"
    raise AutoplanError(
        f"the parameter {vars(tensor)[_NAME]!r} that the model had before it was sharded {how}: the model has another "
        "in its place",
        hint="make optimizers, and lists of parameters, after autoplan.parallelize; to read an old parameter's values, "
        "use torch.no_grad()",
    )


def mark_replaced(parameter: nn.Parameter, name: str) -> None:
    """Let a parameter refuse what would be lost."""
    vars(parameter)[_NAME] = name
    give_class(parameter, _Replaced)


def unmark_replaced(parameter: nn.Parameter) -> None:
    """Let it be a usual parameter again."""
    give_class(parameter, nn.Parameter)
    parameter.__dict__.pop(_NAME, None)

"""Double precision all the way: what a model computes in single precision inside is lifted too.

Norms, softmax, routers and rotary tables are often written to compute in float32 whatever the model's dtype. In a
float64 check that leaves rounding of 1e-7 in the middle, and where large terms cancel (a gradient that is zero but for
them) it looks like an error of 1e-4. So while a float64 model is checked, every request for float32 gets float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoplan.patches.patched import Patch


class Lifted(TorchFunctionMode):
    """`.float()`, `.to(torch.float32)`, `dtype=torch.float32`: all mean float64 while this mode is on.

    So does a tensor made of a number: the least one of double precision, for masks, is too large for single precision.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(_lifted(value) for value in args)
        named = {name: _lifted(value) for name, value in (kwargs or {}).items()}
        if func in (torch.tensor, torch.as_tensor, torch.full) and any(isinstance(value, float) for value in args):
            named.setdefault("dtype", torch.float64)
        return func(*args, **named)


def _lifted(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _canary() -> bool:
    """Do all ways of asking for single precision come past a function mode?"""
    x = torch.ones(2, dtype=torch.float64)
    with Lifted():
        asked = (x.float(), x.to(torch.float32), x.sum(dtype=torch.float32), torch.full((1,), 0.5), torch.tensor(0.5))
    return all(found.dtype == torch.float64 for found in asked) and x.float().dtype == torch.float32


DOUBLE_PRECISION = Patch(
    name="double precision",
    replaces="torch.float32 in calls of torch functions, by torch.float64 (a torch function mode)",
    why="what a float64 model computes in float32 inside would look like an error of the plan",
    scope="while a float64 model is checked",
    undone="the mode is left",
    where="autoplan/patches/double_precision.py",
    canary=_canary,
)

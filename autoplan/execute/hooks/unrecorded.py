"""What no recorded call did, where a call does it and hooks can tell. (A file of its own: of none of this a plan says
what is to be done.)

Modules that never ran: they are whole, and so are the gradients that they give. But what they read may be a value whose
gradient is summed over ranks, since every reader that was seen gives a part of it. There a whole gradient would count
once for each rank: it is given in equal parts.

Constants that are none: a stream may be zeros until a branch fills it. What reads it then gives each rank's part of a
gradient, of which no instruction knows. It is summed, or the call is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autoplan.common.errors import PlanMismatchError
from autoplan.common.nested import change_if_tensor, change_input, changed_inside, signature_names
from autoplan.common.patterns import is_under, matches
from autoplan.execute.collectives import (
    RankGroup,
    copy_to_ranks,
    gradient_is_summed,
    is_of_compiled_code,
    scale_gradient,
)
from autoplan.values import AllReduceGradient, Constant, Runtime

__all__ = ["watch_unrecorded"]


def watch_unrecorded(modules: dict[str, nn.Module], seen: Runtime, group: RankGroup) -> Iterator[RemovableHandle]:
    """Have idle modules give their part of such gradients, and ranks sum those of what was constant, from now on."""
    if group.size == 1:
        return
    given_on = any(one.side == "output" for one in seen.of(AllReduceGradient))
    for name, module in modules.items():
        if any(is_under(pattern, name) for pattern in seen.idle):
            watch = partial(_give_parts, _Idle(name, group.size, given_on))
            yield module.register_forward_pre_hook(watch, with_kwargs=True)
        for one in seen.constants:
            if matches(one.pattern, name):
                yield _watch(module, name, one, group)


class _Idle(NamedTuple):
    """An idle module. `given_on`: do others return values whose gradient is summed?"""

    name: str
    ranks: int
    given_on: bool


def _give_parts(idle: _Idle, module: nn.Module, args: Any, kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return None
    if torch.compiler.is_compiling():
        raise _compiled(idle)

    def part(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return changed_inside(value, part)
        if idle.given_on and is_of_compiled_code(value):
            raise _compiled(idle)
        return scale_gradient(value, 1.0 / idle.ranks) if gradient_is_summed(value) else value

    with torch._C.DisableTorchFunction():
        return tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()}


def _compiled(idle: _Idle) -> PlanMismatchError:
    return PlanMismatchError(
        f"{idle.name} runs, which no recorded call did, and in compiled code nobody can tell whether ranks sum its "
        "gradients",
        hint=f"plan with inputs= that reach {idle.name}, or run this call without torch.compile",
    )


def _watch(module: nn.Module, name: str, constant: Constant, group: RankGroup) -> RemovableHandle:
    side, path, names = constant.side, constant.path, signature_names(module)

    def change(x: torch.Tensor) -> torch.Tensor:
        if constant.sums or not (x.requires_grad and torch.is_grad_enabled()):
            return copy_to_ranks(x, group)
        place = "".join(f"[{step!r}]" for step in path)
        raise PlanMismatchError(
            f"what {name} {'takes' if side == 'input' else 'returns'}{' at ' * bool(place)}{place} has a gradient, of "
            "which each rank makes a part: it was a constant in every recorded call",
            hint="plan with inputs= in which it is not (several calls: inputs={'usual': {…}, 'other': {…}})",
        )

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:  # where kernels take masks of their own, these stay
        with torch._C.DisableTorchFunction():
            return change_input(args, kwargs, names, path, change, name, at=change_if_tensor)

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return change_if_tensor(output, path, change, name)

    if side == "output":
        return module.register_forward_hook(after)
    return module.register_forward_pre_hook(before, with_kwargs=True)

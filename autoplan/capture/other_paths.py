"""Calls of other sizes that take another way through a model's code: they are recorded beside the first.

The problem: windows are shifted only where a picture is larger than one, and attention is sparse only where a sequence
is long. What one call never reaches is planned by nobody. So calls of two sizes run on a plain copy, and the torch
calls that each makes are compared, by module and place in the code; where the second makes one that the first does not,
both are recorded, and the plan is made for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoplan.capture.called import PART
from autoplan.capture.dry_run import Twin
from autoplan.common.code_place import call_name, code_place
from autoplan.common.errors import OutsideError

__all__ = ["OTHER_SIZES", "with_other_paths"]

OTHER_SIZES = " in other sizes"  # how the name of such a feed ends
_Way = set[tuple[str, str, str]]


def with_other_paths(
    model: nn.Module, feeds: Mapping[str, dict[str, Any]], others: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The feeds, and those of the `others`, by the same names, that make calls which these do not."""
    found = dict(feeds)
    pairs = {name: inputs for name, inputs in others.items() if name in feeds and PART not in inputs}
    if not pairs:
        return found
    for folded in (True, False):
        twin = Twin(model, folded=folded)
        ways = {name: (_way(twin, feeds[name]), _way(twin, inputs)) for name, inputs in pairs.items()}
        if not twin.folds or not any(None in way for way in ways.values()):
            break
    for name, (first, second) in ways.items():
        if first is not None and second is not None and second - first:
            found[name + OTHER_SIZES] = pairs[name]
    return found


def _way(twin: Twin, inputs: Mapping[str, Any]) -> _Way | None:
    """The torch calls of one run; None where it does not run on the copy."""
    noted = _Calls()
    with ExitStack() as stack:
        for name, module in twin.module.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks: what it does is its caller's
                continue
            stack.callback(module.register_forward_pre_hook(noted.entering(name)).remove)
            stack.callback(module.register_forward_hook(noted.left, always_call=True).remove)
        try:
            with noted:
                twin.run(twin.module, inputs)
        except OutsideError:
            raise
        except Exception:  # someone else's forward may raise anything; recording says what, if it is the first
            return None
    return noted.found


class _Calls(TorchFunctionMode):
    """Notes the module, the function and the place of each torch call."""

    def __init__(self) -> None:
        super().__init__()
        self.found: _Way = set()
        self.running = [""]

    def entering(self, name: str) -> Any:
        return lambda module, args: self.running.append(name)

    def left(self, module: nn.Module, args: Any, output: Any) -> None:
        if len(self.running) > 1:
            self.running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = call_name(func)
        if not name.startswith("attr:"):
            with torch._C.DisableTorchFunction():
                self.found.add((self.running[-1], name, code_place()))
        return func(*args, **(kwargs or {}))

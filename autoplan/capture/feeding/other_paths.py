"""Calls that take another way through a model's code, of another size or in training: they are recorded too.

The problem: windows are shifted only where a picture is larger than one, and attention is sparse only where a sequence
is long. What one call never reaches is planned by nobody. So calls of two sizes run on a plain copy, and the torch
calls that each makes are compared, by module and place in the code; where the second makes one that the first does not,
both are recorded, and the plan is made for both. The same is done with what runs in training only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoplan.capture.called import PART, TRAINING, has_training_paths, in_training
from autoplan.capture.dry_run import Twin
from autoplan.common.code.code_place import call_name, code_place
from autoplan.common.errors import OutsideError
from autoplan.common.nested import flatten_tensors
from autoplan.common.random_values import drawn_so_far

_OTHER_SIZES, _IN_TRAINING = " in other sizes", " in training"  # how the names of such feeds end
_Way = Counter[tuple[str, str, str]]


class OtherPaths(NamedTuple):
    """The feeds, with those that make other calls: of other sizes, and in training. A note for
    each that cannot be compared, and is not recorded therefore. Whether training draws what was not recorded."""

    feeds: dict[str, dict[str, Any]]
    notes: tuple[str, ...] = ()
    draws: bool = False


class _Run(NamedTuple):
    """The torch calls of one run, None where it does not run on the copy; and whether it drew random numbers."""

    calls: _Way | None
    drew: bool = False


def with_other_paths(
    model: nn.Module,
    feeds: Mapping[str, dict[str, Any]],
    others: Mapping[str, dict[str, Any]],
) -> OtherPaths:
    """Run calls of other sizes, and in training, on a copy, and see whether they make other calls."""
    main = {name: inputs for name, inputs in feeds.items() if PART not in inputs}
    more = {name + _OTHER_SIZES: (main[name], inputs) for name, inputs in others.items() if name in main}
    if has_training_paths(model):
        more |= {name + _IN_TRAINING: (inputs, {**inputs, TRAINING: True}) for name, inputs in main.items()}
    if not more:
        return OtherPaths(dict(feeds))
    for folded in (True, False):
        twin = Twin(model, folded=folded)
        twin.module.eval()
        ways = {name: (_way(twin, first), _way(twin, second)) for name, (first, second) in more.items()}
        if not twin.folds or not any(run.calls is None for runs in ways.values() for run in runs):
            break
    calls = {name: (first.calls, second.calls) for name, (first, second) in ways.items()}
    another = [
        name
        for name, (first, second) in calls.items()
        if first and second and _is_other(first, second, in_training=TRAINING in more[name][1])
    ]
    unknown = (name for name, (first, second) in calls.items() if first and second is None)
    notes = tuple(f"{name!r} is not recorded: it does not run on a copy" for name in unknown)
    draws = any(second.drew for name, (_, second) in ways.items() if TRAINING in more[name][1] and name not in another)
    return OtherPaths({**feeds, **{name: more[name][1] for name in another}}, notes, draws)


def _is_other(first: _Way, second: _Way, *, in_training: bool) -> bool:
    """Does the second run make calls that the first does not? A loop may go on for longer in another size; in training
    it then goes over something that only training has."""
    return bool(second - first if in_training else second.keys() - first.keys())


def _way(twin: Twin, inputs: Mapping[str, Any]) -> _Run:
    noted, given = _Calls(), dict(inputs)
    with ExitStack() as stack:
        if given.pop(TRAINING, False):
            stack.enter_context(in_training(twin.module))
        for name, module in twin.module.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks: what it does is its caller's
                continue
            stack.callback(module.register_forward_pre_hook(noted.entering(name)).remove)
            stack.callback(module.register_forward_hook(noted.left, always_call=True).remove)
        try:
            with noted:
                drew = twin.run(partial(_drew, twin.module), given)
        except OutsideError:
            raise
        except Exception:  # someone else's forward may raise anything; recording says what, if it is the first
            return _Run(None)
    return _Run(noted.found, drew)


def _drew(function: Callable[..., Any], **given: Any) -> bool:
    """Call it: does it draw random numbers?"""
    before = drawn_so_far()
    function(**given)
    return drawn_so_far() != before


class _Calls(TorchFunctionMode):
    """Notes the module, the function and the place of each torch call."""

    def __init__(self) -> None:
        super().__init__()
        self.found: _Way = Counter()
        self.running = [""]

    def entering(self, name: str) -> Any:
        return lambda module, args: self.running.append(name)

    def left(self, module: nn.Module, args: Any, output: Any) -> None:
        if len(self.running) > 1:
            self.running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = call_name(func)
        if not name.startswith("attr:") and _works(args, kwargs):
            with torch._C.DisableTorchFunction():
                self.found[self.running[-1], name, code_place()] += 1
        return func(*args, **(kwargs or {}))


def _works(args: Any, kwargs: Any) -> bool:
    """Is it given a tensor with dims? What draws or compares one number splits nothing."""
    return any(tensor.dim() for _, tensor in flatten_tensors((args, kwargs or {})))

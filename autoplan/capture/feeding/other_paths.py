"""Find calls that take another path through a model's code, with other sizes or in training: they are recorded too.

The problem: windows are shifted only where an image is larger than one, and attention is sparse only where a sequence
is long. What one call never reaches cannot be planned. So calls of two sizes run on a plain copy, and the torch calls
that each makes are compared, by module and place in the code; if the second makes one that the first does not, both are
recorded, and the plan is made for both. The same is done with code that runs in training only.
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

_OTHER_SIZES, _IN_TRAINING = " in other sizes", " in training"  # suffixes of the names of such feeds
_Way = Counter[tuple[str, str, str]]


class OtherPaths(NamedTuple):
    """The feeds with those that take other paths: with other sizes, or in training. A note for each that cannot run on
    a copy, and so is not recorded. Whether training draws random numbers without taking another path."""

    feeds: dict[str, dict[str, Any]]
    notes: tuple[str, ...] = ()
    draws: bool = False


class _Run(NamedTuple):
    """The torch calls of one run, None if it fails on the copy; and whether it drew random numbers."""

    calls: _Way | None
    drew: bool = False


def with_other_paths(
    model: nn.Module,
    feeds: Mapping[str, dict[str, Any]],
    others: Mapping[str, dict[str, Any]],
) -> OtherPaths:
    """Run calls with other sizes, and in training, on a copy, and add those that make other torch calls."""
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
    """Return whether the second run makes calls that the first does not. With other sizes a loop may just go on longer;
    in training more of the same calls means that it goes over something that only training has."""
    return bool(second - first if in_training else second.keys() - first.keys())


def _way(twin: Twin, inputs: Mapping[str, Any]) -> _Run:
    calls, keywords = _Calls(), dict(inputs)
    with ExitStack() as stack:
        if keywords.pop(TRAINING, False):
            stack.enter_context(in_training(twin.module))
        for name, module in twin.module.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks; its calls count as its caller's
                continue
            stack.callback(module.register_forward_pre_hook(calls.entering(name)).remove)
            stack.callback(module.register_forward_hook(calls.left, always_call=True).remove)
        try:
            with calls:
                drew = twin.run(partial(_drew, twin.module), keywords)
        except OutsideError:
            raise
        except Exception:  # someone else's forward may raise anything; the recording reports it for the first run
            return _Run(None)
    return _Run(calls.found, drew)


def _drew(function: Callable[..., Any], **given: Any) -> bool:
    """Call the function and return whether it drew random numbers."""
    before = drawn_so_far()
    function(**given)
    return drawn_so_far() != before


class _Calls(TorchFunctionMode):
    """Records the module, the function and the place of each torch call."""

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
    """Return whether a call has a tensor with dims; one that draws or compares a single number splits nothing."""
    return any(tensor.dim() for _, tensor in flatten_tensors((args, kwargs or {})))

"""The path guard: refuses a call that takes a path through the model's code which its plan does not know.

The problem: a plan is proven for what ran while it was made. Another flag, length, dtype, mode or state may send a call
through code that needs an all-reduce which nobody planned, and the result is silently wrong.

So the first calls of each kind (situations.py) are traced (watch.py) through the model's own code
(common/code/ways.py), and compared with the ways that the plan knows (`Plan.paths`). Most of a model's code computes
with replicated values: whatever branch it takes, ranks take it together and get what the unsharded model would. A way
never seen matters where the function, from there on, handles a value that is not replicated or whose gradient is
partial: it passes one to a torch function or a module, or returns one (marks.py); or where it reads a count that is
local to the rank. Optional kernels have a guard of their own (execute/hooks/function_mode.py): ways to them are left to
it.

What leaves the model other than by its output is refused too, by name (marks.py), and so is a module that is called by
itself and returns a sharded value.

Ranks may take different branches (shards may have unequal sizes). So nothing is raised in the middle: at the end of the
call all ranks learn whether one of them strayed, and all of them refuse.
"""

from __future__ import annotations

import copy
import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from autoplan.common.code.code_place import PYTHON
from autoplan.common.code.forms import Forms, forms_in
from autoplan.common.code.ways import Key, Paused, follow, has_own_code, set_running, ways_of
from autoplan.common.errors import PlanMismatchError, UnprovenPlanWarning
from autoplan.common.nested import flatten_tensors
from autoplan.common.torch_internals import DisableTorchFunction, compiled_somewhere, detect_fake_mode
from autoplan.execute.collectives import RankGroup, all_reduce, in_backward
from autoplan.execute.guard.marks import PART, Kept, Listeners, this
from autoplan.execute.guard.situations import Situations
from autoplan.execute.guard.watch import ONE_PART, PARTS_OF_GRADIENT, Watch
from autoplan.execute.parameters.held import record_of
from autoplan.patches.kernels import eager_code, optional_kernels
from autoplan.patches.patched import Hold
from autoplan.values import Plan

_SHOWN = 3
_HINT = (
    "plan with inputs= that cover it (several calls: inputs={'usual': {…}, 'other': {…}}), or, if it computes the "
    'same on a shard, path_guard="warn" or "off"'
)

_SIZES_HINT = (
    "compare a size of a full value (the input's), replicate the module (overrides={name: 'replicate'}), or, if "
    'both branches compute the same, path_guard="warn" or "off"'
)

_BY_ITSELF = (
    "call the model itself, or the nearest enclosing module that returns full values; or replicate it: "
    "overrides={name: 'replicate'}"
)

Edits = Iterable[tuple[str, str, int, int]]  # module, attribute, global and local number


def guard_of(model: nn.Module, plan: Plan, action: str, group: RankGroup, edits: Edits) -> PathGuard | None:
    """Return the guard of a model that is about to be sharded; None if it needs none."""
    if action == "off" or group.size == 1:
        return None
    guard = PathGuard(model, plan, action, group, edits)
    record = record_of(model)
    if record is not None:
        record.reading.guard = guard
    return guard


class PathGuard:
    """A guard of one model's code paths. `edited`: modules with a count that is local to the rank, and its name.
    `kernels`: the names of optional kernels."""

    def __init__(self, model: nn.Module, plan: Plan, action: str, group: RankGroup, edits: Edits) -> None:
        self.model = model
        self.ways = ways_of(plan.paths)
        self.forms: dict[Key, dict[int, Forms]] = {key: forms_in(ways) for key, ways in self.ways.items()}
        self.has_forms = any(self.forms.values())  # older plans do not record them
        # Otherwise it checks exits only: all code is trusted, or the plan has no ways of this Python version.
        self.compares = has_own_code(model) and any(path.code.startswith(f"{PYTHON}:") for path in plan.paths)
        self.kernels = frozenset(kernel.name for kernel in optional_kernels(model) if kernel.installed)
        self.action, self.group = action, group
        self.edited = [(name, attribute) for name, attribute, *_ in edits]
        self.situations = Situations()
        self.edited_names = {"padding_idx", *(attribute.rpartition(".")[2] for _, attribute in self.edited)}
        self.counts: list[tuple[dict[str, Any], str, Any, str]] = []  # set by the plan: where, name, value, words
        self.running: Watch | None = None
        self.mode: Paused | None = None
        self.eager = Hold()  # while a call is traced, functions that the model compiles run eagerly, and are seen
        self.told_unguarded = False
        self.asked: tuple[Any, Any] = ((), ())
        self.changed: tuple[Any, ...] = ()
        self.kept, self.listeners = Kept(), Listeners(model)
        self.hooked: set[Any] = set()  # hooks with kinds of calls that were traced
        self.planned: weakref.WeakSet[nn.Module] = weakref.WeakSet(model.modules())
        self.by_itself = False  # whether the traced call is another one than the model's
        self.together = False  # whether all ranks trace it
        self._note_counts()

    def enter(self, module: nn.Module, method: str, args: Any, kwargs: Any) -> None:
        """Begin a call, from outside of the model, of one of its modules or of a method that reads parameters.
        (Backward, which recomputes blocks, is not outside.)"""
        self.kept.give_back()
        if (module is self.model and not method) or in_backward():
            return
        self.kept.note_given({f"argument {number}": value for number, value in enumerate(args)} | kwargs)
        self.begin(module, {f"{id(module)}.{method}": (args, kwargs)}, by_itself=True)
        self.by_itself = self.running is not None

    def leave(self, module: nn.Module, method: str, output: Any) -> Any:
        """Check what such a call returns. Ranks may not make it together, so they do not communicate."""
        watch = self.stop() if self.by_itself else None
        if watch is not None:
            with DisableTorchFunction():
                kind = watch.marks.kind_in(output)
            if kind:
                shown = ONE_PART if kind == PART else PARTS_OF_GRADIENT
                called = ".".join(filter(None, (self.name_of(module), method))) or "the model"
                self._say(f"{called} ({type(module).__name__}) was called directly and returns {shown}", _BY_ITSELF)
            elif watch.strays or watch.sizes or watch.exits:
                self._refuse(watch)
            self._add(watch)
        return output

    def close(self) -> None:
        """End such a call, also after an error."""
        if self.by_itself:
            self.by_itself = False
            self.stop()
        self.kept.hold(self.model)

    def name_of(self, module: nn.Module) -> str:
        return next((name for name, other in self.model.named_modules() if other is module), "")

    def begin(self, model: nn.Module, given: dict[str, Any], by_itself: bool = False) -> None:
        """Begin a call, and trace it if it is new or has new hooks. (A single rank may have hooks of its own.)"""
        hooks = self.listeners.look()
        # Raise where somebody set a count that is local to the rank: a global number would be read as a local one.
        if not self.counts:  # a copied guard starts without
            self._note_counts()
        for state, key, value, words in self.counts:
            if state.get(key) is not value and state.get(key) != value:
                raise PlanMismatchError(
                    f"{words} is {state.get(key)}; sharding had set it to {value}, the count on this rank",
                    hint="set it before sharding the model, and plan again",
                )
        put_in = self._has_others()
        if self.running is not None or not (hooks or self.compares or by_itself or put_in):  # a traced method calls it
            return
        if not self.planned:
            self.planned.update(self.model.modules())
        kind, numbers = self.asked = self.situations.of(model, given)
        self.together = (self.compares or by_itself) and self.situations.is_new(kind, numbers)
        self.changed = self.situations.changed() if self.compares else ()
        differs = bool(self.changed) and (kind, self.changed) not in self.situations.looked_at
        alone = (hooks and (hooks, kind) not in self.hooked) or differs or put_in
        tensors = [tensor for _, tensor in flatten_tensors(given)] if self.together or alone else []
        no_values = any(tensor.is_meta for tensor in tensors) or detect_fake_mode(tensors) is not None
        if not (self.together or alone) or no_values or compiled_somewhere(self.model):
            return
        if sys.gettrace() is not None:
            if not self.told_unguarded:
                self.told_unguarded = True
                text = "a trace function is set (debugger, coverage): calls of the sharded model are not guarded"
                warnings.warn(text, UnprovenPlanWarning, stacklevel=2)
            return
        self.kept.note_given(given)
        self.running = Watch(self)
        self.mode = Paused(self.running)
        self.mode.__enter__()
        self.eager = eager_code()
        self.eager.until_gone(self.running)  # an interrupted rank may not come to `stop`
        this.marks = self.running.marks
        set_running(self.running)
        follow(self.running.enter)

    def _has_others(self) -> bool:
        """Return whether a model of torch's own class has new modules: its code is not traced, and would not show
        them."""
        if not type(self.model).__module__.startswith("torch."):
            return False
        if not self.planned:
            self.planned.update(self.model.modules())
        return any(module not in self.planned for module in self.model.modules())

    def _note_counts(self) -> None:
        modules = dict(self.model.named_modules()) if self.edited and self.compares else {}
        for name, attribute in self.edited:
            module = modules.get(name)
            if module is None:
                continue
            holder, _, key = attribute.rpartition(".")
            state: dict[str, Any] = vars(vars(module)[holder] if holder else module)
            self.counts.append((state, key, state.get(key), f"{name}.{attribute}".lstrip(".")))

    def stop(self) -> Watch | None:
        """Stop tracing, at the end of a call or on the way out of an error."""
        watch, self.running = self.running, None
        if watch is not None and self.mode is not None:
            follow(None)
            set_running(None)
            this.marks = None
            self.mode.__exit__(None, None, None)
            self.eager.release()
        return watch

    def abandon(self) -> None:
        """Stop tracing when the model's own forward is left, also by an error."""
        if not self.by_itself:
            self.stop()

    def end(self, device: torch.device) -> None:
        """End the model's forward: raise on all ranks if one of them strayed."""
        watch = None if self.by_itself else self.stop()
        if watch is None:
            return
        refused = bool(watch.strays or watch.sizes)
        if self.together:
            refused = bool(all_reduce(torch.tensor([float(refused)], device=device), self.group, "max").item())
        if refused or watch.exits:
            self._refuse(watch)
        self._add(watch)

    def _add(self, watch: Watch) -> None:
        self.hooked.add((self.listeners.key, self.asked[0]))
        self.situations.add_changed(self.asked[0], self.changed)
        if self.together:
            always = watch.reads_values or watch.host_draws() or self.situations.reads_streams
            self.situations.add(*self.asked, always=always)
        with DisableTorchFunction():
            kept_parts = self.kept.note(self.model, watch.marks)
            by_weight = self.kept.by_weight(self.model, watch.marks)
        if by_weight:
            self._say(f"{', '.join(by_weight)} has weights as keys, which the next call will not find", "use names")
        if kept_parts and self.action != "refuse":
            self.kept.places.clear()
            self._say(f"modules keep values that are local to a rank: {', '.join(kept_parts)}", "")

    def _refuse(self, watch: Watch) -> None:
        if watch.exits:
            self._say("; ".join(watch.exits), next(iter(watch.exits.values())))
            return
        if watch.sizes:
            text = f"{'; '.join(watch.sizes)} takes the branch of the local shard, not of the full value"
            self._say(text, _SIZES_HINT)
            return
        strays = watch.strays
        shown = "; ".join(list(strays)[:_SHOWN]) or "another rank"
        more = f" (and {len(strays) - _SHOWN} more)" if len(strays) > _SHOWN else ""
        self._say(f"{shown}{more} ran on sharded values but was not traced", _HINT)

    def _say(self, text: str, hint: str) -> None:
        if self.action == "refuse":
            self.situations.kinds.pop(self.asked[0], None)  # so that it is refused the next time, too
            raise PlanMismatchError(text, hint=hint)
        warnings.warn(f"{text}: its results are unverified", UnprovenPlanWarning, stacklevel=2)

    def __deepcopy__(self, memo: dict[int, Any]) -> PathGuard:
        copied = memo[id(self)] = object.__new__(PathGuard)
        copied.__dict__.update(vars(self))
        copied.situations, copied.counts, copied.running, copied.mode = Situations(), [], None, None
        copied.eager = Hold()
        copied.model = memo.get(id(self.model), self.model)
        copied.hooked, copied.planned = set(), weakref.WeakSet()
        copied.kept, copied.listeners = copy.deepcopy(self.kept, memo), copy.deepcopy(self.listeners, memo)
        return copied

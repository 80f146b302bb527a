"""Other exits than a model's output: what its modules keep, and hooks of others on modules inside.

A plan says how what the model returns lies on ranks. What a module keeps as an attribute (`self.p = softmax(...)`) and
what a hook on a module inside is given may be a rank's part, or have a gradient of which each rank makes a part, and
nobody would notice. Both are noticed while a call is followed, by the marks of its values:

A kept part is refused where it is used outside of the model's forward. Between calls a tensor that refuses stands in
its place; the model's own code finds what it kept, so states that are carried from call to call are as they were.

A hook that the plan has not seen is refused when it is given a part, or does more with a whole value than without
gradients: a hook that computes a norm of a detached value is right.
"""

from __future__ import annotations

import copy
import dis
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from autoplan.common.code.ways import is_settled
from autoplan.common.errors import PlanMismatchError
from autoplan.common.nested import changed_inside, flatten_tensors
from autoplan.execute.guard.marks import Marks

_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


# ------------------------------------------------------------------------------------------------ what modules keep


class HeldPart(torch.Tensor):
    """Stands for a part that a module keeps, while no code of the model runs."""

    words: str
    own: torch.Tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = next(one for _, one in flatten_tensors((args, kwargs)) if isinstance(one, cls))
        raise PlanMismatchError(
            f"{held.words} is of one rank: a part of the value, or of its gradient",
            hint="return it from forward: what the model returns is whole on every rank",
        )

    def __repr__(self, **_: Any) -> str:
        return f"<{self.words}, on one rank>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.own, memo)


def _held(own: torch.Tensor, words: str) -> HeldPart:
    with torch._C.DisableTorchFunction():
        made = own.as_subclass(HeldPart)
    made.words, made.own = words, own
    return made


Path = tuple[Any, ...]  # below an attribute: keys and names; "*" for each item of a list


class Kept:
    """The attributes of a model's modules in which parts were found: where they are, and for each its words."""

    def __init__(self) -> None:
        self.places: dict[tuple[str, bool, str, Path], str] = {}  # module, is it a buffer, attribute, path below it
        self.given: list[tuple[Any, Any, Any, Any]] = []  # where, under what, what stands there, what was there

    def note(self, model: nn.Module, marks: Marks) -> list[str]:
        """After a call that was followed: those that are new."""
        found: dict[str, None] = {}
        for name, module in model.named_modules() if marks.tensors else ():
            for is_buffer, state in ((False, vars(module)), (True, _passing(module))):
                for attribute in set(state) - _OF_MODULES:
                    for path, _, _, value in _slots(state, attribute, ()):
                        place = (name, is_buffer, attribute, path)
                        if place not in self.places and marks.any_in(value):
                            steps = (key if str(key).startswith(".") else f"[{key!r}]" for key in path if key != "*")
                            inside = "".join(steps)
                            self.places[place] = f"{name}.{attribute}".lstrip(".") + inside
                            found[self.places[place]] = None
        return list(found)

    def hold(self, model: nn.Module) -> None:
        """No code of the model runs from now on."""
        for name, is_buffer, attribute in dict.fromkeys(place[:3] for place in self.places):
            module = model.get_submodule(name)
            state = module._buffers if is_buffer else vars(module)
            for path, where, under, own in list(_slots(state, attribute, ())) if attribute in state else ():
                words = self.places.get((name, is_buffer, attribute, path))
                made = own if words is None else _all_held(own, words)
                if made is not own:
                    where[under] = made
                    self.given.append((where, under, made, own))

    def give_back(self) -> None:
        """Code of the model runs: it finds what it kept, unless others put something there."""
        for where, under, made, own in self.given:
            there = where.get(under) if isinstance(where, dict) else where[under] if under < len(where) else None
            if there is made:
                where[under] = own
        self.given.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        made = Kept()  # what the copy keeps is itself
        made.places = dict(self.places)
        return made


_OF_MODULES = frozenset(vars(nn.Module()))


def _passing(module: nn.Module) -> dict[str, Any]:
    """Its buffers that no checkpoint holds."""
    return {name: module._buffers.get(name) for name in module._non_persistent_buffers_set}


def _slots(state: Any, key: Any, path: Path, depth: int = 3) -> Iterator[tuple[Path, Any, Any, Any]]:
    """Where tensors are kept below an attribute: by which path, in what, under what. Of a tuple they are one."""
    value = state[key]
    if isinstance(value, torch.Tensor | tuple):
        yield path, state, key, value
    elif isinstance(value, list | deque) and depth:
        for number in range(len(value)):
            yield from _slots(value, number, (*path, "*"), depth - 1)
    elif depth and not isinstance(value, nn.Module | type | ModuleType):
        inner = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if isinstance(inner, dict) and not type(value).__module__.startswith(("torch", "autoplan")):
            for name in list(inner):
                yield from _slots(inner, name, (*path, name if inner is value else f".{name}"), depth - 1)


def _all_held(value: Any, words: str) -> Any:
    if isinstance(value, torch.Tensor):
        return _held(value, words)
    if next(flatten_tensors(value), None) is None:
        return value
    return changed_inside(value, lambda item: _all_held(item, words))


# ------------------------------------------------------------------------------------------------- hooks of others


class Listeners:
    """Hooks on modules of a model that are neither ours nor those of packages that are trusted."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: list[nn.Module] = []  # filled at the first look: a copy's are not made yet when this is copied
        self.made = -1
        self.key: frozenset[Any] = frozenset()
        self.codes: set[CodeType] = set()
        self.backward: set[int] = set()

    def look(self) -> frozenset[Any]:
        """What tells calls with other hooks apart. Hooks are looked for where torch has made one since."""
        if self.made != RemovableHandle.next_id:
            self.made = RemovableHandle.next_id
            self.modules = self.modules or list(self.model.modules())
            found = list(self._found())
            self.codes = {code for _, kind, code in found if kind in _FORWARD}
            self.backward = {module for module, kind, _ in found if kind in _BACKWARD}
            self.key = frozenset((module, kind, id(code)) for module, kind, code in found)
        return self.key

    def _found(self) -> Iterator[tuple[int, str, CodeType]]:
        for kind in (*_FORWARD, *_BACKWARD):
            for owner in (*self.modules, None):
                hooks = getattr(torch_modules, f"_global{kind}") if owner is None else getattr(owner, kind)
                for hook in hooks.values():
                    code = _code_of(hook)
                    if code is not None:
                        yield id(owner), kind, code

    def __deepcopy__(self, memo: dict[int, Any]) -> Listeners:
        return Listeners(memo.get(id(self.model), self.model))


def _code_of(hook: Callable[..., Any]) -> CodeType | None:
    """The code of a hook of others."""
    while isinstance(hook, partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    if not hasattr(function, "__code__"):
        function = vars(type(hook)).get("__call__")
    if is_settled(str(getattr(function, "__module__", None) or "builtins")):
        return None
    return getattr(function, "__code__", None)


@lru_cache(maxsize=256)
def loads_of(code: CodeType) -> Counter[str]:
    """How often a function reads each of its arguments."""
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    names = set(code.co_varnames[:count])
    read: Counter[str] = Counter()
    for one in dis.get_instructions(code):
        if one.opname.startswith("LOAD_"):  # some read two at once
            loaded = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            read.update(name for name in loaded if name in names)
    return read

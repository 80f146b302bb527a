"""Which tensors of a running forward are not whole on each rank, or carry a part of a gradient.

Only while a guard looks on: results of torch functions take the mark from what they are given, parameters get it where
they are read (execute/parameters/local_views.py), and what the plan does at boundaries and calls sets it or takes it
off, as its instruction says (`gives`). A whole value of whose gradient each rank makes a part has a mark of its own:
what is computed of it without a gradient is whole.
"""

from __future__ import annotations

import copy
import dis
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from autoplan.common.code.ways import is_settled
from autoplan.common.errors import PlanMismatchError
from autoplan.common.nested import changed_inside, flatten_tensors
from autoplan.execute.guard.sizes import Shape, fits
from autoplan.execute.vocabulary.split_logits import SplitLogits
from autoplan.values import Instruction
from autoplan.values.instructions.base import Spread

PART, GRADIENT = "part", "gradient"


class Marks:
    """The marked tensors of one forward."""

    def __init__(self) -> None:
        self.tensors: Any = WeakIdKeyDictionary()
        self.shapes: Any = WeakIdKeyDictionary()  # of the whole values, where they are known

    def add(self, value: Any, kind: str = PART, whole: Shape | None = None) -> None:
        for _, tensor in flatten_tensors(value):
            if kind == GRADIENT and not tensor.requires_grad:
                continue
            if not isinstance(tensor, (DTensor, SplitLogits)):  # these know themselves how they lie
                self.tensors[tensor] = kind
                if whole is not None:
                    self.shapes[tensor] = whole

    def shape_of(self, tensor: torch.Tensor) -> Shape | None:
        """The shape of the whole value."""
        if self.tensors.get(tensor) != PART:
            return tuple(tensor.shape)
        whole = self.shapes.get(tensor)
        return whole if whole is not None and fits(tensor, whole) else None

    def remove(self, value: Any) -> None:
        for _, tensor in flatten_tensors(value):
            self.tensors.pop(tensor, None)

    def any_in(self, value: Any) -> bool:
        return bool(self.kind_in(value))

    def kind_in(self, value: Any) -> str:
        """`PART` if a tensor in it is one, else `GRADIENT` or ""."""
        kinds = {self.tensors.get(tensor, "") for _, tensor in flatten_tensors(value)} if self.tensors else ()
        return next((kind for kind in (PART, GRADIENT) if kind in kinds), "")


class _OfThread(threading.local):
    marks: Marks | None = None


this = _OfThread()


def looking_on() -> Marks | None:
    """The marks of the forward that runs in this thread, if it is guarded."""
    return this.marks


def as_given(instruction: Instruction, result: Any) -> Any:
    """The same, marked by how it lies on ranks after an instruction."""
    marks = this.marks
    if marks is None:
        return result
    gives = instruction.gives
    if gives is Spread.REPLICATE and not getattr(instruction, "cuts", ()):
        marks.remove(result)
    elif gives is not Spread.ANY:
        marks.add(result, GRADIENT if gives is Spread.PARTIAL_GRADIENT else PART)
    if getattr(instruction, "cuts", ()):
        marks.add(result)
    return result


# Other exits than a model's output: what its modules keep, and hooks of others on modules inside.
#
# A plan says how what the model returns lies on ranks. What a module keeps as an attribute (`self.p = softmax(...)`)
# and what a hook on a module inside is given may be a rank's part, or have a gradient of which each rank makes a part,
# and nobody would notice. Both are noticed while a call is followed, by the marks of its values:
#
# A kept part is refused where it is used outside of the model's forward. Between calls a tensor that refuses stands in
# its place; the model's own code finds what it kept, so states that are carried from call to call are as they were.
#
# A hook that the plan has not seen is refused when it is given a part, or does more with a whole value than without
# gradients: a hook that computes a norm of a detached value is right.

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
    """Where parts were found that a call left behind: attributes of modules, and names around the model's code (globals
    of its file, variables of a function that made it)."""

    def __init__(self) -> None:
        self.places: dict[tuple[str, int, str, Path], str] = {}  # module, kind of state, name, path below it: its words
        self.around: dict[int, tuple[dict[str, Any], set[str]]] = {}  # by kind of state: names that code mentions there
        self.given: list[tuple[Any, Any, Any, Any]] = []  # where, under what, what stands there, what was there

    def note_code(self, frame: FrameType) -> None:
        """A function of the model's begins."""
        code, outer = frame.f_code, frame.f_globals
        self.around.setdefault(id(outer), (outer, set()))[1].update(code.co_names)
        for name in code.co_freevars:
            self._note_container(name, frame.f_locals.get(name))

    def note_given(self, given: dict[str, Any]) -> None:
        """A call begins: an argument may be a method of a container of its caller's (`found.append`)."""
        for name, value in given.items():
            self._note_container(name, getattr(value, "__self__", None))

    def _note_container(self, name: str, value: Any) -> None:
        if isinstance(value, list | dict | deque):
            self.around.setdefault(id(value), ({name: value}, {name}))

    def note(self, model: nn.Module, marks: Marks) -> list[str]:
        """After a call that was followed: those that are new."""
        found: dict[str, None] = {}
        for name, kind, state, attributes in self._states(model) if marks.tensors else ():
            for attribute in attributes:
                for path, _, _, value in _slots(state, attribute, ()):
                    place = (name, kind, attribute, path)
                    if place not in self.places and marks.any_in(value):
                        steps = (key if str(key).startswith(".") else f"[{key!r}]" for key in path if key != "*")
                        inside = "".join(steps)
                        self.places[place] = f"{name}.{attribute}".lstrip(".") + inside
                        found[self.places[place]] = None
        return list(found)

    def _states(self, model: nn.Module) -> Iterator[tuple[str, int, dict[str, Any], Iterable[str]]]:
        for name, _ in model.named_modules():
            for kind in (_ATTRIBUTES, _BUFFERS):
                state = self._state(model, name, kind)
                yield name, kind, state, set(state) - _OF_MODULES
        for kind, (outer, names) in self.around.items():
            yield "", kind, outer, names & outer.keys()

    def _state(self, model: nn.Module, name: str, kind: int) -> dict[str, Any]:
        if kind in self.around:
            return self.around[kind][0]
        module = model.get_submodule(name)
        if kind == _ATTRIBUTES:
            return vars(module)
        return {one: module._buffers.get(one) for one in module._non_persistent_buffers_set}  # no checkpoint holds them

    def hold(self, model: nn.Module) -> None:
        """No code of the model runs from now on."""
        there = dict(model.named_modules()) if self.places else {}  # some may have been taken out
        for name, kind, attribute in dict.fromkeys(place[:3] for place in self.places):
            if kind not in self.around and name not in there:
                continue
            state = model.get_submodule(name)._buffers if kind == _BUFFERS else self._state(model, name, kind)
            for path, where, under, own in list(_slots(state, attribute, ())) if attribute in state else ():
                words = self.places.get((name, kind, attribute, path))
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
        made = Kept()  # what the copy's modules keep is its own
        made.places = {place: words for place, words in self.places.items() if place[1] in (_ATTRIBUTES, _BUFFERS)}
        return made


_OF_MODULES = frozenset(vars(nn.Module()))
_ATTRIBUTES, _BUFFERS = 0, 1  # of a module; other kinds are ids of dicts


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


_STORES = frozenset({"STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF"})
_FILLS = frozenset({"add", "append", "appendleft", "extend", "insert", "put", "setdefault", "update", "__setitem__"})


def keeping_code(hook: Callable[..., Any]) -> CodeType | None:
    """The code of a hook on a tensor, if it is not trusted and may keep what it is given."""
    code = _code_of(hook)
    if code is None:
        return None
    stores = any(one.opname in _STORES for one in dis.get_instructions(code))
    return code if stores or not _FILLS.isdisjoint(code.co_names) else None


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

"""Marks of the tensors of a running forward that are not replicated, or whose gradient is partial.

They exist only while a guard traces the call: results of torch functions inherit the mark of their arguments,
parameters get it where they are read (execute/parameters/local_views.py), and what the plan does at boundaries and
calls sets or removes it, as its instruction says (`gives`). A replicated value with a partial gradient has a mark of
its own: what is computed from it without a gradient is replicated.
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
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from autoplan.common.code.ways import is_settled
from autoplan.common.errors import PlanMismatchError
from autoplan.common.nested import changed_inside, flatten_tensors
from autoplan.common.torch_internals import DisableTorchFunction, own_buffers, transient_buffers
from autoplan.execute.vocabulary.own_positions import own_of
from autoplan.execute.vocabulary.split_logits import SplitLogits
from autoplan.values import Instruction, SequenceBoundary
from autoplan.values.instructions.base import Spread

PART, GRADIENT = "part", "gradient"
_BY_KEYS = (dict, set, WeakKeyDictionary, WeakIdKeyDictionary)
Shape = tuple[int, ...]


class Marks:
    """The marked tensors of one forward."""

    def __init__(self) -> None:
        self.tensors: Any = WeakIdKeyDictionary()
        self.shapes: Any = WeakIdKeyDictionary()  # of the whole values, where they are known
        self.weights: Any = WeakIdKeyDictionary()  # those that stand for a parameter

    def add(self, value: Any, kind: str = PART, whole: Shape | None = None) -> None:
        for _, tensor in flatten_tensors(value):
            if kind == GRADIENT and not tensor.requires_grad:
                continue
            if not isinstance(tensor, (DTensor, SplitLogits)):  # these carry their own placement
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

    def is_weight(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value in self.weights

    def any_in(self, value: Any) -> bool:
        return bool(self.kind_in(value))

    def kind_in(self, value: Any) -> str:
        """Return `PART` if any tensor in a value is marked so, else `GRADIENT` or ""."""
        kinds = {self.tensors.get(tensor, "") for _, tensor in flatten_tensors(value)} if self.tensors else ()
        return next((kind for kind in (PART, GRADIENT) if kind in kinds), "")


def fits(part: torch.Tensor, whole: Shape) -> bool:
    """Return whether the tensor can be a part of one of that shape."""
    return part.dim() == len(whole) and all(size <= all_of for size, all_of in zip(part.shape, whole, strict=True))


class _OfThread(threading.local):
    marks: Marks | None = None


this = _OfThread()


def looking_on() -> Marks | None:
    """Return the marks of the forward that runs in this thread, if it is traced."""
    return this.marks


def as_given(instruction: Instruction, result: Any, source: torch.Tensor | None = None) -> Any:
    """Return a result, marked by its placement after an instruction. `source`: of what it has own positions."""
    marks = this.marks
    if marks is None:
        return result
    gives = instruction.gives
    if gives is Spread.REPLICATE and not getattr(instruction, "cuts", ()):
        marks.remove(result)
    elif gives is not Spread.ANY:
        whole, cuts = None, gives is Spread.SEQUENCE_SHARD is not instruction.takes
        if source is not None and cuts and isinstance(instruction, SequenceBoundary):  # a rank keeps some positions
            dim, own = instruction.dim % result.dim(), own_of(source)
            whole = (*result.shape[:dim], source.shape[dim] if own is None else own.length, *result.shape[dim + 1 :])
        marks.add(result, GRADIENT if gives is Spread.PARTIAL_GRADIENT else PART, whole)
    if getattr(instruction, "cuts", ()):
        marks.add(result)
    return result


# Exits other than a model's output: what its modules keep, and foreign hooks on modules inside.
#
# A plan knows the placement of the model's outputs. What a module keeps as an attribute (`self.p = softmax(...)`) and
# what a hook inside receives may be a shard, or have a partial gradient, and nobody would notice. Both are noticed
# while a call is traced, by the marks of its values:
#
# A kept shard is refused where it is used outside of the model's forward. Between calls it is replaced by a tensor that
# raises; the model's own code gets the shard back, so states that are carried from call to call keep working.
#
# A hook that the plan has not seen is refused when it receives a shard, or computes with a replicated value that has a
# partial gradient: a hook that computes a norm of a detached value is right.

_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


class HeldPart(torch.Tensor):
    """A tensor that replaces a shard kept by a module while no code of the model runs; any use of it raises."""

    words: str
    own: torch.Tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        part = next(tensor for _, tensor in flatten_tensors((args, kwargs)) if isinstance(tensor, cls))
        raise PlanMismatchError(
            f"{part.words} is local to a rank: a shard of the value, or part of its gradient",
            hint="return it from forward: the model's outputs are full on every rank",
        )

    def __repr__(self, **_: Any) -> str:
        return f"<{self.words}, on one rank>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.own, memo)


def _held(own: torch.Tensor, words: str) -> HeldPart:
    with DisableTorchFunction():
        part = own.as_subclass(HeldPart)
    part.words, part.own = words, own
    return part


Path = tuple[Any, ...]  # below an attribute: keys and names; "*" for each item of a list


class Kept:
    """The places of shards that a call left behind: attributes of modules, and variables around the model's code
    (globals of its file, closures)."""

    def __init__(self) -> None:
        self.places: dict[tuple[str, int, str, Path], str] = {}  # (module, kind of state, name, path) -> words
        self.around: dict[int, tuple[dict[str, Any], set[str]]] = {}  # by kind of state: names that code reads
        self.given: list[tuple[Any, Any, Any, Any]] = []  # container, key, replacement, shard

    def note_code(self, frame: FrameType) -> None:
        """Note the globals and closures of a function of the model that begins."""
        code, outer = frame.f_code, frame.f_globals
        self.around.setdefault(id(outer), (outer, set()))[1].update(code.co_names)
        for name in code.co_freevars:
            self._note_container(name, frame.f_locals.get(name))

    def note_given(self, given: dict[str, Any]) -> None:
        """Note the arguments of a call: one may be a method of a container of the caller (`found.append`)."""
        for name, value in given.items():
            self._note_container(name, getattr(value, "__self__", None))

    def _note_container(self, name: str, value: Any) -> None:
        if isinstance(value, list | dict | deque):
            self.around.setdefault(id(value), ({name: value}, {name}))

    def note(self, model: nn.Module, marks: Marks) -> list[str]:
        """Return the new places of kept shards after a traced call."""
        new: dict[str, None] = {}
        for name, kind, state, attributes in self._states(model) if marks.tensors else ():
            for attribute in attributes:
                for path, _, _, value in _slots(state, attribute, ()):
                    place = (name, kind, attribute, path)
                    if place not in self.places and marks.any_in(value):
                        steps = (key if str(key).startswith(".") else f"[{key!r}]" for key in path if key != "*")
                        inside = "".join(steps)
                        self.places[place] = f"{name}.{attribute}".lstrip(".") + inside
                        new[self.places[place]] = None
        return list(new)

    def by_weight(self, model: nn.Module, marks: Marks) -> list[str]:
        """Return the containers that a traced call left with weights as keys: the next call reads new views."""
        return [
            f"{name}.{attribute}".lstrip(".")
            for name, _, state, attributes in self._states(model)
            for attribute in attributes
            if isinstance(container := state.get(attribute), _BY_KEYS) and any(map(marks.is_weight, [*container]))
        ]

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
        return {name: own_buffers(module).get(name) for name in transient_buffers(module)}  # not those of checkpoints

    def hold(self, model: nn.Module) -> None:
        """Replace kept shards, since no code of the model runs from now on."""
        there = dict(model.named_modules()) if self.places else {}  # modules may have been removed
        for name, kind, attribute in dict.fromkeys(place[:3] for place in self.places):
            if kind not in self.around and name not in there:
                continue
            state = own_buffers(model.get_submodule(name)) if kind == _BUFFERS else self._state(model, name, kind)
            for path, where, under, own in list(_slots(state, attribute, ())) if attribute in state else ():
                words = self.places.get((name, kind, attribute, path))
                replacement = own if words is None else _all_held(own, words)
                if replacement is not own:
                    where[under] = replacement
                    self.given.append((where, under, replacement, own))

    def give_back(self) -> None:
        """Put kept shards back for the model's code, unless others were put there."""
        for where, under, replacement, own in self.given:
            present = where.get(under) if isinstance(where, dict) else where[under] if under < len(where) else None
            if present is replacement:
                where[under] = own
        self.given.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        copied = Kept()  # the copy's modules keep their own
        copied.places = {place: words for place, words in self.places.items() if place[1] in (_ATTRIBUTES, _BUFFERS)}
        return copied


_OF_MODULES = frozenset(vars(nn.Module()))
_ATTRIBUTES, _BUFFERS = 0, 1  # kinds of a module's state; other kinds are ids of dicts


def _slots(state: Any, key: Any, path: Path, depth: int = 3) -> Iterator[tuple[Path, Any, Any, Any]]:
    """Yield (path, container, key, value) of tensors kept below an attribute; a tuple counts as one."""
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


class Listeners:
    """The hooks on a model's modules that are neither ours nor those of trusted packages."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: list[nn.Module] = []  # filled at the first look: a deep copy is not complete before
        self.made = -1
        self.key: frozenset[Any] = frozenset()
        self.codes: set[CodeType] = set()
        self.backward: set[int] = set()

    def look(self) -> frozenset[Any]:
        """Return a key of the present hooks; they are searched only if torch has created a hook since."""
        if self.made != RemovableHandle.next_id:
            self.made = RemovableHandle.next_id
            self.modules = self.modules or list(self.model.modules())
            hooks = list(self._found())
            self.codes = {code for _, kind, code in hooks if kind in _FORWARD}
            self.backward = {module for module, kind, _ in hooks if kind in _BACKWARD}
            self.key = frozenset((module, kind, id(code)) for module, kind, code in hooks)
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
    """Return the code of a foreign hook; None if it is trusted."""
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
    """Return the code of a hook on a tensor, if it is not trusted and may keep its argument."""
    code = _code_of(hook)
    if code is None:
        return None
    stores = any(instruction.opname in _STORES for instruction in dis.get_instructions(code))
    return code if stores or not _FILLS.isdisjoint(code.co_names) else None


@lru_cache(maxsize=256)
def loads_of(code: CodeType) -> Counter[str]:
    """Return how often a function reads each of its arguments."""
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    names = set(code.co_varnames[:count])
    read: Counter[str] = Counter()
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_"):  # some opcodes load two at once
            loaded = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            read.update(name for name in loaded if name in names)
    return read

"""A copy of a model of which nothing reaches back into the original.

The problem: `copy.deepcopy` takes functions as they are. A model that keeps `self.head = lambda x: x @
self.emb.weight.t()` has a copy whose head still multiplies with the original's weights: a run of the copy says nothing
about them, and a change of the copy does not change its head. The same holds for what is wrapped around functions and
methods (caches, weak references, methods of lists and tensors) and for forward hooks that hold modules.

So after deepcopy, with its own memo, whatever it took as it is and that reaches the model is made anew: functions get
new cells, default arguments and attributes. What lies outside of the model (a global, a closure of a class) cannot be
copied with it; `outside.py` notices when it is used.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from autoplan.capture.outside import remember_original
from autoplan.common.code.code_place import outer_stores
from autoplan.common.errors import AutoplanError
from autoplan.common.nested import flatten_tensors

Model = TypeVar("Model", bound=nn.Module)
_CACHED = type(functools.lru_cache(len))
_TAKEN_AS_THEY_ARE = (FunctionType, MethodType, BuiltinFunctionType, _CACHED, weakref.ref, tuple)
_ENDS = (type(None), type, ModuleType, str, bytes, int, float, complex)
PLAIN_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque, bytearray)


def copied(model: Model) -> Model:
    """A deep copy of the model, functions that reach it included."""
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in _results(model)}
    for held in (value for module in model.modules() for value in vars(module).values()):
        if type(held) is OrderedDict and not held:  # hooks that nobody has set: most of what deepcopy would work at
            memo[id(held)] = OrderedDict()
    try:
        new = copy.deepcopy(model, memo)
    except AutoplanError:
        raise
    except Exception as error:  # any object may refuse in any way
        raise AutoplanError(
            f"a copy of {type(model).__name__} is needed to run it safely, and it cannot be copied: "
            f"{type(error).__name__}: {error}",
            hint="what holds files, threads or generators can be made in its forward, or be left out of a copy by "
            "__deepcopy__",
        ) from error
    copy_slots(model, memo)
    Rebinding(memo).everything()
    remember_original(new, model)
    return new


def copy_slots(model: nn.Module, memo: dict[int, Any]) -> None:
    """Copy what modules keep in `__slots__`, which a deepcopy with this memo has left out: torch copies attributes."""
    for module in model.modules():
        twin = memo.get(id(module), module)
        for name in _slots(type(module)):
            if twin is not module and hasattr(module, name) and not hasattr(twin, name):
                object.__setattr__(twin, name, copy.deepcopy(getattr(module, name), memo))


def _results(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that a run has left in the model, with their history: deepcopy takes none. The old `weight_norm` and
    `spectral_norm` keep such a weight, and make it anew at each call."""
    for module in model.modules():
        for _, tensor in flatten_tensors(vars(module)):
            if not tensor.is_leaf:
                yield tensor


class Rebinding:
    """Makes anew, in all that a deepcopy with this memo has made, what reaches the original of it."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self._made: dict[int, tuple[Any, Any]] = {}  # id -> what deepcopy took as it is, and what stands for it
        self._cold: dict[int, Any] = {}  # seen, and does not reach the model; kept alive for their ids
        self._later: list[Callable[[], None]] = []
        self._fixed: set[int] = set()

    def everything(self) -> None:
        """Fix every copy in the memo, and those that are made for it on the way."""
        while True:
            fresh = [(key, made) for key, made in self.memo.items() if key not in self._fixed and key != id(self.memo)]
            if not fresh and not self._later:
                return
            for key, made in fresh:
                self._fixed.add(key)
                if id(made) != key:
                    self._fix(made)
            while self._later:
                self._later.pop()()

    def of(self, original: Any) -> Any:
        """What stands for this part of the original: a copy if it reaches the model, else the thing itself."""
        if not self.reaches(original):
            return original
        for value in reachable(original, self.memo):
            if isinstance(value, torch.Tensor) and not value.is_leaf:  # of a run long gone: deepcopy takes none
                self.memo.setdefault(id(value), value)
        try:
            return self._anew(copy.deepcopy(original, self.memo))
        except AutoplanError:
            raise
        except Exception as error:  # any object may refuse in any way
            raise AutoplanError(
                f"a copy of the model is needed to run it safely, but what one of its functions holds, a "
                f"{type(original).__name__}, cannot be copied: {type(error).__name__}: {error}",
                hint="let the function hold modules of the model alone, or make it a method of the model",
            ) from error

    def reaches(self, original: Any) -> bool:
        """Can the model be reached from here, other than through globals and classes? Or a function with a list or a
        variable that it may write to: it is the original's."""
        seen: dict[int, Any] = {}
        for value in reachable(original, self._cold):
            if id(value) in self.memo and value is not self.memo or _may_write(value):
                return True
            if any(id(container) in self.memo for container in _global_containers(value).values()):
                return True
            seen[id(value)] = value
        self._cold.update(seen)
        return False

    def _fix(self, made: Any) -> None:
        if type(made) is dict:  # most of what a module is made of
            self._fix_values(made)
            return
        if isinstance(made, torch.Tensor):
            return
        if isinstance(made, functools.partial):
            self._fix_partial(made)
        elif isinstance(made, list | deque):
            for place, value in enumerate(made):
                if isinstance(value, _TAKEN_AS_THEY_ARE):
                    _put(made.__setitem__, place, value, self._anew(value))
        elif isinstance(made, dict):
            self._fix_values(made)
        elif isinstance(made, set):
            for value in list(made):
                if (new := self._anew(value)) is not value:
                    made.remove(value)
                    made.add(new)
        if isinstance(vars_of := getattr(made, "__dict__", None), dict):
            self._fix_values(vars_of)
        for name in _slots(type(made)):
            value = getattr(made, name, None)
            _put(functools.partial(object.__setattr__, made), name, value, self._anew(value))

    def _fix_values(self, made: dict[Any, Any]) -> None:
        taken = [item for item in made.items() if isinstance(item[1], _TAKEN_AS_THEY_ARE)]
        for key, value in taken:
            _put(made.__setitem__, key, value, self._anew(value))

    def _fix_partial(self, made: Any) -> None:
        func, args = self._anew(made.func), self._anew(made.args)
        if func is not made.func or args is not made.args:
            made.__setstate__((func, args, made.keywords, vars(made)))

    def _anew(self, value: Any) -> Any:
        """The same, if nothing that deepcopy takes as it is is in it and reaches the original."""
        if not isinstance(value, _TAKEN_AS_THEY_ARE):
            return value
        known = self._made.get(id(value))
        if known is None:
            known = self._made[id(value)] = value, self._made_anew(value)
            self._made.setdefault(id(known[1]), (known[1], known[1]))
        return known[1]

    def _made_anew(self, value: Any) -> Any:
        if isinstance(value, tuple):
            items = [self._anew(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, MethodType):
            function = self._anew(value.__func__)
            return value if function is value.__func__ else MethodType(function, value.__self__)
        if isinstance(value, weakref.ref):
            new = self.memo.get(id(value()))
            return value if new is None else weakref.ref(new)
        if not self.reaches(value):
            return value
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, _CACHED):
            cached: Any = value
            return functools.lru_cache(**cached.cache_parameters())(self.of(cached.__wrapped__))
        return getattr(self.of(value.__self__), value.__name__)

    def _function(self, old: FunctionType) -> FunctionType:
        cells = tuple(map(self._cell, old.__closure__)) if old.__closure__ is not None else None
        shared = {name: self.memo[id(one)] for name, one in _global_containers(old).items() if id(one) in self.memo}
        names = {**old.__globals__, **shared} if shared else old.__globals__
        new = FunctionType(old.__code__, names, old.__name__, None, cells)
        new.__qualname__, new.__module__, new.__doc__ = old.__qualname__, old.__module__, old.__doc__
        new.__annotations__ = old.__annotations__

        def fill() -> None:
            new.__defaults__ = None if old.__defaults__ is None else tuple(map(self.of, old.__defaults__))
            if old.__kwdefaults__ is not None:
                new.__kwdefaults__ = {name: self.of(value) for name, value in old.__kwdefaults__.items()}
            vars(new).update((name, self.of(value)) for name, value in vars(old).items())

        self._later.append(fill)  # it may hold itself
        return new

    def _cell(self, old: CellType) -> CellType:
        """Functions that share a cell go on sharing it. A list that they write to is theirs, not the original's."""
        if id(old) in self._made:
            found: CellType = self._made[id(old)][1]
            return found
        new = CellType()
        self._made[id(old)] = old, new
        try:
            content = old.cell_contents  # kept alive, as all it holds, by the cell
        except ValueError:  # not bound yet
            return new
        if type(content) in PLAIN_CONTAINERS and not self.reaches(content):
            self.memo[id(content)] = copy.copy(content)
            new.cell_contents = self.memo[id(content)]
        else:

            def fill() -> None:
                new.cell_contents = self.of(content)

            self._later.append(fill)
        return new


def holds_weights(value: Any) -> bool:
    """Can a module or a parameter be reached from here, other than through globals and classes?"""
    return any(isinstance(one, nn.Module | nn.Parameter) for one in reachable(value))


def reachable(value: Any, known: Container[int] = ()) -> Iterator[Any]:
    """The value and all that can be reached from it, each once; what is known already is not entered."""
    seen: dict[int, Any] = {}
    todo = [value]
    while todo:
        one = todo.pop()
        if id(one) not in seen and not isinstance(one, _ENDS):
            seen[id(one)] = one
            yield one
            if id(one) not in known:
                todo.extend(_parts_of(one))


def _parts_of(value: Any) -> Iterator[Any]:
    """What can be reached from a value in one step: items, attributes, what a function holds."""
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, FunctionType):
        yield from contents_of(value)
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
        return  # its attributes are the function's
    elif isinstance(value, BuiltinFunctionType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, _CACHED):
        yield value.__wrapped__
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, dict):
        yield from list(value.keys())
        yield from list(value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from list(value)
    if isinstance(inside := getattr(value, "__dict__", None), dict):
        yield from list(inside.values())
    yield from (getattr(value, name, None) for name in _slots(type(value)))


def contents_of(function: Any) -> Iterator[Any]:
    """What its closure holds."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue


def containers_of(function: Any) -> Iterator[Any]:
    """Lists and dicts that a function can write to: those that it holds, and globals of its module."""
    for one in reachable(function):
        if type(one) in PLAIN_CONTAINERS:
            yield one
        yield from _global_containers(one).values()


def _global_containers(value: Any) -> dict[str, Any]:
    """Lists and dicts that a function reads from its module."""
    if not isinstance(value, FunctionType):
        return {}
    named = ((name, value.__globals__.get(name)) for name in value.__code__.co_names)
    return {name: one for name, one in named if type(one) in PLAIN_CONTAINERS}


def _may_write(value: Any) -> bool:
    """May a function write to what it holds: a container, or a variable that it binds anew?"""
    if not isinstance(value, FunctionType):
        return False
    return any(type(content) in PLAIN_CONTAINERS for content in contents_of(value)) or bool(
        outer_stores(value.__code__)
    )


_SLOTS: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _slots(kind: type) -> tuple[str, ...]:
    if kind in _SLOTS:
        return _SLOTS[kind]
    found = []
    for cls in kind.__mro__:
        named = cls.__dict__.get("__slots__", ())
        for name in (named,) if isinstance(named, str) else named:
            if name not in ("__dict__", "__weakref__"):
                found.append(f"_{cls.__name__.lstrip('_')}{name}" if name[:2] == "__" != name[-2:] else name)
    return _SLOTS.setdefault(kind, tuple(found))


def _put(write: Callable[[Any, Any], Any], place: Any, old: Any, new: Any) -> None:
    if new is not old:
        write(place, new)

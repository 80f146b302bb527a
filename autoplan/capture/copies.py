"""Copy a model such that nothing in the copy reaches back into the original.

The problem: `copy.deepcopy` does not copy functions. A model that keeps `self.head = lambda x: x @ self.emb.weight.t()`
has a copy whose head still multiplies with the original's weights: a run of the copy says nothing about them, and a
change of the copy does not change its head. The same holds for what is wrapped around functions and methods (caches,
weak references, methods of lists and tensors) and for forward hooks that hold modules.

So after deepcopy, with its own memo, every function that reaches the model is rebuilt with new cells, default arguments
and attributes. What lies outside of the model (a global, a closure of a class) cannot be copied with it; `outside.py`
notices when it is used.
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
from autoplan.common.torch_internals import own_parameters

Model = TypeVar("Model", bound=nn.Module)
_CACHED = type(functools.lru_cache(len))
_TAKEN_AS_THEY_ARE = (FunctionType, MethodType, BuiltinFunctionType, _CACHED, weakref.ref, tuple)
_ENDS = (type(None), type, ModuleType, str, bytes, int, float, complex)
PLAIN_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque, bytearray)


def copied(model: Model) -> Model:
    """Return a deep copy of the model in which functions that reach the model are rebuilt, too."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        # Non-leaf tensors that a run left in the model: deepcopy refuses them. The old `weight_norm` and
        # `spectral_norm` keep such a weight, and compute it again at each call.
        memo |= {id(t): t.detach().clone() for _, t in flatten_tensors(vars(module)) if not t.is_leaf}
        for value in vars(module).values():
            if type(value) is OrderedDict and not value:  # empty hook dicts: most of what deepcopy would spend time on
                memo[id(value)] = OrderedDict()
    fill = prepare_forwarders(model, memo)
    try:
        new = copy.deepcopy(model, memo)
        fill()
    except AutoplanError:
        raise
    except Exception as error:  # any object may refuse in any way
        raise AutoplanError(
            f"a copy of {type(model).__name__} is needed to run it safely, but it cannot be copied: "
            f"{type(error).__name__}: {error}",
            hint="create files, threads and generators in its forward, or leave them out of copies with __deepcopy__",
        ) from error
    copy_slots(model, memo)
    Rebinding(memo).everything()
    remember_original(new, model)
    return new


def prepare_forwarders(model: nn.Module, memo: dict[int, Any]) -> Callable[[], None]:
    """Put into the memo an empty object for each that forwards names which it lacks (`__getattr__`) to something that
    it holds, and return what fills them: asked for `__deepcopy__`, it would return that of what it forwards to."""
    shells: list[tuple[Any, Any]] = []
    for module in model.modules():
        for value in vars(module).values():
            for held in value if type(value) in (list, tuple) else value.values() if type(value) is dict else (value,):
                if id(held) not in memo and _is_forwarder(held):
                    memo[id(held)] = object.__new__(type(held))
                    shells.append((held, memo[id(held)]))

    def fill() -> None:
        for held, shell in shells:
            vars(shell).update(copy.deepcopy(vars(held), memo))

    return fill


def _is_forwarder(value: Any) -> bool:
    cls = type(value)
    if not hasattr(cls, "__getattr__") or isinstance(value, nn.Module):
        return False
    own_ways = ("__new__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__slots__")
    return all(getattr(cls, name, None) is getattr(object, name, None) for name in own_ways)


def copy_slots(model: nn.Module, memo: dict[int, Any]) -> None:
    """Copy what a deepcopy with this memo left out: the `__slots__` of modules, and attributes of parameters."""
    for module in model.modules():
        for parameter in own_parameters(module).values():
            copied_one = memo.get(id(parameter), parameter)
            if copied_one is not parameter and (set_on_it := vars(parameter).keys() - vars(copied_one).keys()):
                vars(copied_one).update(copy.deepcopy({name: vars(parameter)[name] for name in set_on_it}, memo))
        twin = memo.get(id(module), module)
        for name in _slots(type(module)):
            if twin is not module and hasattr(module, name) and not hasattr(twin, name):
                object.__setattr__(twin, name, copy.deepcopy(getattr(module, name), memo))


class Rebinding:
    """Rebuilds what still reaches the original in everything that a deepcopy with this memo has made."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self._made: dict[int, tuple[Any, Any]] = {}  # id -> an object that deepcopy shares, and its replacement
        self._cold: dict[int, Any] = {}  # objects that do not reach the model, kept alive so that ids stay valid
        self._later: list[Callable[[], None]] = []
        self._fixed: set[int] = set()

    def everything(self) -> None:
        """Fix every copy in the memo, and those that are added on the way."""
        while True:
            fresh = [(key, new) for key, new in self.memo.items() if key not in self._fixed and key != id(self.memo)]
            if not fresh and not self._later:
                return
            for key, new in fresh:
                self._fixed.add(key)
                if id(new) != key:
                    self._fix(new)
            while self._later:
                self._later.pop()()

    def of(self, original: Any) -> Any:
        """Return what replaces this part of the original: a copy if it reaches the model, else the object itself."""
        if not self.reaches(original):
            return original
        for value in reachable(original, self.memo):
            if isinstance(value, torch.Tensor) and not value.is_leaf:  # left by an earlier run: deepcopy refuses it
                self.memo.setdefault(id(value), value)
        try:
            return self._anew(copy.deepcopy(original, self.memo))
        except AutoplanError:
            raise
        except Exception as error:  # any object may refuse in any way
            raise AutoplanError(
                f"a copy of the model is needed to run it safely, but a {type(original).__name__} held by "
                f"one of its functions cannot be copied: {type(error).__name__}: {error}",
                hint="let the function hold only modules of the model, or make it a method of the model",
            ) from error

    def reaches(self, original: Any) -> bool:
        """Return whether the model can be reached from here, other than through globals and classes; True also for a
        function that may write to a list or a variable that it holds, since these are the original's."""
        seen: dict[int, Any] = {}
        for value in reachable(original, self._cold):
            if id(value) in self.memo and value is not self.memo:
                return True
            if isinstance(value, FunctionType) and outer_stores(value.__code__):
                return True
            if isinstance(value, FunctionType) and any(type(held) in PLAIN_CONTAINERS for held in contents_of(value)):
                return True
            if any(id(container) in self.memo for container in _global_containers(value).values()):
                return True
            seen[id(value)] = value
        self._cold.update(seen)
        return False

    def _fix(self, made: Any) -> None:
        if type(made) is dict:  # the common case: a module's __dict__
            self._fix_values(made)
            return
        if isinstance(made, torch.Tensor):
            return
        if isinstance(made, functools.partial):
            func, args = self._anew(made.func), self._anew(made.args)
            if func is not made.func or args is not made.args:
                made.__setstate__((func, args, made.keywords, vars(made)))  # type: ignore[attr-defined]
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

    def _anew(self, value: Any) -> Any:
        """Return the value rebuilt; the value itself unless it contains a function that reaches the original."""
        if not isinstance(value, _TAKEN_AS_THEY_ARE):
            return value
        pair = self._made.get(id(value))
        if pair is None:
            pair = self._made[id(value)] = value, self._made_anew(value)
            self._made.setdefault(id(pair[1]), (pair[1], pair[1]))
        return pair[1]

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
        shared = {name: self.memo[id(box)] for name, box in _global_containers(old).items() if id(box) in self.memo}
        names = {**old.__globals__, **shared} if shared else old.__globals__
        new = FunctionType(old.__code__, names, old.__name__, None, cells)
        new.__qualname__, new.__module__, new.__doc__ = old.__qualname__, old.__module__, old.__doc__
        new.__annotations__ = old.__annotations__

        def fill() -> None:
            new.__defaults__ = None if old.__defaults__ is None else tuple(map(self.of, old.__defaults__))
            if old.__kwdefaults__ is not None:
                new.__kwdefaults__ = {name: self.of(value) for name, value in old.__kwdefaults__.items()}
            vars(new).update((name, self.of(value)) for name, value in vars(old).items())

        self._later.append(fill)  # the function may hold itself
        return new

    def _cell(self, old: CellType) -> CellType:
        """Return the copy of a cell: functions that share one still do. A list that they write to is copied, too."""
        if id(old) in self._made:
            copied_cell: CellType = self._made[id(old)][1]
            return copied_cell
        new = CellType()
        self._made[id(old)] = old, new
        try:
            content = old.cell_contents
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


def reachable(value: Any, known: Container[int] = ()) -> Iterator[Any]:
    """Yield the value and everything that can be reached from it, once each; ids in `known` are not entered."""
    seen: dict[int, Any] = {}
    todo = [value]
    while todo:
        item = todo.pop()
        if id(item) not in seen and not isinstance(item, _ENDS):
            seen[id(item)] = item
            yield item
            if id(item) not in known:
                todo.extend(_parts_of(item))


def _parts_of(value: Any) -> Iterator[Any]:
    """Yield what can be reached from a value in one step: items, attributes, a function's closure and defaults."""
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
    """Yield the values in a function's closure."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue


def containers_of(function: Any) -> Iterator[Any]:
    """Yield lists and dicts that a function can write to: in its closure, and globals of its module."""
    for item in reachable(function):
        if type(item) in PLAIN_CONTAINERS:
            yield item
        yield from _global_containers(item).values()


def _global_containers(value: Any) -> dict[str, Any]:
    """Return the lists and dicts that a function reads from its module, by name."""
    if not isinstance(value, FunctionType):
        return {}
    named = ((name, value.__globals__.get(name)) for name in value.__code__.co_names)
    return {name: item for name, item in named if type(item) in PLAIN_CONTAINERS}


_SLOTS: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _slots(kind: type) -> tuple[str, ...]:
    if kind in _SLOTS:
        return _SLOTS[kind]
    names = []
    for cls in kind.__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                names.append(f"_{cls.__name__.lstrip('_')}{name}" if name[:2] == "__" != name[-2:] else name)
    return _SLOTS.setdefault(kind, tuple(names))


def _put(write: Callable[[Any, Any], Any], place: Any, old: Any, new: Any) -> None:
    if new is not old:
        write(place, new)

"""Check that a live model fits its plan."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from autoplan.common.code.code_place import forward_code, names_in, same_code, source_of
from autoplan.common.conventions import conventions
from autoplan.common.errors import PlanMismatchError
from autoplan.common.files.decode import inconsistencies
from autoplan.common.patterns import grouped, matched_by, matches
from autoplan.common.requirements import installed_versions
from autoplan.common.torch_internals import DROPOUTS
from autoplan.patches.patched import original_of
from autoplan.values import CallRewrite, ForwardCode, MadeFor, ParameterRule, Plan, Sizes, Version, replace
from autoplan.version import __version__

# What determines a model's computation besides its shapes: the plain values that it reads and its own functions.
#
# The problem: two models of one class can differ in a flag, a string, a rate, an activation function, and so in what
# they compute, although every shape and every integer is the same. A plan does not record such a value, so it is valid
# only for models that hold the same ones.
#
# Values are compared by content, never by identity, so that every process agrees. Tensors, modules and mere records of
# a model's origin are left out.

VERSIONED = ("builtins", "torch", "transformers", "autoplan")  # their code is identified by their version
_DEPTH = 6  # of nested values
# Packages of Python, and numpy, whose objects are plain values: they are read as a copy of them would be made. (Others
# hold what differs from process to process: locks, streams of random numbers, process groups.)
_OF_VALUES = ("argparse", "array", "collections", "decimal", "fractions", "functools", "numpy", "operator", "types")
_MOST_ITEMS = 1024  # of an array that is read
_OF_TORCH = frozenset(vars(nn.Module()))
_MARKS = ("__", "_autoplan", "_hf", "_is_hf", "_fsdp", "_old", "_gradient_checkpointing")  # set by libraries
_WRITTEN = (torch.dtype, torch.memory_format, torch.finfo, torch.iinfo, bytes, complex, range, slice, re.Pattern)
_ABSENT = object()  # marks a value that is left out


class Reading:
    """A reader of one model's values. Whatever was read is kept until the end, so that no id is reused."""

    def __init__(self, model: nn.Module) -> None:
        self.kinds = {type(module) for module in model.modules()}
        self.packages = {_package(base) for kind in self.kinds for base in kind.__mro__} - {*VERSIONED}
        self.registered = {id(module) for module in model.modules()}
        self.memo: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.hashes: dict[FunctionType, str] = {}  # of functions' own code, which is the same at each depth

    def module(self, module: nn.Module, depth: int = _DEPTH) -> dict[str, Any]:
        """Return the attributes of a module, by name."""
        idle = {*_OF_TORCH, conventions().own_checkpointing[0], *(("p",) if isinstance(module, DROPOUTS) else ())}
        marks = _MARKS if self._is_own(type(module)) else "_"  # a private one counts only in the model's own classes
        values = ((name, value) for name, value in vars(module).items() if not name.startswith(marks))
        return self._mapping({name: value for name, value in values if name not in idle}, depth)

    def classes(self) -> list[Any]:
        """Return functions and plain values of the classes, and of their bases, whose code has no version."""
        bases = {base for kind in self.kinds for base in kind.__mro__ if self._is_own(base)}
        return sorted(filter(None, (self._class(base, _DEPTH) for base in bases)), key=repr)

    def value(self, value: Any, depth: int = _DEPTH) -> Any:
        """Return a value as plain data; `_ABSENT` where it is left out."""
        value = original_of(value)  # earlier models may have replaced a function that this one's code reads
        if not isinstance(value, FunctionType) and callable(wrapped := getattr(value, "__wrapped__", None)):
            value = wrapped  # of a cached function
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, (float, *_WRITTEN)):
            return repr(value)
        if isinstance(value, (torch.Tensor, ModuleType, torch.device)) or id(value) in self.registered or not depth:
            return _ABSENT
        cached = self.memo.get((id(value), depth))  # at each depth anew: what was read first must not matter
        if cached is None:
            self.memo[id(value), depth] = cached = value, self._within(value, depth - 1)
        return cached[1]

    def _within(self, value: Any, depth: int) -> Any:
        if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
            return self._code(value, depth)
        if isinstance(value, MethodType):
            return self.value(value.__func__, depth)
        content = self._content(value, depth)
        return [self._code(type(value), depth), content] if self._is_own(type(value)) else content

    def _content(self, value: Any, depth: int) -> Any:
        """Return what an object holds."""
        kind, rules = type(value), conventions()
        if isinstance(value, nn.Module):  # in a list, say
            return [[name, type(part).__qualname__, self.module(part, depth)] for name, part in value.named_modules()]
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, (list, tuple, deque)):
            return self._list(value, depth)
        if isinstance(value, (set, frozenset)):
            return sorted(repr(self.value(item, depth)) for item in value)
        config = rules.config_of(cast(Any, SimpleNamespace(config=value)))
        if config is not None:
            settings = ((name, value) for name, value in config.to_dict().items())
            return self._mapping({n: v for n, v in settings if not n.startswith(rules.idle_settings)}, depth)
        if self._is_own(kind):
            state = object.__getstate__(value)  # with slots, if it has some
            parts = state if isinstance(state, tuple) else (state,)
            held = {name: v for part in parts for name, v in (part or {}).items() if not name.startswith("__")}
            return self._mapping(held, depth)
        name = [kind.__qualname__, getattr(value, "__name__", None)]
        if _package(kind) not in _OF_VALUES or getattr(value, "size", 0) > _MOST_ITEMS:
            return name
        try:
            return [name, self._list(value.__reduce_ex__(2), depth)]
        except TypeError:  # nothing that can be copied
            return name

    def _mapping(self, values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        rules, plain = conventions(), {}
        for name, value in values.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            is_rate = number and rules.is_rate(str(name))  # changed between runs, and ranks follow it when it is
            if not is_rate and not any(word in str(name) for word in rules.idle_words):
                plain[str(name)] = self.value(value, depth)
        return {name: value for name, value in sorted(plain.items()) if value is not _ABSENT}

    def _list(self, values: Iterable[Any], depth: int) -> list[Any]:
        items = [self.value(item, depth) for item in values]
        return [None if item is _ABSENT else item for item in items]

    def _code(self, function: Any, depth: int) -> Any:
        """Return a function or class by name; if it has no version, by its code and the values that the code reads."""
        name = f"{_module(function)}.{getattr(function, '__qualname__', '')}"
        if not self._is_own(function):
            return name
        if isinstance(function, type):
            bases = [base for base in (*function.__mro__, type(function)) if self._is_own(base)]
            return [name, [self._class(base, depth) for base in bases]]
        if not isinstance(function, FunctionType):
            return name
        read = self._mapping(self._named(function.__globals__, set(names_in(function.__code__)), depth), depth)
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        cells += [value for name, value in sorted(vars(function).items()) if not name.startswith("_")]
        around = (function.__defaults__, function.__kwdefaults__, cells)
        if function not in self.hashes:
            # The source, if it has its own: compiled code differs between versions of Python.
            source = source_of(function) if function.__name__ != "<lambda>" else None
            text = source or "\n".join(_compiled(function.__code__))
            self.hashes[function] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return [self.hashes[function], read, self._list(around, depth)]

    def _class(self, kind: type, depth: int) -> Any:
        """Return the functions and plain values of one class, without its bases; None if it has none."""
        members = self._mapping(dict(_members(kind)), depth)
        return [kind.__qualname__, members] if members else None

    def _named(self, space: Mapping[str, Any], names: Collection[str], depth: int) -> dict[str, Any]:
        """Return the values in a namespace that code reads by these names; of a module's, those that it reads there."""
        return {
            name: self._named(vars(value), names, depth - 1)
            if isinstance(value := space[name], ModuleType) and self._is_own(value) and depth > 0
            else value
            for name in sorted(names)
            if name in space
        }

    def _is_own(self, thing: Any) -> bool:
        """Return whether code has no version: it is the model's, or its package is not installed."""
        package = _package(thing)
        return package not in VERSIONED and (package in self.packages or not _is_installed(package))


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", getattr(value, "fget", value))  # of a class or static method, a property
        if not name.startswith("__") or (isinstance(function, FunctionType) and name != "__init__"):
            yield name, function


def _module(thing: Any) -> str:
    return str(getattr(thing, "__name__" if isinstance(thing, ModuleType) else "__module__", None))


def _package(thing: Any) -> str:
    return _module(thing).partition(".")[0]


@cache
def _is_installed(package: str) -> bool:
    """Return whether a package belongs to Python or was installed, in whichever environment."""
    module = sys.modules.get(package)
    places: Iterable[str] = getattr(module, "__path__", None) or [str(getattr(module, "__file__", None) or "")]
    if package in sys.stdlib_module_names or any({"site-packages", "dist-packages"} & {*Path(p).parts} for p in places):
        return True
    return any(Path(place).is_relative_to(sysconfig.get_path("stdlib")) for place in places)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # emptied
        return False


def _compiled(code: CodeType) -> Iterator[str]:
    """Yield the parts of compiled code that do not depend on its position in the file."""
    yield from (code.co_code.hex(), repr(code.co_names), repr(code.co_varnames))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _compiled(constant)
        else:
            yield repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


# The rules of the stored tensors of a quantised model.


def stored_rules(tensors: Mapping[str, torch.Tensor], plan: Plan) -> dict[str, ParameterRule]:
    """Return the rules, by full name, of the model's tensors that the plan lists as stored."""
    rules: dict[str, ParameterRule] = {}
    for weight in plan.packed:
        for tensor in weight.tensors:
            if tensor.dim is not None:
                pattern = f"{weight.owner}.{tensor.attribute}"
                for name in matched_by(pattern, tensors):
                    if tuple(tensors[name].shape) == tensor.shape:
                        rules[name] = ParameterRule(name, tensor.dim, tensor.layout)
    return rules


def is_stored_packed(pattern: str, plan: Plan, rules: Mapping[str, ParameterRule]) -> bool:
    """Return whether a weight that the model lacks is there in packed form."""
    mine = [weight for weight in plan.packed if matches(pattern, weight.name)]
    return any(matches(weight.owner, name.rpartition(".")[0]) for weight in mine for name in rules)


# What a plan was made for, and whether a model matches it; checked before anything of the model is changed.

_SHOWN = 3
_DIGITS = 16


def with_made_for(plan: Plan, model: nn.Module) -> Plan:
    """Return the plan with a record that it was made for this model."""
    libraries = {"autoplan": __version__, **installed_versions()}
    versions = tuple(Version(library, version) for library, version in libraries.items())
    rewritten = _rewritten(model, plan).items()
    forwards = tuple(ForwardCode(kind.__qualname__, forward_code(kind, places)) for kind, places in rewritten)
    cut = [rule.pattern for rule in plan.runtime.parameters if rule.dim is not None]
    shapes = _shapes(model)
    sizes = (Sizes(pattern, tuple(dict.fromkeys(_meant(pattern, shapes).values()))) for pattern in dict.fromkeys(cut))
    made_for = MadeFor(versions, forwards, tuple(size for size in sizes if size.shapes), model_hash(model))
    return replace(plan, made_for=made_for)


def model_hash(model: nn.Module) -> str:
    """Return a hash of a model's code and of all plain values in its classes, modules and config.

    A flag, a rate or a function changes what code does without changing a shape. Left out are wrapper classes (the code
    of what they wrap counts) and the model's device, dtype and train/eval mode.
    """
    reading = Reading(model)
    codes = sorted({forward_code(kind, ()) for kind in reading.kinds})
    values = {name: reading.module(module) for name, module in model.named_modules()}
    text = json.dumps([codes, reading.classes(), values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def check_fits(model: nn.Module, plan: Plan) -> None:
    """Raise unless the plan is consistent and was made for code and sizes like these."""
    apart = list(inconsistencies(plan))
    codes = grouped((forward.class_name, forward.code) for forward in plan.made_for.forwards)
    for kind, places in _rewritten(model, plan).items() if codes else ():
        name = kind.__qualname__
        ancestor = next((base for base in kind.__mro__ if base.__qualname__ in codes), None)  # of subclasses, wrappers
        if ancestor is None:
            apart.append(f"the forward of {name} now has calls to rewrite for which the plan was not made")
        elif not any(same_code(code, forward_code(kind, places)) for code in codes[ancestor.__qualname__]):
            apart.append(f"the code of {name}.forward has changed, and the plan rewrites calls in it by position")
    stored = [(f"{w.owner}.{tensor.attribute}", tensor.shape) for w in plan.packed for tensor in w.tensors]
    shapes = _shapes(model) if plan.made_for.sizes else {}
    for sizes in plan.made_for.sizes:
        for name, shape in _meant(sizes.pattern, shapes).items():
            is_stored = any(shape == packed and matches(pattern, name) for pattern, packed in stored)
            if shape not in sizes.shapes and not is_stored:
                planned = " or ".join(str(list(shape)) for shape in sizes.shapes)
                apart.append(f"{name} has shape {list(shape)}, but was planned with {planned}")
                break
    if not apart:
        return
    more = f" (and {len(apart) - _SHOWN} more)" if len(apart) > _SHOWN else ""
    raise PlanMismatchError(
        f"the plan does not fit {type(model).__name__}: {'; '.join(apart[:_SHOWN])}{more} ({made_with(plan)})",
        hint=f"make it again for this model: {made_anew(plan)}",
    )


def made_with(plan: Plan) -> str:
    """Return a phrase with the versions that the plan was made with."""
    return f"it was made with {plan.made_for.libraries}"


def made_anew(plan: Plan) -> str:
    """Return the shell command and the line of Python that make the plan again."""
    sizes = {"tp": plan.tp_size, "ep": plan.ep_size, "cp": plan.cp_size}
    sizes = {name: size for name, size in sizes.items() if size > 1} or {"tp": 1}
    along = plan.sequence_parallel and plan.cp_size == 1
    return (
        f"autoplan plan MODEL {' '.join(f'--{name} {size}' for name, size in sizes.items())}"
        f"{' --sequence-parallel' * along} -o FILE, or in Python "
        f"autoplan.plan(model, {', '.join(f'{name}_size={size}' for name, size in sizes.items())}).save(FILE)"
    )


def _rewritten(model: nn.Module, plan: Plan) -> dict[type[nn.Module], set[str]]:
    """Return the classes of which the plan rewrites calls, with the places of these calls."""
    calls = plan.runtime.of(CallRewrite)
    places_of: dict[type[nn.Module], set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False) if calls else ():
        for call in calls:
            if matches(call.pattern, name):
                places_of.setdefault(type(module), set()).add(call.site.place)
    return places_of


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _meant(pattern: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: shapes[name] for name in matched_by(pattern, shapes)}

"""Check that a live model fits its plan."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cache, partial
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
_NAMESPACES = ("types", "argparse")  # modules of Python whose objects people keep settings in
_OF_TORCH = frozenset(vars(nn.Module()))
_MARKS = ("__", "_autoplan", "_hf", "_is_hf", "_fsdp", "_old", "_gradient_checkpointing")  # set by libraries
_ABSENT = object()  # marks a value that is left out


class Reading:
    """A reader of one model's values. Whatever was read is kept until the end, so that no id is reused."""

    def __init__(self, model: nn.Module) -> None:
        self.kinds = {type(module) for module in model.modules()}
        self.packages = {_package(base) for kind in self.kinds for base in kind.__mro__} - {*VERSIONED}
        self.memo: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.hashes: dict[FunctionType, str] = {}  # of functions' own code, which is the same at each depth

    def module(self, module: nn.Module) -> dict[str, Any]:
        """Return the attributes of a module, by name."""
        idle = {*_OF_TORCH, conventions().own_checkpointing[0], *(("p",) if isinstance(module, DROPOUTS) else ())}
        marks = _MARKS if self._is_own(type(module)) else "_"  # a private one counts only in the model's own classes
        values = ((name, value) for name, value in vars(module).items() if not name.startswith(marks))
        return self._mapping({name: value for name, value in values if name not in idle}, _DEPTH)

    def classes(self) -> list[Any]:
        """Return functions and plain values of the classes, and of their bases, whose code has no version."""
        bases = {base for kind in self.kinds for base in kind.__mro__ if self._is_own(base)}
        read = [[base.__qualname__, self._mapping(dict(_members(base)), _DEPTH)] for base in bases]
        return sorted((entry for entry in read if entry[1]), key=repr)

    def value(self, value: Any, depth: int = _DEPTH) -> Any:
        """Return a value as plain data; `_ABSENT` where it is left out."""
        value = original_of(value)  # earlier models may have replaced a function that this one's code reads
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return repr(value)
        if isinstance(value, (torch.dtype, torch.Size, bytes, complex, range, slice)):
            return repr(value)
        if isinstance(value, Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, (torch.Tensor, nn.Module, ModuleType, torch.device)) or not depth:
            return _ABSENT
        cached = self.memo.get((id(value), depth))  # at each depth anew: what was read first must not matter
        if cached is None:
            self.memo[id(value), depth] = cached = value, self._within(value, depth - 1)
        return cached[1]

    def _within(self, value: Any, depth: int) -> Any:
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, (list, tuple)):
            return self._list(value, depth)
        if isinstance(value, (set, frozenset)):
            return sorted(repr(self.value(item, depth)) for item in value)
        if isinstance(value, partial):
            return ["partial", self._list((value.func, value.args, value.keywords), depth)]
        if isinstance(value, MethodType):
            return self.value(value.__func__, depth)
        if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
            return self._code(value, depth)
        # Any other object (a library's config, a dataclass, a namespace) by its class and attributes.
        kind, rules = type(value), conventions()
        config = rules.config_of(cast(Any, SimpleNamespace(config=value)))
        if config is not None:
            settings = ((name, value) for name, value in config.to_dict().items())
            return self._mapping({n: v for n, v in settings if not n.startswith(rules.idle_settings)}, depth)
        if not self._is_own(kind) and _module(kind) not in _NAMESPACES:
            return kind.__qualname__
        return [kind.__qualname__, self._mapping(getattr(value, "__dict__", {}), depth)]

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
        if isinstance(function, type) and self._is_own(function):
            return [name, self._mapping(dict(_members(function)), depth)]
        if not isinstance(function, FunctionType) or not self._is_own(function):
            return name
        spaces, names = function.__globals__, sorted(set(names_in(function.__code__)))
        read = self._mapping({name: spaces[name] for name in names if name in spaces}, depth)
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        around = (function.__defaults__, function.__kwdefaults__, cells)
        if function not in self.hashes:
            # The source, if it has its own: compiled code differs between versions of Python.
            source = source_of(function) if function.__name__ != "<lambda>" else None
            text = source or "\n".join(_compiled(function.__code__))
            self.hashes[function] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return [self.hashes[function], read, self._list(around, depth)]

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
    return str(getattr(thing, "__module__", None))


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

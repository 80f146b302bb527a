"""Tensors inside nested arguments and results: list them with their paths, and change one by its path.

Containers are tuples (named ones too), lists, dicts, and records: instances of dataclasses, and namespaces. A path is
written into plan files, so a dict key that is neither a string nor a number (a member of an Enum, the edge type of a
graph) is text in it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch

from autoplan.common.errors import PlanMismatchError

EACH = "*"  # in a path: every item of a sequence with one item per block
_LEAVES = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))
Path = tuple[Any, ...]
Change = Callable[[torch.Tensor], torch.Tensor]


def flatten_tensors(value: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield every tensor in nested containers, with its path."""
    tensors: list[tuple[Path, torch.Tensor]] = []
    _collect(value, (), tensors)
    return iter(tensors)


def _collect(value: Any, path: Path, tensors: list[tuple[Path, torch.Tensor]]) -> None:
    """Append every tensor, with its path. No nested generators, since this runs for each torch call."""
    if isinstance(value, torch.Tensor):
        tensors.append((path, value))
        return
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = ((_step_of(key), item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif type(value) not in _LEAVES and is_record(value):
        items = fields_of(value).items()
    else:
        return
    for key, item in items:
        if type(item) not in _LEAVES:
            _collect(item, (*path, key), tensors)


def _step_of(key: Any) -> Any:
    """Return the step of a path for a key of a dict. (`("args", i)` is a step: an argument without a name.)"""
    if key is None or isinstance(key, (str, int, float)) or (type(key) is tuple and key[:1] == ("args",)):
        return key
    return f"{type(key).__name__}.{key.name}" if isinstance(key, Enum) else repr(key)


def _key_at(value: dict[Any, Any], step: Any) -> Any:
    """Return the key of a dict for a step of a path; the step itself if there is none."""
    if step in value or not isinstance(step, str):
        return step
    return next((key for key in value if not isinstance(key, str) and _step_of(key) == step), step)


def is_record(value: Any) -> bool:
    """Return whether a value holds named values as attributes. (A dict with attributes is a dict.)"""
    if isinstance(value, type | dict):
        return False
    return isinstance(value, SimpleNamespace) or dataclasses.is_dataclass(value)


def fields_of(record: Any) -> dict[str, Any]:
    """Return the values of a record by name."""
    if isinstance(record, SimpleNamespace):
        return dict(vars(record))
    attributes = getattr(record, "__dict__", None)  # as stored: a class may raise on access to a field
    names = [field.name for field in dataclasses.fields(record)]
    return {name: getattr(record, name, None) if attributes is None else attributes.get(name) for name in names}


def changed_inside(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with `change` of each item; any other value is returned as it is."""
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return _like(value, [change(item) for item in value])
    if is_record(value) and next(flatten_tensors(value), None) is not None:  # a config has none, and is not copied
        return _with_fields(value, {name: change(item) for name, item in fields_of(value).items()})
    return value


def own_argument(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return an argument that a call may write to: `changed_inside`, or a changed copy of an object (a cache)."""
    changed = changed_inside(value, change)
    if changed is not value or callable(value) or is_record(value) or not getattr(value, "__dict__", None):
        return changed
    memo: dict[int, Any] = {}
    _change_reached(value, change, memo, set())
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # an object may refuse in any way, and is then passed itself, as in the caller's own call
        return value


def _change_reached(value: Any, change: Callable[[Any], Any], memo: dict[int, Any], seen: set[int]) -> None:
    """Put `change` of every tensor that is reached through attributes and containers into the memo."""
    if isinstance(value, torch.Tensor):
        memo[id(value)] = change(value)
    elif type(value) not in _LEAVES and not isinstance(value, type) and id(value) not in seen:
        seen.add(id(value))
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
        for item in [*items, *getattr(value, "__dict__", {}).values()]:
            _change_reached(item, change, memo, seen)


def _with_fields(record: Any, fields: dict[str, Any]) -> Any:
    """Return a copy made without the class's own code, which may compute fields, or forbid setting them."""
    other = copy.copy(record)
    for name, value in fields.items():
        object.__setattr__(other, name, value)
    return other


def signature_names(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the positional parameters of a module's forward, as far as it gives any."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in kinds)


def call_with(function: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
    """Call a module or a function on inputs by name. The items of a `*rest` have the key "*rest"; they, what comes
    before them and positional-only arguments are passed by position."""
    forward = getattr(function, "forward", function)
    positional = getattr(getattr(forward, "__code__", None), "co_posonlyargcount", 0)
    if not positional and not any(name[:1] == "*" for name in inputs):
        return function(**inputs)
    args: list[Any] = []
    keywords = dict(inputs)
    for p in inspect.signature(forward).parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            args += keywords.pop(f"*{p.name}", ())
        elif p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and (p.name in inputs or p.default is not p.empty):
            args.append(keywords.pop(p.name, p.default))
    for name in [name for name in keywords if name[:1] == "*"]:  # of a wrapper, whose signature is that of the wrapped
        args += keywords.pop(name)
    return function(*args, **keywords)


Noted = list[tuple[dict[Any, Any], Any, Any, Any]]  # dict, key, old value, new value


def change_at(value: Any, path: Path, change: Change, where: str, noted: Noted | None = None) -> Any:
    """Return `value` with the tensor at `path` changed. None on the path, or a missing optional field of a dict, stays
    None. A dict is changed in place, so that its other holders see it, and recorded in `noted`."""
    if not path:
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            raise PlanMismatchError(
                f"{where}: the plan expects a tensor here but got a {type(value).__name__}",
                hint="this call takes a path that was not traced; plan again with inputs= that cover it",
            )
        return change(value)
    key, rest = path[0], path[1:]
    if isinstance(value, dict):
        key = _key_at(value, key)
        if key not in value:
            return value if getattr(value, str(key), value) is None else _missing(where, path)
        before = value[key]
        value[key] = change_at(before, rest, change, where, noted)
        if noted is not None:
            noted.append((value, key, before, value[key]))
        return value
    if isinstance(value, (list, tuple)):
        if key == EACH:
            return _like(value, [change_at(item, rest, change, where, noted) for item in value])
        if not isinstance(key, int) or key >= len(value):
            return _missing(where, path)
        items = list(value)
        items[key] = change_at(items[key], rest, change, where, noted)
        return _like(value, items)
    if is_record(value):
        if key not in fields_of(value):
            return _missing(where, path)
        return _with_fields(value, {key: change_at(fields_of(value)[key], rest, change, where, noted)})
    if value is None:
        return None
    return _missing(where, path)


def put_back(noted: Noted) -> None:
    """Undo recorded changes of dicts, except those that someone else has changed since."""
    while noted:
        value, key, before, now = noted.pop()
        if value.get(key) is now:
            value[key] = before


def _like(value: Any, items: list[Any]) -> Any:
    """Return a sequence of the same type: lists, tuples, named tuples, and torch's return types."""
    if isinstance(value, list):
        return items
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return type(value)(items) if type(value).__module__ == "torch.return_types" else tuple(items)


def _missing(where: str, path: Path) -> Any:
    raise PlanMismatchError(
        f"{where}: nothing found at {'.'.join(map(str, path))}, where the plan expects a value",
        hint="this call takes a path that was not traced; plan again with inputs= that cover it",
    )


def change_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...], path: Path, change: Change, where: str,
    *, at: Callable[[Any, Path, Change, str], Any] = change_at,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Return arguments with one tensor changed; the first step of the path is a parameter's name or ("args", i)."""
    name, rest = path[0], path[1:]
    if name in kwargs:
        return args, kwargs | {name: at(kwargs[name], rest, change, where)}
    index = len(names) + name[1] if isinstance(name, tuple) else names.index(name) if name in names else len(args)
    if index >= len(args):
        return args, kwargs  # an optional input that was not passed
    changed = list(args)
    changed[index] = at(changed[index], rest, change, where)
    return tuple(changed), kwargs


def change_if_tensor(value: Any, path: Path, change: Change, where: str) -> Any:
    """Return `value` with the tensor at `path` changed; unchanged if there is no tensor."""
    return change_at(value, path, change, where) if _holds_tensor(value, path) else value


def _holds_tensor(value: Any, path: Path) -> bool:
    if not path:
        return isinstance(value, torch.Tensor)
    key, rest = path[0], path[1:]
    if isinstance(value, (list, tuple)):
        items = value if key == EACH else value[key : key + 1] if isinstance(key, int) else ()
        return bool(items) and all(_holds_tensor(item, rest) for item in items)
    items_by_key = value if isinstance(value, dict) else fields_of(value) if is_record(value) else {}
    key = _key_at(items_by_key, key)
    return key in items_by_key and _holds_tensor(items_by_key[key], rest)


def other_forms(path: Path, paths: Iterable[Path]) -> tuple[Path, ...]:
    """Return the paths that lead to this one or go on from it: one call returns `x`, another `(x, …)`."""
    return tuple(other for other in paths if other != path and other[: len(path)] == path[: len(other)])


def is_other_form(output: Any, path: Path, others: tuple[Path, ...]) -> bool:
    """Return whether an output has a tensor on the way to a path, or none at it where another one goes on from it."""
    return any(_holds_tensor(output, min(other, path, key=len)) == (len(other) < len(path)) for other in others)


def left_out_of(output: Any, path: Path) -> Any:
    """Return the dict on the path that lacks its key, or the list or tuple that ends before; None if there is none."""
    for key in path:
        if isinstance(output, dict):
            if (key := _key_at(output, key)) not in output:
                return output
        elif not isinstance(output, list | tuple) or not isinstance(key, int):
            return None
        elif key >= len(output):
            return output
        output = output[key]
    return None

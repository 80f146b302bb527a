"""A config before anything is built from it: are its values of the right kinds, and its sizes not absurd?

A config is somebody's file. Classes of configs and models trust it: a `model_type` that is a list, a negative width or
a billion layers end in an error from deep inside, or do not end at all. What can be told from the values is told
first; what can only be told by building is counted while it is built.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.nn.modules import module as torch_modules

from autoplan.common.errors import SourceError
from autoplan.common.files.shapes import misshapen
from autoplan.hf.tiny_sizes import field_rule, is_layer_count, is_token_id

__all__ = ["check_config", "limited_modules"]

_OPEN = type(None)
_SHAPE = {
    **{"model_type": (str, _OPEN), "architectures": ([str], _OPEN)},
    "auto_map": ({"*": (str, [(str, _OPEN)], _OPEN)}, str, _OPEN),
}
MOST_LAYERS = 1024
MOST_PARALLEL = 1 << 14  # heads, experts
MOST_SIZE = 1 << 26
MOST_REGISTERED = 1_000_000  # modules and parameters of one model


def check_config(data: Any, where: str) -> None:
    """Raise SourceError on the first value that no model can be built from."""
    if not isinstance(data, Mapping):
        raise SourceError(f"{where} holds a {type(data).__name__}, not a config", hint="fetch the file again")
    for path, one in _configs(data):
        prefix = f"{where}: {path}" if path else f"{where}: "
        problem = misshapen(one, _SHAPE) or _sub_config(one) or next(filter(None, map(_absurd, one.items())), "")
        problem = problem or _too_many(one)
        if problem:
            raise SourceError(f"{prefix}{problem}", hint="fix the config, or fetch the file again")


def _configs(data: Mapping[str, Any], path: str = "", depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A config and those inside it, each with the path to it."""
    yield path, data
    for name, value in data.items():
        if isinstance(value, Mapping) and str(name).endswith("config") and depth < 8:
            yield from _configs(value, f"{path}{name}.", depth + 1)


def _sub_config(data: Mapping[str, Any]) -> str:
    names = (name for name in data if isinstance(name, str) and name.endswith("_config"))
    return next((problem for name in names if (problem := _wrong_kind(name, data[name]))), "")


def _wrong_kind(name: str, value: Any) -> str:
    """A config inside another is a mapping; some types have lists of them."""
    return "" if isinstance(value, list) else misshapen(value, ({}, _OPEN), name)


def _absurd(field: tuple[str, Any]) -> str:
    name, value = field
    if not isinstance(name, str) or is_token_id(name):
        return ""
    for one in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(one, bool) or not isinstance(one, int):
            continue
        limit = _limit(name)
        if one > limit:
            return f"{name} is {one:,}; at most {limit:,} are built"
        if one < 0 and not isinstance(value, (list, tuple)) and _counts(name):
            return f"{name} is {one}; a size is not negative"
    return ""


def _limit(name: str) -> int:
    if is_layer_count(name):
        return MOST_LAYERS
    size = field_rule(name)[0]
    return MOST_PARALLEL if size == "experts" or size.endswith("heads") else MOST_SIZE if size else 1 << 53


def _counts(name: str) -> bool:
    size = field_rule(name)[0]
    return is_layer_count(name) == "depth" or (bool(size) and size != "chunk")  # -1: no chunks


def _too_many(data: Mapping[str, Any]) -> str:
    """Layers and experts that are few each may be too many together."""
    whole = {name: value for name, value in data.items() if isinstance(value, int) and not isinstance(value, bool)}
    layers = max((value for name, value in whole.items() if is_layer_count(name) == "depth"), default=1)
    experts = max((value for name, value in whole.items() if field_rule(name)[0] == "experts"), default=1)
    if layers * experts > MOST_REGISTERED:
        return f"{layers:,} layers of {experts:,} experts are {layers * experts:,} modules, which are not built"
    return ""


@contextmanager
def limited_modules(name: str) -> Iterator[None]:
    """Raise where a model is built of more modules and parameters than any honest one has."""
    here, found = threading.get_ident(), 0

    def count(*_: Any) -> None:
        nonlocal found
        if threading.get_ident() == here:
            found += 1
            if found > MOST_REGISTERED:
                raise SourceError(
                    f"{name} would be built of more than {MOST_REGISTERED:,} modules and parameters",
                    hint="look for an absurd count in its config",
                )

    handles = [
        torch_modules.register_module_module_registration_hook(count),
        torch_modules.register_module_parameter_registration_hook(count),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

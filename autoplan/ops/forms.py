"""The form of a torch call: one word for the function, its literals and the dims of its tensors.

The path guard (execute/guard/) compares the forms of a sharded model's calls with those that its plan has seen. What an
op does to each element it does with any number, and a layer that draws at a rate is tried in training by itself: there
the literals say nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import torch

from autoplan.common.code.code_place import call_name
from autoplan.common.code.forms import ANY, FACTOR
from autoplan.ops.elementwise import elementwise
from autoplan.ops.records.answers import Linear
from autoplan.ops.records.record import call_record, op_record

__all__ = ["form_of"]


def form_of(function: Any, args: Any, kwargs: Any) -> str:
    """The form of a call; "" where it computes nothing, or scales and adds."""
    name = call_name(function)
    record = call_record(name)
    if name.startswith(("attr:", "_set_")):
        return ""
    if op_record(record.becomes or name).dims is elementwise:
        return "" if record.linear is not Linear.NO else f"{_plain(name)}()"
    words = [word for value in args for word in _words(value)]
    words += [f"{key}:{word}" for key in sorted(kwargs) for word in _words(kwargs[key])]
    if record.random.when == "rate":
        words = [re.sub(r"(^|:)(True|False|f-?\d+|~)$", rf"\1{ANY}", word) for word in words]
    if not any(word.rpartition(":")[2].isdigit() for word in words):  # no dim is counted from the front
        words = [re.sub(r"(^|:)t\d+$", r"\1t", word) for word in words]
    return f"{_plain(name)}({','.join(words)})"


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        yield f"t{value.dim()}"
    elif value is None or isinstance(value, (bool, torch.dtype, torch.layout, torch.memory_format)):
        yield str(value).removeprefix("torch.")
    elif isinstance(value, int):
        yield _number(value)
    elif isinstance(value, float):
        yield f"f{int(value)}" if value.is_integer() else FACTOR
    elif isinstance(value, str):
        yield _plain(value)
    elif isinstance(value, slice):
        yield from ("slice", *_words(value.start), *_words(value.stop), *_words(value.step))
    elif isinstance(value, (list, tuple)):
        words = [word for item in value for word in _words(item)]
        yield "["
        for before, word in zip(["", *words], words, strict=False):  # as many tensors as there are
            if not (word == before and word.startswith("t")):
                yield word
        yield "]"
    elif isinstance(value, torch.device):
        yield "device"
    else:
        yield _plain(getattr(value, "__qualname__", type(value).__qualname__))


def _plain(text: str) -> str:
    """One word, whatever stands in it."""
    return text if re.fullmatch(r"[\w.]+", text) else "x" + hashlib.sha256(text.encode()).hexdigest()[:8]


def _number(value: int) -> str:
    origin = getattr(value, "origin", None)
    if origin is None:
        return str(int(value))
    names = list(_attributes(origin))
    return f"@{'|'.join(map(str, names))}:{int(value)}" if names and None not in names else ANY


def _attributes(origin: tuple[Any, ...]) -> Iterator[str | None]:
    """The names of the attributes that a number comes from; None for a size."""
    if origin[0] in ("attr", "config"):
        yield _plain(str(origin[2]))
    elif origin[0] in ("size", "numel"):
        yield None
    elif origin[0] != "const":
        for part in origin[1:]:
            yield from _attributes(part)

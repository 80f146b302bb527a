"""The forms of torch calls: the function, its literals, and the number of dims of each tensor: "softmax(T3,-1)".

The path guard compares them with those that a plan has seen. A size is "*" and a factor "~", which may differ from call
to call; "@dim:1" is a number stored in an attribute, which sharding may have set.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from autoplan.common.code.code_place import call_name
from autoplan.common.nested import flatten_tensors

_ANY, _FACTOR, _LEADING = "*", "~", "__len__"
_MOST_VALUES = 3  # with this many different numbers at one place, any number passes (a loop counter)


def form_of(literals_say: Callable[[str], str], function: Any, args: Any, kwargs: Any) -> str:
    """Return the form of a call; "" if it computes nothing, or scales and adds. `literals_say`: see ops/."""
    name = call_name(function)
    answer = literals_say(name)
    if name.startswith(("attr:", "_set_")) or answer == "nothing":
        return ""
    if answer == "elementwise":
        return f"{answer}({','.join('T' for _ in flatten_tensors((args, kwargs)))})"
    if answer == "function":
        return f"{_plain(name)}()"
    words = [word for value in args for word in _words(value)]
    words += [f"{key}:{word}" for key in sorted(kwargs) for word in _words(kwargs[key])]
    if answer == "numbers":
        words = [re.sub(r"(^|:)(True|False|f-?\d+|~)$", rf"\1{_ANY}", word) for word in words]
    if answer == "sizes" and args and isinstance(args[0], torch.Tensor) and args[0].dim():  # `view(len(x), -1)`
        first = 2 if words[1:2] == ["["] else 1
        if words[first : first + 1] == [str(int(args[0].shape[0]))]:
            words[first] = f"@{_LEADING}:{words[first]}"
    if answer == "pieces":  # dim defaults to 0
        dim_arguments = [*args[2:3], *(kwargs[key] for key in kwargs if key == "dim")]
        dims = [word for value in dim_arguments for word in _words(value)]
        return _written(name, words, dims or ["0"])
    return _written(name, words, [] if answer == "rows" else words)


def without_length(form: str, is_length: Callable[[], bool]) -> str:
    """Return the form without the note that a number equals the tensor's leading size, unless it can be that size."""
    note = f"@{_LEADING}:"
    return form.replace(note, "", 1) if note in form and not is_length() else form


def form_of_given(arguments: Iterable[Any]) -> str:
    """Return the form of an autograd function's arguments, any of which its backward may use."""
    words = [word for value in arguments for word in _words(value)]
    return _written("given", words, words)


def _written(name: str, words: list[str], dims: list[str]) -> str:
    if not any(word.rpartition(":")[2].isdigit() for word in dims):  # no dim is counted from the front
        words = [re.sub(r"(^|:)T\d+$", r"\1T", word) for word in words]
    return f"{_plain(name)}({','.join(words)})"


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        yield f"T{value.dim()}"
    elif value is None or isinstance(value, (bool, torch.dtype, torch.layout, torch.memory_format)):
        yield str(value).removeprefix("torch.")
    elif isinstance(value, int):
        yield _number(value)
    elif isinstance(value, float):
        yield f"f{int(value)}" if value.is_integer() else _FACTOR
    elif isinstance(value, str):
        yield _plain(value)
    elif isinstance(value, slice):
        yield from ("slice", *_words(value.start), *_words(value.stop), *_words(value.step))
    elif isinstance(value, (list, tuple)):
        words = [word for item in value for word in _words(item)]
        yield "["
        for before, word in zip(["", *words], words, strict=False):  # a run of tensors counts once
            if not (word == before and word.startswith("T")):
                yield word
        yield "]"
    elif isinstance(value, torch.device):
        yield "device"
    else:
        yield _plain(getattr(value, "__qualname__", type(value).__qualname__))


def _plain(text: str) -> str:
    """Return a text as one word; any other is hashed."""
    return text if re.fullmatch(r"[\w.]+", text) else "x" + hashlib.sha256(text.encode()).hexdigest()[:8]


def _number(value: int) -> str:
    origin = getattr(value, "origin", None)
    if origin is None:
        return str(int(value))
    names = list(_attributes(origin))
    return f"@{'|'.join(map(str, names))}:{int(value)}" if names and None not in names else _ANY


def _attributes(origin: tuple[Any, ...]) -> Iterator[str | None]:
    """Yield the names of the attributes that a number comes from; None for a size."""
    if origin[0] in ("attr", "config"):
        yield _plain(str(origin[2]))
    elif origin[0] in ("size", "numel"):
        yield None
    elif origin[0] != "const":
        for part in origin[1:]:
            yield from _attributes(part)


# Compare forms


class _Word(NamedTuple):
    """One argument of a form: its name if it has one, the attributes that it comes from, its value."""

    key: str
    attributes: tuple[str, ...]
    value: str

    @classmethod
    def read(cls, word: str) -> _Word:
        before, _, value = word.rpartition(":")
        key, _, attributes = before.partition("@")
        return cls(key.rstrip(":"), tuple(attributes.split("|")) if attributes else (), value)

    def covers(self, other: _Word) -> bool:
        """Return whether this word stands for every value that the other stands for."""
        if self.key != other.key:
            return False
        return self.value == other.value or (self.value == _ANY and other.is_number)

    @property
    def is_number(self) -> bool:
        return self.value in (_ANY, "None") or self.value.lstrip("-").isdigit()


def _taken_apart(form: str) -> tuple[str, tuple[_Word, ...]]:
    name, _, rest = form.partition("(")
    return name, tuple(map(_Word.read, rest[:-1].split(","))) if rest != ")" else ()


class Forms:
    """The forms in which one call was seen."""

    def __init__(self, forms: Iterable[str]) -> None:
        self.seen: dict[tuple[str, int], list[tuple[_Word, ...]]] = {}
        for form in forms:
            name, words = _taken_apart(form)
            self.seen.setdefault((name, len(words)), []).append(words)

    def has(self, form: str, edited: Collection[str]) -> bool:
        """Return whether the form was seen. `edited`: names of attributes that sharding has set."""
        name, words = _taken_apart(form)
        seen = self.seen.get((name, len(words)), ())
        many = [len({other[at].value for other in seen}) >= _MOST_VALUES for at in range(len(words))]
        return any(all(map(partial(_is_like, edited), words, other, many)) for other in seen)


def _is_like(edited: Collection[str], word: _Word, seen: _Word, many: bool) -> bool:
    if seen.covers(word) or (many and word.is_number and seen.is_number):
        return True
    if any(name in edited or name == _LEADING in word.attributes for name in seen.attributes):
        return True
    if "T" in (word.value, seen.value):  # recorded without the rank
        return word.value[:1] == seen.value[:1]
    return _FACTOR in (word.value, seen.value) and {word.value[:1], seen.value[:1]} <= {"f", _FACTOR}


def forms_in(ways: Iterable[str]) -> dict[int, Forms]:
    """Return the forms by place of the call."""
    forms_at: dict[int, list[str]] = {}
    for way in ways:
        place, equals, form = way.partition("=")
        if equals:
            forms_at.setdefault(int(place), []).append(form)
    return {place: Forms(forms) for place, forms in forms_at.items()}


def without_repeats(ways: Collection[str]) -> set[str]:
    """Remove forms that another form covers."""
    widest: list[tuple[str, str, tuple[_Word, ...]]] = []
    for way in sorted(ways, key=lambda way: ("@" not in way, way)):  # forms with attributes cover those without
        name = way.partition("(")[0]
        words = _taken_apart(way.partition("=")[2])[1] if "=" in way else ()
        if not any(_covers(other, (way, name, words)) for other in widest):
            widest = [other for other in widest if not _covers((way, name, words), other)]
            widest.append((way, name, words))
    return {way for way, *_ in widest}


def _covers(wide: tuple[str, str, tuple[_Word, ...]], narrow: tuple[str, str, tuple[_Word, ...]]) -> bool:
    same = "=" in wide[0] and wide[1] == narrow[1] and len(wide[2]) == len(narrow[2])
    return same and all(map(_Word.covers, wide[2], narrow[2]))


def unlike(ways: Collection[str], seen: Collection[str]) -> set[str]:
    """Return the ways that are not known. In a call with no known form any number may be a size, and becomes "*"."""
    new = set(ways) - set(seen)
    skeletons = {_skeleton(way) for way in seen if "=" in way} if new else set()
    return {way if "=" not in way or _skeleton(way) in skeletons else _skeleton(way) for way in new}


def _skeleton(way: str) -> str:
    """Return a form with "*" in place of each number, its attributes left out."""
    return re.sub(r"(?<=[(,:@])(?:@?[\w.|]+:(?=-?\d+[,)]))?-?\d+(?=[,)])", _ANY, way)

"""Read untrusted text as plain values, under limits of size, depth, values and digits.

A small file can name a billion values, nest until the stack overflows, or ask for an object to be constructed: whatever
is not plain, or beyond what ordinary files need, is refused with file and place.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

from autoplan.common.errors import AutoplanError

Notation = Literal["yaml", "json", "toml"]

BYTES: dict[Notation, int] = {"yaml": 1 << 20, "json": 4 << 20, "toml": 64 << 10}
MOST_DEPTH = 64
MOST_DIGITS = 40
MOST_COLLECTIONS = 100_000
MOST_VALUES = 100_000  # an alias counts as many as its target
_AHEAD = 4096  # characters before an error, more than a parser looks ahead on a line
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PLAIN = {f"tag:yaml.org,2002:{name}": name for name in ("str", "int", "float", "bool", "null")}
_SUFFIXES: dict[str, Notation] = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}

# tomllib's time and memory grow with the square of the parts of a dotted key.
_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-])(?:(?>{_KEY})\s*+\.\s*+){{32}}")


@dataclass(frozen=True)
class NotPlain:
    """The wording of a caller's errors: their beginning, their class, and their hint."""

    what: str = ""
    error: type[AutoplanError] = AutoplanError
    hint: str = "fix the file, or fetch it again"

    def refuse(self, problem: str, hint: str = "") -> NoReturn:
        raise self.error(problem, hint=hint or self.hint)

    def name(self, path: object) -> str:
        return f"{self.what} {path}".strip()


def is_file(text: str | PathLike[str]) -> bool:
    """Return whether there is a file of this name. A text that cannot be a name (too long, say) is none."""
    try:
        return Path(text).is_file()
    except OSError:
        return False


def is_folder(text: str | PathLike[str]) -> bool:
    """Return whether there is a folder of this name."""
    try:
        return Path(text).expanduser().is_dir()
    except (OSError, RuntimeError):  # "~nobody" has no home
        return False


def read_plain(
    path: str | PathLike[str],
    refusal: NotPlain = NotPlain(),  # noqa: B008 - frozen
    *,
    notation: Notation | None = None,
    repeated: bool = False,
) -> Any:
    """Return the values in a file, in the notation of its suffix (YAML if that tells none). `repeated`: a key may occur
    twice in a mapping, and the last one counts."""
    notation = notation or _SUFFIXES.get(Path(path).suffix.lower(), "yaml")
    text = read_text(path, refusal, BYTES[notation])
    return parse_plain(text, notation, refusal.name(path), refusal, repeated=repeated)


def read_text(path: str | PathLike[str], refusal: NotPlain, limit: int) -> str:
    """Return the text of a file of at most `limit` bytes."""
    name = refusal.name(path)
    try:
        if Path(path).exists() and not Path(path).is_file():
            refusal.refuse(f"cannot read {name}: not a file", "check the path")
        with open(path, "rb") as file:
            content = file.read(limit + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, AutoplanError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise refusal.error(f"cannot read {name}: {reason}", hint="check the path") from error
    if len(content) > limit:
        refusal.refuse(f"{name} is larger than the limit of {limit:,} bytes for such a file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = f"is this really a {refusal.what}?" if refusal.what else refusal.hint
        raise refusal.error(f"{name} is not text: byte {error.start} is not UTF-8", hint=hint) from error


def parse_plain(text: str, notation: Notation, name: str, refusal: NotPlain, *, repeated: bool = False) -> Any:
    """Return the values in a text; `name` is its name in errors."""
    try:
        value = _PARSERS[notation](text, repeated)
        _check_plain(value)
    except _Odd as error:
        refusal.refuse(f"{name}: {error}")
    except RecursionError as error:
        raise refusal.error(f"{name}: nested deeper than {MOST_DEPTH} levels", hint=refusal.hint) from error
    except (yaml.YAMLError, ValueError) as error:  # the parsers' own errors, with line and column
        reason = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        raise refusal.error(f"cannot parse {name} as {notation.upper()}: {reason[:500]}", hint=refusal.hint) from error
    return value


class _Odd(Exception):
    """A value that is not plain, and its place."""


def _parse_json(text: str, repeated: bool) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs) and not repeated:
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise json.JSONDecodeError(f"duplicate key {twice[:80]!r}", text, max(text.find(f'"{twice}"'), 0))
        return values

    if text.count("[") + text.count("{") > MOST_COLLECTIONS:
        raise _Odd(f"more than {MOST_COLLECTIONS:,} lists and mappings")
    return json.loads(text, object_pairs_hook=once, parse_int=_whole)


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise _Odd(f"a number of {len(digits):,} digits ({digits[:12]}…): at most {MOST_DIGITS} are read")
    return int(digits)


def _parse_toml(text: str, repeated: bool) -> Any:
    if _LONG_KEY.search(text):
        raise _Odd("a dotted key of more than 32 parts")
    if long := re.search(rf"\d{{{MOST_DIGITS + 1}}}", re.sub(r"\"[^\"\n]*\"|'[^'\n]*'", '""', text)):
        raise _Odd(f"a number of more than {MOST_DIGITS} digits ({long[0][:12]}…)")
    return tomllib.loads(text)


def _parse_yaml(text: str, repeated: bool) -> Any:
    try:
        return _YamlReader(repeated).read(text)
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        if place is None:
            raise
        # libyaml gives up on lines that are nested too deep; Python's parser counts how deep
        line = text[max(0, place.index - _AHEAD) : place.index].rpartition("\n")[2]
        try:
            _YamlReader().read(line, yaml.SafeLoader)
        except _TooDeep:
            where = f"line {place.line + 1}, column {place.column + 1}"
            raise _Odd(f"{where}: nested deeper than {MOST_DEPTH} levels") from error
        except (yaml.YAMLError, ValueError):
            pass
        raise


_PARSERS = {"yaml": _parse_yaml, "json": _parse_json, "toml": _parse_toml}


# YAML, built from the parser's events under limits: no tags, no expanded aliases, bounded depth


@dataclass
class _Open:
    """A collection that has begun and not ended. `key` waits for its value."""

    value: Any
    anchor: str | None
    size: int = 1
    key: str | None = None


class _TooDeep(yaml.MarkedYAMLError):
    """Collections are nested deeper than is read."""


@dataclass
class _YamlReader:
    """Reads one document. `repeated`: a key may occur twice in a mapping."""

    repeated: bool = False
    stack: list[_Open] = field(default_factory=list)
    named: dict[str, tuple[Any, int]] = field(default_factory=dict)
    values: int = 0
    result: Any = None

    def read(self, text: str, loader: Any = _LOADER) -> Any:
        documents = 0
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    _refuse(event, "a second document begins here; only one is allowed")
            elif isinstance(event, yaml.NodeEvent):
                self._node(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                done = self.stack.pop()
                self._place(done.value, done.size, done.anchor, event)
        return self.result

    def _node(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.named:
                inside = any(collection.anchor == event.anchor for collection in self.stack)
                _refuse(event, f"*{event.anchor} {'contains itself' if inside else 'is not defined before it'}")
            self._place(*self.named[event.anchor], None, event)
            return
        if event.tag is not None and event.tag != "!":
            _refuse(event, f"the tag {event.tag[:60]} is not allowed for plain data")
        if isinstance(event, yaml.ScalarEvent):
            self._place(self._scalar(event), 1, event.anchor, event)
            return
        if len(self.stack) >= MOST_DEPTH:
            raise _TooDeep(problem=f"nested deeper than {MOST_DEPTH} levels", problem_mark=event.start_mark)
        if self.stack and isinstance(self.stack[-1].value, dict) and self.stack[-1].key is None:
            _refuse(event, "a key of a mapping must be text, not a list or a mapping")
        self.stack.append(_Open({} if isinstance(event, yaml.MappingStartEvent) else [], event.anchor))

    def _place(self, value: Any, size: int, anchor: str | None, event: Any) -> None:
        """Put a value into the innermost open collection, or make it the result."""
        self.values += size
        if self.values > MOST_VALUES:
            _refuse(event, f"more than {MOST_VALUES:,} values, counting aliases by what they refer to")
        if anchor is not None:
            self.named[anchor] = (value, size)
        if not self.stack:
            self.result = value
            return
        top = self.stack[-1]
        top.size += size
        if isinstance(top.value, list):
            top.value.append(value)
        elif top.key is None:
            if not isinstance(value, str):
                read_as = f"{str(value)[:40]!r} is read as a {type(value).__name__}"
                _refuse(event, f"a key of a mapping must be text, but {read_as}: quote it")
            if value in top.value and not self.repeated:
                _refuse(event, f"duplicate key {value[:80]!r}")
            top.key = value
        else:
            top.value[top.key], top.key = value, None

    def _scalar(self, event: Any) -> Any:
        if event.style or not event.implicit[0]:  # quoted, or a block of text
            return event.value
        tag = _RESOLVER.resolve(yaml.ScalarNode, event.value, (True, False))
        kind = _PLAIN.get(tag)
        if kind == "str":
            return event.value
        if kind is None:
            tag_name = tag.rpartition(":")[2]
            _refuse(event, f"{event.value[:40]!r} is read as a {tag_name}, which is not plain data: quote it")
        if len(event.value) > MOST_DIGITS:
            _refuse(event, f"a number of {len(event.value):,} digits: at most {MOST_DIGITS} are read")
        return getattr(_CONSTRUCTOR, f"construct_yaml_{kind}")(yaml.ScalarNode(tag, event.value))


_RESOLVER = yaml.resolver.Resolver()
_CONSTRUCTOR = yaml.constructor.SafeConstructor()


def _refuse(event: Any, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


# Check that values are plain


def _check_plain(value: Any) -> None:
    """Raise on the first value that is not plain, is nested too deep, or is text that cannot be encoded."""
    waiting: list[tuple[Any, tuple[Any, ...], int]] = [({"": value}, (), -1)]
    seen: set[int] = set()  # an alias is checked once
    while waiting:
        collection, path, depth = waiting.pop()
        if depth >= MOST_DEPTH:
            raise _Odd(f"{_place(path)}: nested deeper than {MOST_DEPTH} levels")
        if id(collection) in seen:
            continue
        seen.add(id(collection))
        for key, item in collection.items() if isinstance(collection, dict) else enumerate(collection):
            if isinstance(key, str) and not key.isascii():
                _check_text(key, path)
            if isinstance(item, (dict, list)):
                waiting.append((item, (path, key), depth + 1))
            elif isinstance(item, str):
                _check_text(item, (path, key))
            elif item is not None and not isinstance(item, (bool, int, float)):
                raise _Odd(
                    f"{_place((path, key))}: a {type(item).__name__} ({str(item)[:40]}) is not plain data; "
                    "quote it if it is text"
                )


def _check_text(text: str, path: tuple[Any, ...]) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise _Odd(f"{_place(path)}: {text[:40]!r} contains an unpaired surrogate") from None


def _place(path: tuple[Any, ...]) -> str:
    """Return the keys that lead to a value: `entries[3].units`. Long paths are cut."""
    keys: list[str] = []
    while path:
        path, key = path
        keys.append("" if key == "" else f"[{key}]" if isinstance(key, int) else f".{str(key)[:60]}")
    shown = "".join(reversed(keys)).lstrip(".") or "the top"
    return shown if len(shown) <= 120 else f"{shown[:117]}..."


# A file is written completely or stays as it was: an interrupt or a full disk leaves no partial file.


def write_whole(path: Path, text: str, error: type[AutoplanError] = AutoplanError) -> None:
    """Write `text` beside its path and move it there; to a path that is no file (a pipe, /dev/null), directly."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        _replace(path.resolve(), text)
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"cannot write {path}: {reason}", hint="choose another path") from problem


def _replace(place: Path, text: str) -> None:
    """Replace a file, or the target of a link; the mode of an existing file stays."""
    mode = place.stat().st_mode & 0o777 if place.exists() else 0o666 & ~_umask()
    handle, name = tempfile.mkstemp(prefix=f".{place.name[:40]}.", dir=place.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, mode)
        os.replace(name, place)
    except BaseException:  # Ctrl-C included
        os.unlink(name)
        raise


def _umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before

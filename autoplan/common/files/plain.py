"""Read text that nobody vouches for as plain values, under limits of size, depth, values and digits.

A small file can name a billion values, nest until the stack ends, or ask for an object to be made: whatever is not
plain, or beyond what honest files need, is refused with file and place.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

from autoplan.common.errors import AutoplanError
from autoplan.common.files.yaml_values import YamlReader, stops_in_a_nest

Notation = Literal["yaml", "json", "toml"]

BYTES: dict[Notation, int] = {"yaml": 1 << 20, "json": 4 << 20, "toml": 64 << 10}
MOST_DEPTH = 64
MOST_DIGITS = 40
MOST_COLLECTIONS = 100_000
_SUFFIXES: dict[str, Notation] = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}

# tomllib takes time and memory that grow with the square of the parts of a dotted key.
_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-])(?:(?>{_KEY})\s*+\.\s*+){{32}}")


@dataclass(frozen=True)
class NotPlain:
    """How a caller's errors begin, of which class they are, and what they tell people to do."""

    what: str = ""
    error: type[AutoplanError] = AutoplanError
    hint: str = "fix the file, or fetch it again"

    def refuse(self, problem: str, hint: str = "") -> NoReturn:
        raise self.error(problem, hint=hint or self.hint)

    def name(self, path: object) -> str:
        return f"{self.what} {path}".strip()


def is_file(text: str | PathLike[str]) -> bool:
    """Is there a file of this name? What can be no name (too long, say) is none."""
    try:
        return Path(text).is_file()
    except OSError:
        return False


def is_folder(text: str | PathLike[str]) -> bool:
    """Is there a folder of this name?"""
    try:
        return Path(text).expanduser().is_dir()
    except (OSError, RuntimeError):  # "~nobody" has no home
        return False


def notation_of(path: str | PathLike[str]) -> Notation:
    """How a file of this name is written; YAML where the name does not say."""
    return _SUFFIXES.get(Path(path).suffix.lower(), "yaml")


def read_plain(
    path: str | PathLike[str],
    refusal: NotPlain = NotPlain(),  # noqa: B008 - frozen
    *,
    notation: Notation | None = None,
    limit: int | None = None,
    repeated: bool = False,
) -> Any:
    """The values in a file. `repeated`: a key may stand twice in a mapping, and the last one counts."""
    notation = notation or notation_of(path)
    text = read_text(path, refusal, limit or BYTES[notation])
    return parse_plain(text, notation, refusal.name(path), refusal, repeated=repeated)


def read_text(path: str | PathLike[str], refusal: NotPlain, limit: int) -> str:
    """What is in a file of at most `limit` bytes."""
    name = refusal.name(path)
    try:
        if Path(path).exists() and not Path(path).is_file():
            refusal.refuse(f"{name} cannot be read: it is no file", "check the path")
        with open(path, "rb") as file:
            content = file.read(limit + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, AutoplanError):
            raise
        said = getattr(error, "strerror", None) or error
        raise refusal.error(f"{name} cannot be read: {said}", hint="check the path") from error
    if len(content) > limit:
        refusal.refuse(f"{name} is larger than {limit:,} bytes, which is more than such a file needs")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = f"is this really a {refusal.what}?" if refusal.what else refusal.hint
        raise refusal.error(f"{name} is not text: byte {error.start} is not UTF-8", hint=hint) from error


def parse_plain(text: str, notation: Notation, name: str, refusal: NotPlain, *, repeated: bool = False) -> Any:
    """The values that a text holds; `name` is what errors call it."""
    try:
        value = _PARSERS[notation](text, repeated)
        _check_plain(value)
    except _Odd as error:
        refusal.refuse(f"{name}: {error}")
    except RecursionError as error:
        raise refusal.error(f"{name}: nested deeper than {MOST_DEPTH} levels", hint=refusal.hint) from error
    except (yaml.YAMLError, ValueError) as error:  # the parsers' own errors, with line and column
        said = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        raise refusal.error(
            f"{name} cannot be parsed as {notation.upper()}: {said[:500]}", hint=refusal.hint
        ) from error
    return value


class _Odd(Exception):
    """A value that is not plain, and where it stands."""


def _parse_json(text: str, repeated: bool) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs) and not repeated:
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise json.JSONDecodeError(f"key {twice[:80]!r} stands twice", text, max(text.find(f'"{twice}"'), 0))
        return found

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
        return YamlReader(MOST_DEPTH, MOST_DIGITS, repeated).read(text)
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        if not stops_in_a_nest(text, place, MOST_DEPTH, MOST_DIGITS):
            raise
        where = f"line {place.line + 1}, column {place.column + 1}: " if place is not None else ""
        raise _Odd(f"{where}nested deeper than {MOST_DEPTH} levels") from error


_PARSERS = {"yaml": _parse_yaml, "json": _parse_json, "toml": _parse_toml}


# ------------------------------------------------------------------------------------------------ what is plain


def _check_plain(value: Any) -> None:
    """Raise on the first value that is none of ours, is nested too deep, or is text that cannot be written again."""
    waiting: list[tuple[Any, tuple[Any, ...], int]] = [({"": value}, (), -1)]
    seen: set[int] = set()  # what an alias names again is looked at once
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
                    f"{_place((path, key))}: a {type(item).__name__} ({str(item)[:40]}) is no plain value; "
                    "put it in quotes if it is text"
                )


def _check_text(text: str, path: tuple[Any, ...]) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise _Odd(f"{_place(path)}: {text[:40]!r} holds half a character") from None


def _place(path: tuple[Any, ...]) -> str:
    """The keys that lead to a value: `entries[3].units`. Long ways are cut short."""
    keys: list[str] = []
    while path:
        path, key = path
        keys.append("" if key == "" else f"[{key}]" if isinstance(key, int) else f".{str(key)[:60]}")
    shown = "".join(reversed(keys)).lstrip(".") or "the top"
    return shown if len(shown) <= 120 else f"{shown[:117]}..."


# A file of ours is there whole, or as it was before: an interrupt or a full disk leaves no half of it.


def write_whole(path: Path, text: str, error: type[AutoplanError] = AutoplanError) -> None:
    """Write `text` beside its place and move it there. What is no file (a pipe, /dev/null) is written as it is."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        _replace(path.resolve(), text)
    except (OSError, ValueError) as problem:
        said = getattr(problem, "strerror", None) or problem
        raise error(f"{path} cannot be written: {said}", hint="choose another path") from problem


def _replace(place: Path, text: str) -> None:
    """Over a link, what it points to is replaced; the mode of a file that was there stays."""
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

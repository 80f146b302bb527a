"""What all fuzzers share: how a case is judged, how values and texts are spoilt, and the line that each fuzzer prints.

A case is hostile data handed to what reads it. It must end in one clear error (an AutoplanError) or be accepted, within
a second of computing and 500 MB. Everything else is counted apart and shown: a raw exception, a slow or large case, a
hang (stopped after a while), a wrong answer (the fuzzer says what is right).
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autoplan.common.errors import AutoplanError

__all__ = ["BAD", "Counts", "Wrong", "fuzz", "main", "spoil", "spoil_text"]

SECONDS, MEGABYTES, PATIENCE = 1.0, 500, 30.0
BAD = ("raw", "slow", "wrong", "hangs")


@dataclass
class Counts:
    """How many cases ended how. `clear`: one clear error; `exact`: accepted, and what came of it is right."""

    name: str
    cases: int = 0
    clear: int = 0
    exact: int = 0
    raw: int = 0
    slow: int = 0
    wrong: int = 0
    hangs: int = 0

    @property
    def ok(self) -> bool:
        return not any(getattr(self, kind) for kind in BAD)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


class Wrong(Exception):
    """Raised by a fuzzer's case: it was accepted, and what came of it is wrong."""


class Hang(BaseException):
    """A case took longer than PATIENCE."""


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fuzz(
    name: str,
    make: Callable[[random.Random], Any],
    attempt: Callable[[Any], Any],
    count: int,
    seed: int,
    *,
    accepted: float = SECONDS,
    refused: float = SECONDS,
) -> Counts:
    """Try `count` cases. `attempt` returns when it accepts; `accepted`, `refused`: seconds that these may take."""
    counts = Counts(name)
    for number in range(count):
        case = make(random.Random(f"{seed}:{number}"))
        before, began = _megabytes(), time.process_time()
        kind, told = _outcome(attempt, case)
        took, grown = time.process_time() - began, _megabytes() - before
        if kind in ("clear", "exact") and (took > (refused if kind == "clear" else accepted) or grown > MEGABYTES):
            kind, told = "slow", f"{took:.1f} s, {grown:.0f} MB: {told}"
        counts.cases += 1
        setattr(counts, kind, getattr(counts, kind) + 1)
        if kind in BAD:
            print(f"{name} {number}: {kind}: {told}\n    {_short(case)}", file=sys.stderr)
    return counts


def _outcome(attempt: Callable[[Any], Any], case: Any) -> tuple[str, str]:
    try:
        with _patience(PATIENCE):
            attempt(case)
    except AutoplanError as error:
        return ("clear", error.message) if error.message.strip() and len(str(error)) < 4000 else ("raw", "no message")
    except Hang:
        return "hangs", f"no end after {PATIENCE:g} s"
    except Wrong as error:
        return "wrong", str(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return "raw", f"{type(error).__name__}: {str(error)[:200]} (at {place.filename}:{place.lineno})"
    return "exact", ""


def _megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _short(case: Any) -> str:
    text = case if isinstance(case, str) else repr(case)
    return text if len(text) <= 600 else f"{text[:300]} … {text[-300:]}"


def main(run: Callable[[int, int], Counts], count: int = 500) -> None:
    """`python tests/fuzz/NAME.py --count N --seed S`: one line of counts; exit 1 if any case ended badly."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    counts = run(given.count, given.seed)
    print(counts)
    sys.exit(0 if counts.ok else 1)


# ------------------------------------------------------------------------------------------------ spoiling


def _deep(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


# What a value may turn into; functions, so that no case shares a list with another.
VALUES: tuple[Callable[[], Any], ...] = tuple(
    partial(copy.deepcopy, value)
    for value in (
        *(None, True, False, 0, 1, -1, -5, 2, 3, 7, 10**9, 10**18, -(10**9), 10**30, 0.5, -1.5, 1e308),
        *(float("inf"), float("nan"), "", "x", "llama", "*", "a.b.*", "[", "\x00", "\n", "ü" * 9, "x" * 5000, "\u2028"),
        *([], {}, [[]], [None], ["x"], [1, 2, 3], {"x": 1}, {"x": {"y": []}}, [0] * 1000, [{}], [-1, "x", None, {}]),
        *("2020-01-01", "1e9", "None", "null", "=", "<<", "8#2", "128!", "10**9", "../../etc/passwd", "*" * 50),
        *(_deep(20), _deep(80)),
    )
)


def spoil(tree: Any, chance: random.Random, times: int | None = None) -> Any:
    """A copy of plain values with one to three of them changed: replaced, removed, renamed, moved, doubled."""
    tree = copy.deepcopy(tree)
    for _ in range(times or chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return chance.choice(VALUES)()
        holder, key = chance.choice(places)
        _spoil_one(holder, key, chance, places)
    return tree


def _spoil_one(holder: Any, key: Any, chance: random.Random, places: list[tuple[Any, Any]]) -> None:
    kind = chance.randrange(10)
    if kind < 5:
        holder[key] = chance.choice(VALUES)()
    elif kind == 5:
        del holder[key]
    elif kind == 6 and isinstance(holder, dict):
        holder[chance.choice((f"{key}s", "", "x", key.upper(), "id", "_", "__class__"))] = holder.pop(key)
    elif kind == 7:
        other, where = chance.choice(places)
        try:
            holder[key] = copy.deepcopy(other[where])
        except (KeyError, IndexError):
            holder[key] = None
    elif kind == 8 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
        holder[key] = holder[key] * chance.choice((-1, 2, 3, 1000, 10**6)) + chance.choice((0, 1, -1))
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[key] = [holder[key]] if chance.random() < 0.5 else {"x": holder[key]}


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    waiting = [tree]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            yield holder, key
            waiting.append(holder[key])


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
PIECES = (
    *("[" * 10_000, "{" * 10_000, "- " * 5_000, '{"a":' * 10_000, "9" * 5_000, "a" + ".a" * 20_000 + " = 1\n"),
    *(BOMB, "&a [*a]", "x: &x {y: *x}", "!!python/object/apply:os.system [ls]", "!!set {1, 2}", "1: 2", "? [1]\n: 2\n"),
    *(
        "2020-01-01",
        "1979-05-27T07:32:00Z",
        "x = 1979-05-27\n",
        "\x00",
        "\x85",
        "\t",
        "\ufeff",
        "\\ud800",
        "%YAML 9\n---\n",
    ),
    *(
        "--- 1\n--- 2\n",
        "<<: {a: 1}\n",
        "yes: no\n",
        "[[x]]\n",
        '"""',
        "'",
        '"',
        "{",
        "}",
        "]",
        ":",
        ",",
        "#",
        "=",
        "-1",
    ),
    *("1e999", "0x" + "f" * 300, "NaN", "1:30:20", "x" * 100_000, "\n" * 1000, "*a", "&a ", "! ", "|\n", "\\", "null"),
)


def spoil_text(text: str, chance: random.Random) -> str:
    """A text with something put in, cut out, doubled or exchanged."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        start = chance.randrange(len(text) + 1)
        end = min(len(text), start + chance.choice((0, 1, 3, 20, 200)))
        kind = chance.randrange(6)
        if kind < 3:
            text = text[:start] + chance.choice(PIECES) + text[end:]
        elif kind == 3:
            text = text[:start] + text[end:]
        elif kind == 4:
            text = text[:end] + text[start:end] * chance.choice((1, 2, 50)) + text[end:]
        else:
            text = text[:start]
    return text


@contextmanager
def folder() -> Iterator[Path]:
    """Where cases are written."""
    with tempfile.TemporaryDirectory(prefix="autoplan-fuzz-") as name:
        yield Path(name)


def as_json(tree: Any) -> str:
    return json.dumps(tree, ensure_ascii=False, default=str)

"""Which lines of rules/inputs could go? Each is left out in turn; what the model then reads is compared.

    python tests/benchmarks/needless_rules.py [--only florence2]

A line is a field of the tiny clone, an argument of a call, a kind of prompt, or a part that is called alone. For each
type that a file is for, in each mapping that has it, the clone is built, fed and scored with the line and without. A
line is needless where as much is read and sharded without it, and as exactly. Exit code 1 if one is.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import transformers

from autoplan.capture.dry_run import tried
from autoplan.check.scoreboard.score import How, score
from autoplan.check.verify.clone import clone_of
from autoplan.common.files.rule_files import rules_folder
from autoplan.hf import type_rules
from autoplan.hf.source import resolve
from autoplan.hf.type_rules import MAPPINGS, architectures

Line = tuple[str, ...]
_HOW = How(2, checks=("parameters", "forward"))


def lines_of(rules: type_rules.TypeRules) -> Iterator[Line]:
    """Every line of a file: the table it stands in, and the keys down to it."""
    for key, value in rules.tiny.items():
        whole = not (isinstance(value, dict) and key.endswith("_config"))
        yield from [("tiny", key)] if whole else [("tiny", key, inner) for inner in value]
    for table in ("inputs", "prompts", "parts"):
        yield from ((table, key) for key in getattr(rules, table))


def without(rules: type_rules.TypeRules, line: Line) -> type_rules.TypeRules:
    table = dict(getattr(rules, line[0]))
    if len(line) == 2:
        del table[line[1]]
    else:
        table[line[1]] = {key: value for key, value in table[line[1]].items() if key != line[2]}
    return replace(rules, **{line[0]: table})


def classes_of(model_type: str) -> list[str]:
    found = (name for mapping in MAPPINGS for known, name in architectures(mapping) if known == model_type)
    return list(dict.fromkeys(found))


def reached(model_type: str, class_name: str) -> Any:
    """What is read, per feed; the error where nothing can be built or fed."""
    try:
        clone = clone_of(resolve(f"{model_type}:{class_name}"))
        return {name: frozenset(tried(clone.model, feed).used) for name, feed in clone.feeds.items()}
    except Exception as error:  # what a model raises without its rule is what is looked for
        return type(error).__name__


def is_enough(now: Any, before: Any) -> bool:
    """As much is read as before, in as many feeds."""
    if not isinstance(now, dict) or not isinstance(before, dict):
        return bool(now == before)
    return len(now) >= len(before) and frozenset().union(*before.values()) <= frozenset().union(*now.values())


@cache
def as_it_is(model_type: str, class_name: str) -> tuple[Any, str, float]:
    found = score(model_type, class_name, _HOW)
    return reached(model_type, class_name), found.verdict, found.share


def needless(types: list[str], files: dict[str, type_rules.TypeRules], line: Line) -> bool:
    pairs = [(model_type, name) for model_type in types for name in classes_of(model_type)]
    before = {pair: as_it_is(*pair) for pair in pairs}
    rules = files[types[0]]
    files.update(dict.fromkeys(types, without(rules, line)))
    try:
        for pair in pairs:
            reads, verdict, share = before[pair]
            if not is_enough(reached(*pair), reads):
                return False
        for pair in pairs:
            reads, verdict, share = before[pair]
            found = score(*pair, _HOW)
            if found.verdict != verdict or found.share < share - 0.001:
                return False
        return bool(pairs)
    finally:
        files.update(dict.fromkeys(types, rules))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="only the file that this type is in; repeatable")
    given = parser.parse_args()
    files = type_rules.rule_files(rules_folder())
    families: dict[int, list[str]] = {}
    for model_type, rules in files.items():
        families.setdefault(id(rules), []).append(model_type)
    count = tested = 0
    for types in families.values():
        if given.only and not set(given.only) & set(types):
            continue
        for line in list(lines_of(files[types[0]])):
            tested += 1
            if needless(types, files, line):
                count += 1
                print(f"needless: {'.'.join(line)} of {', '.join(types)}", flush=True)
    print(f"{tested} lines, {count} needless")
    return 1 if count else 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    sys.exit(main())

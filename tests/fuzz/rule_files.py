"""Spoilt rule files: `python tests/fuzz/rule_files.py --count N --seed S`.

Files of rules/roles, rules/plans, rules/inputs and rules/defaults.toml are spoilt as text and read; what is read is
used: examples of a rule are tried, choices of a plan are made, arguments that a file of inputs describes are drawn.
"""

from __future__ import annotations

import random
import tomllib
from pathlib import Path
from typing import Any

from fuzzing import Counts, folder, fuzz, main, spoil, spoil_text

from autoplan.common.files.rule_files import rules_folder

ROLES, PLANS, INPUTS = (sorted((rules_folder() / kind).glob("*.toml")) for kind in ("roles", "plans", "inputs"))
FILES = (*((path, kind) for kind, paths in (("roles", ROLES), ("plans", PLANS), ("inputs", INPUTS)) for path in paths),)
FILES += ((rules_folder() / "defaults.toml", ""),) * 5


def make(chance: random.Random) -> tuple[str, str, str]:
    """The kind of file, its name and its text."""
    path, kind = chance.choice(FILES)
    text = path.read_text("utf-8")
    if chance.random() < 0.6:
        text = _toml(spoil(tomllib.loads(text), chance))
    return kind, path.name, text if chance.random() < 0.5 else spoil_text(text, chance)


def _toml(tree: Any) -> str:
    """Values as TOML, odd ones too: what TOML cannot say is left for its reader to refuse."""
    if not isinstance(tree, dict):
        return f"x = {_value(tree)}\n"
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in tree.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, (int, float)) else _text(str(value))


def _text(text: str) -> str:
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\u{ord(c):04x}" for c in text) + '"'


def _key(key: Any) -> str:
    return _text(str(key))


def run(count: int, seed: int) -> Counts:
    import torch

    from autoplan.capture.draw import Draw
    from autoplan.decide.rulebook.read import _load
    from autoplan.decide.rulebook.rule_tests import test_rules
    from autoplan.decide.written_plans.read import _of_folder
    from autoplan.hf.type_rules import rule_files

    draw = Draw(0, torch.float32)
    known = {"batch": 2, "length": 4, "config": None, "model": None}

    def use(kind: str, base: Path) -> None:
        if kind == "roles":
            test_rules(rules=_load.__wrapped__((base,)))
        elif kind == "plans":
            for plan in _of_folder.__wrapped__(base):
                plan.choices()
        elif kind == "inputs":
            for rules in rule_files.__wrapped__(base).values():
                for argument in rules.inputs.values():
                    if not argument.get("drop"):
                        draw.described(argument, known)
        else:
            from autoplan.hf.type_rules import _defaults

            _defaults.__wrapped__(base)

    with folder() as place:

        def attempt(case: tuple[str, str, str]) -> None:
            kind, name, text = case
            base = place / kind
            base.mkdir(exist_ok=True)
            file = base / name
            file.write_bytes(text.encode("utf-8", "surrogatepass"))
            try:
                use(kind, base if kind == "plans" else place)
            finally:
                file.unlink()

        return fuzz("rule files", make, attempt, count, seed)


if __name__ == "__main__":
    main(run)

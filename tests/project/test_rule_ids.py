"""Python knows no rule by its id: what a rule is to others stands in its document, so that a rule can be renamed.

Renaming is tried on the rules that exports ask something of: every export stays what it was.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import autoplan
from autoplan.common.rules_folder import rules_folder
from autoplan.decide.rulebook import read
from autoplan.decide.rulebook.read import EXPORTS, GENERIC, load_rules
from autoplan.hf.source import resolve

torch.set_num_threads(1)
PACKAGE = Path(autoplan.__file__).parent
IDS = frozenset(rule.id for rule in load_rules()) - {GENERIC}  # the reader's own word for what no rule names
# These rooms see entries and their rules. Elsewhere "attention" is a kind of call, which is no rule.
SEE_RULES = ("decide", "emit", "check/audit", "cli")


def ids_in(text: str, may_speak: bool) -> Iterator[str]:
    """Rule ids among the string constants of a file. A room that sees no rules may use ids that are plain words."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in IDS and (not may_speak or "-" in node.value):
                yield f"{node.lineno}: {node.value!r}"
            else:
                words = re.findall(r"(?<![\w-])[\w]+(?:-[\w]+)+(?![\w-])", node.value)
                yield from (f"{node.lineno}: {word!r} in a text" for word in words if word in IDS)


def test_no_python_file_names_a_rule() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        found += [f"{place}:{line}" for line in ids_in(path.read_text("utf-8"), not place.startswith(SEE_RULES))]
    assert found == []


@pytest.mark.parametrize(
    ("text", "may_speak", "count"),
    [
        ('_ENDS = ("lm-head", "tied-head")', False, 2),
        ('_ENDS = ("lm-head", "tied-head")', True, 2),
        ('hint = "the rule head-norm goes on"', False, 1),
        ('if entry.rule == "attention":\n    pass', False, 1),
        ('if call.reduce == "attention":\n    pass', True, 0),
        ('hint = "a lm-head-like thing"', False, 0),
    ],
)
def test_the_scan_can_fail(text: str, may_speak: bool, count: int) -> None:
    assert len(list(ids_in(text, may_speak))) == count


# What a rule is to other systems, and models that show all of it.
MODELS = ("llama", "gemma2", "qwen3", "phi3", "mixtral", "deepseek_v3")


def exports_of(model_type: str) -> dict[str, str]:
    clone = resolve(model_type).tiny(dtype=torch.float64, experts="batched_mm")
    plan = autoplan.plan(clone, 2, source="inferred", prove="none")
    targets = ("hf", "vllm", "deepspeed")
    return {target: plan.export(target, clone, drop=True) for target in targets} | {
        "roles": " ".join(sorted({read.exported_as(entry.rule) for entry in plan.entries}))
    }


@pytest.fixture
def renamed_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A copy of the rules in which every one that says what it is to others has another id."""
    shutil.copytree(rules_folder() / "roles", tmp_path / "roles")
    told = {rule.id for rule in load_rules() if rule.exported_as or rule.holds_experts}
    for path in (tmp_path / "roles").glob("*.toml"):
        text = path.read_text("utf-8")
        for name in told:
            text = text.replace(f'"{name}"', f'"x-{name}"')
        path.write_text(text, "utf-8")
        if path.stem in told:
            path.rename(path.with_stem(f"x-{path.stem}"))
    monkeypatch.setattr(read, "rules_folders", lambda: (tmp_path,))
    yield
    monkeypatch.undo()


def test_renaming_rules_changes_no_export(request: pytest.FixtureRequest) -> None:
    before = {model: exports_of(model) for model in MODELS}
    request.getfixturevalue("renamed_rules")
    assert not IDS & {rule.id for rule in load_rules() if rule.exported_as}
    assert {model: exports_of(model) for model in MODELS} == before
    shown = {word for found in before.values() for word in found["roles"].split(" ")}
    assert shown >= {word for words in EXPORTS for word in words.split(" ")}

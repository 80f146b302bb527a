"""A stranger's change: a rule is added as one document, and plans cite it. No Python file knows of it.

docs/howto/add-a-rule.md takes the same steps.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import autoplan
from autoplan.common.files.rule_files import rules_folder
from autoplan.decide.rulebook import read
from autoplan.decide.rulebook.read import load_rules
from autoplan.decide.rulebook.rule_tests import test_rules as run_rule_tests

DOCUMENT = '''
id      = "bilinear-mlp"
summary = "Two projections multiplied feature by feature, without an activation, and summed by a third"
why     = "Every product needs one feature of each: both are cut alike, and the third contracts over them."
limits  = "With an activation on one of the two it is gated-mlp."
unseen  = "It is here to show how a rule is added."
unit    = "feature"
beats   = ["plain-mlp"]

[match]
flow = """
x       -> left:linear  -> product:mul
x       -> right:linear -> product
product -> down:linear
"""
where = ["split(left.out)", "shares(left.out, right.out)", "shares(left.out, down.in)"]

[roles]
left  = "left factor"
right = "right factor"

[yields]
left  = "colwise"
right = "colwise"
down  = "rowwise"

[[example]]
name   = "two factors"
graph  = """
n:norm[64] -> a:linear[64, 96!] -> m:mul -> c:linear[96!, 64]
n -> b:linear[64, 96!] -> m
"""
expect = { a = "colwise", b = "colwise", c = "rowwise" }

[[example]]
name    = "whole factors"
graph   = """
n:norm[64] -> a:linear[64, 96] -> m:mul -> c:linear[96, 64]
n -> b:linear[64, 96] -> m
"""
expect  = {}
because = "left.out = 96 is not split"
'''


class Bilinear(nn.Module):
    """An MLP that multiplies two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b, self.c = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.c(self.a(y) * self.b(y))


def rules_of_entries() -> dict[str, tuple[str, str]]:
    plan = autoplan.plan(Bilinear(), 2, inputs={"x": torch.randn(2, 5, 64)}, prove="none")
    return {entry.pattern: (entry.rule, entry.role) for entry in plan.entries}


@pytest.fixture
def my_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A rules folder of one's own."""
    shutil.copytree(rules_folder() / "roles", tmp_path / "roles")
    monkeypatch.setattr(read, "rules_folders", lambda: (tmp_path,))
    read._load.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    read._load.cache_clear()


def test_one_document_is_all_it_takes(my_rules: Path) -> None:
    assert "bilinear-mlp" not in {rule for rule, _ in rules_of_entries().values()}
    (my_rules / "roles" / "bilinear-mlp.toml").write_text(DOCUMENT, "utf-8")
    read._load.cache_clear()
    assert rules_of_entries() == {
        "norm": ("generic", "generic"),  # its gradients are summed: nobody asks for those of x
        "a": ("bilinear-mlp", "left factor"),
        "b": ("bilinear-mlp", "right factor"),
        "c": ("bilinear-mlp", "down"),
    }


def test_its_examples_are_held_to(my_rules: Path) -> None:
    (my_rules / "roles" / "bilinear-mlp.toml").write_text(DOCUMENT, "utf-8")
    read._load.cache_clear()
    rule = next(rule for rule in load_rules() if rule.id == "bilinear-mlp")
    assert [result.text for result in run_rule_tests(rules=[rule]) if not result.ok] == []

"""A framework's own rules and plans count before ours: in a folder, or registered at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor, nn

import autoplan
from autoplan.common.errors import AutoplanError
from autoplan.common.files.rule_files import VARIABLE, rules_folder
from autoplan.decide.rulebook.read import load_rules
from autoplan.decide.written_plans.choices import WrittenPlanError
from autoplan.decide.written_plans.read import load_plans
from autoplan.values import Plan

PLAN = """
id = "mine"
qualname = "{qualname}"
why = "its own reasons"
gains = "nothing"
sequence_parallel = "nobody wrote one"
[entries]
"up" = "replicate"
"down" = "replicate"
"""


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).relu())
        return x + self.second(self.first(x).relu())


QUALNAME = f"{Small.__module__}.{Small.__qualname__}"


def small_plan(**how: object) -> Plan:
    import torch

    return autoplan.plan(Small(), 2, inputs={"x": torch.randn(2, 16)}, prove="none", **how)  # type: ignore[arg-type]


def split(plan: Plan) -> set[str]:
    return {entry.pattern for entry in plan.entries}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "mine.toml").write_text(PLAN.format(qualname=QUALNAME))
    return tmp_path


@pytest.fixture
def registered() -> Iterator[Callable[..., None]]:
    gone = []
    yield lambda *args, **how: gone.append(autoplan.register_plan(*args, **how))
    for take_away in gone:
        take_away()


def test_a_plan_of_a_folder_of_ones_own_is_found(folder: Path) -> None:
    assert split(small_plan()) == {"up", "down", "first", "second"}
    made = small_plan(rules=folder)
    assert split(made) == {"first", "second"} and made.source == "handwritten"
    assert split(small_plan()) == {"up", "down", "first", "second"}  # for that call only


def test_the_environment_names_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(folder))
    assert split(small_plan()) == {"first", "second"}


def test_ones_own_plan_counts_before_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = next(plan for plan in load_plans() if plan.id == "qwen2-sequence-classification")
    (folder / "plans" / "mine.toml").write_text(PLAN.format(qualname=ours.qualnames[0]))
    monkeypatch.setenv(VARIABLE, str(folder))
    from autoplan.decide.written_plans.read import find_plan

    found = find_plan([tuple(ours.qualnames[0].rsplit(".", 1))])  # type: ignore[list-item]
    assert found is not None and found[0].id == "mine"


def test_a_rule_of_ones_own_takes_the_place_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "roles").mkdir()
    text = (rules_folder() / "roles" / "plain-mlp.toml").read_text("utf-8")
    text = text.replace("[yields]\n", '[roles]\ndown = "way back"\n\n[yields]\n', 1)
    (tmp_path / "roles" / "plain-mlp.toml").write_text(text)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert "way back" in {entry.role for entry in small_plan().entries}
    assert [rule.id for rule in load_rules()].count("plain-mlp") == 1


def test_a_plan_registered_at_run_time_counts_first(registered: Callable[..., None], folder: Path) -> None:
    registered(Small, {"first": "replicate", "second": "replicate"})
    assert split(small_plan(rules=folder)) == {"up", "down"}
    registered(QUALNAME, {"up": "replicate", "down": "replicate"})  # instead of the first
    assert split(small_plan()) == {"first", "second"}


def test_a_registered_plan_is_taken_away_again() -> None:
    autoplan.register_plan(Small, {"first": "replicate", "second": "replicate"})()
    assert split(small_plan()) == {"up", "down", "first", "second"}


@pytest.mark.parametrize(
    ("name", "entries"), [("Small", {"a": "colwise"}), ("a.B", {}), ("a.B", {"a": 3}), ("a.B", {"a": "sideways"})]
)
def test_a_registered_plan_that_means_nothing_is_refused(name: str, entries: dict[str, str]) -> None:
    before = load_plans()
    with pytest.raises(WrittenPlanError):
        autoplan.register_plan(name, entries)
    assert load_plans() == before


def test_a_folder_without_rules_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AutoplanError, match="not a folder of rules"):
        small_plan(rules=tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(AutoplanError, match=VARIABLE):
        small_plan()

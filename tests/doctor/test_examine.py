"""`autoplan doctor`: what moved is named, with what does not work therefore; and only that is switched off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from autoplan.cli.app import app
from autoplan.doctor import examine as doctor
from autoplan.doctor.private import Private
from autoplan.patches import patched
from autoplan.patches.patched import Patch, Place, apart, hold
from autoplan.patches.sharding_rules import heard_by_classes

PATCH = Patch("a toy", "toys.play", "it is played with", "for a while", "put back", lambda: False)


@pytest.fixture
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tables: one with entries that moved, one that cannot even be imported."""
    held = (
        PATCH,
        replace(PATCH, name="a lesser toy", without="no play"),
        Private("torch._gone", "it counts", lambda: [].x),
    )  # type: ignore[attr-defined]
    monkeypatch.setattr(doctor, "TABLES", (("toys", "TOYS"), ("autoplan.nowhere", "NONE")))
    real = doctor.import_module
    monkeypatch.setattr(
        doctor, "import_module", lambda name: SimpleNamespace(TOYS=held) if name == "toys" else real(name)
    )


@pytest.mark.usefixtures("_toys")
def test_what_moved_is_named_with_what_follows() -> None:
    moved = {entry.name: entry for entry in doctor.examine().moved}
    assert moved["a toy"].consequence == "does not work: it is played with"
    assert moved["a lesser toy"].consequence == "disabled: no play"
    assert "AttributeError" in moved["torch._gone"].what
    assert "autoplan.nowhere" in moved


def test_a_module_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        return [].gone if name.endswith(("code.ways", "planning")) else None  # type: ignore[attr-defined]

    monkeypatch.setattr(doctor, "import_module", broken)
    named = [entry.name for entry in doctor._not_importable()]
    assert named == ["autoplan.common.code.ways"], "one line for one cause"


@pytest.mark.usefixtures("_toys")
def test_the_command_exits_with_1_where_something_moved() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    said = json.loads(done.stdout)
    assert done.exit_code == 1 and not said["ok"] and len(said["moved"]) == 4
    text = CliRunner().invoke(app, ["doctor"]).stdout
    assert "4 moved" in text and "torch._gone" in text and "disabled: no play" in text


def test_nothing_moved_in_the_locked_versions() -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0 and "none moved" in done.stdout, done.stdout


@pytest.fixture
def _newer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(patched, "untested", lambda: ("torch 9.9 is newer",))
    monkeypatch.setattr(patched, "_asked", {})
    yield


class Target:
    play = "theirs"


@pytest.mark.usefixtures("_newer")
def test_only_what_moved_is_left_out() -> None:
    gone = replace(PATCH, without="no play")
    with pytest.warns(UserWarning, match=r"a toy: disabled.*toys\.play: no play; see `autoplan doctor`"):
        held = hold(gone, [Place(Target, "play", lambda _: "ours")])
    assert Target.play == "theirs"
    hold(gone, [Place(Target, "play", lambda _: "ours")]).release()  # it is said once
    held.release()


@pytest.mark.usefixtures("_newer")
def test_what_right_numbers_need_is_not_left_out() -> None:
    held = hold(PATCH, [Place(Target, "play", lambda _: "ours")])
    assert Target.play == "ours"
    held.release()
    assert Target.play == "theirs"


@pytest.mark.usefixtures("_newer")
def test_a_patch_whose_canary_holds_is_used_under_newer_versions() -> None:
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    before = UserDefinedClassVariable._call_cross_entropy_loss
    with apart():  # a sharded model of another test may hold the patch itself
        held = heard_by_classes()
    assert UserDefinedClassVariable._call_cross_entropy_loss is not before
    held.release()

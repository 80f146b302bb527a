"""Whichever instant a process is killed at while it saves over a checkpoint: the old one loads, or the new one.

A copy of the process dies before each file operation that Python announces to audit hooks, at each fsync, and before,
in the middle of and after each file of tensors.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from mesh_toys import deep
from safetensors.torch import load_file
from torch import nn

import autoplan
from autoplan.common.errors import AutoplanError
from autoplan.execute.weights.files import CheckpointFiles
from autoplan.hf.source import resolve

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
SIZES = {"one": 10**9, "few": 3000, "many": 1700}
CHANGES = [
    ("one", "one"), ("one", "few"), ("many", "one"), ("few", "few"),
    *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in [("few", "many"), ("many", "few"), ("many", "many")]),
]  # fmt: skip


class Deaths:
    """Counts the moments at which a process could die, and dies at one of them."""

    at = -1
    seen = 0
    folder = ""

    def moment(self) -> None:
        if self.folder:
            self.seen += 1
            if self.seen == self.at:
                os._exit(9)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder and event in EVENTS and str(args[0]).startswith(self.folder):
            self.moment()


deaths = Deaths()


def dying_save_file(tensors: Any, path: Any, **options: Any) -> None:
    plain_save_file(tensors, path, **options)
    if deaths.seen + 1 == deaths.at:
        os.truncate(path, Path(path).stat().st_size // 2)
    deaths.moment()
    deaths.moment()


plain_save_file, plain_fsync = safetensors.torch.save_file, os.fsync


def dying_fsync(handle: int) -> None:
    deaths.moment()
    plain_fsync(handle)


def model_of(number: int) -> nn.Module:
    model = deep(depth=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(number)
    return model


def contents(folder: Path) -> dict[str, torch.Tensor]:
    files = CheckpointFiles(folder)
    return {key: files.read(key) for key in files.keys}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def killed_everywhere(save: Callable[[Path], None], start: Path, work: Path, look: Callable[[Path], None]) -> int:
    """Kill `save` at each moment in turn; `look` at what is left each time. Returns how many moments there are."""
    for at in range(1, 1000):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(start, work)
        child = os.fork()
        if not child:
            try:
                deaths.at, deaths.seen, deaths.folder = at, 0, str(work)
                sys.addaudithook(deaths.audit)
                save(work)
            finally:
                os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        look(work)
        if status == 0:
            return at - 1
        assert status == 9
    raise AssertionError("it never ends")


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors.torch, "save_file", dying_save_file)
    monkeypatch.setattr(os, "fsync", dying_fsync)


@pytest.mark.parametrize(("before", "after"), CHANGES)
@pytest.mark.usefixtures("mortal")
def test_the_old_or_the_new_one_loads(before: str, after: str, tmp_path: Path) -> None:
    old, new = model_of(1), model_of(2)
    start, goal, work = tmp_path / "start", tmp_path / "goal", tmp_path / "work"
    autoplan.save_weights(old, start, max_shard_size=SIZES[before])
    autoplan.save_weights(new, goal, max_shard_size=SIZES[after])
    one, other = contents(start), contents(goal)
    assert not same(one, other)
    left: list[str] = []

    def look(folder: Path) -> None:
        found = contents(folder)
        left.append("old" if same(found, one) else "new" if same(found, other) else "neither")

    moments = killed_everywhere(
        lambda folder: autoplan.save_weights(new, folder, max_shard_size=SIZES[after]), start, work, look
    )
    assert moments > 5, moments
    assert "neither" not in left
    assert left == sorted(left, key=("old", "new").index) and left[-1] == "new"  # one switch, and no way back
    assert not list(work.glob(".*")) and len(list(work.iterdir())) == len(list(goal.iterdir()))


@pytest.mark.long
@pytest.mark.usefixtures("mortal")
@pytest.mark.parametrize(("before", "after"), [("one", "few"), ("few", "one"), ("many", "few")])
def test_what_a_killed_run_left_is_removed_by_the_next(before: str, after: str, tmp_path: Path) -> None:
    old, new = model_of(1), model_of(2)
    start, work = tmp_path / "start", tmp_path / "work"
    autoplan.save_weights(old, start, max_shard_size=SIZES[before])

    def look(folder: Path) -> None:
        autoplan.save_weights(new, folder, max_shard_size=SIZES[before])
        assert same(contents(folder), dict(new.state_dict()))
        assert len(list(folder.iterdir())) == len(list(start.iterdir()))

    killed_everywhere(lambda folder: autoplan.save_weights(new, folder, max_shard_size=SIZES[after]), start, work, look)


@pytest.mark.slow
@pytest.mark.usefixtures("mortal")
@pytest.mark.parametrize(("before", "after"), [("10GB", "60KB"), ("60KB", "10GB"), ("60KB", "90KB")])
def test_transformers_reads_the_same_one(before: str, after: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model: Any = resolve("llama").tiny(dtype=torch.float32)
    start, work = tmp_path / "start", tmp_path / "work"
    model.save_pretrained(start)
    autoplan.save_weights(model, start, max_shard_size=before)
    old = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    new = model.state_dict()

    def look(folder: Path) -> None:
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        assert same(found, old) or same(found, new)

    killed_everywhere(lambda folder: autoplan.save_weights(model, folder, max_shard_size=after), start, work, look)


def test_a_full_disk_is_one_clear_error_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """A real limit: this process may write files of so many bytes."""
    old, new = model_of(1), model_of(2)
    autoplan.save_weights(old, tmp_path, max_shard_size=1700)
    before, names = contents(tmp_path), {path.name for path in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    child = os.fork()
    if not child:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
            autoplan.save_weights(new, tmp_path)
        except AutoplanError as error:
            code = 0 if "could not be written" in str(error) and "disk full" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert {path.name for path in tmp_path.iterdir()} == names and same(contents(tmp_path), before)


def test_model_safetensors_counts_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    autoplan.save_weights(model_of(1), tmp_path, max_shard_size=1700)
    safetensors.torch.save_file(dict(model_of(2).state_dict()), tmp_path / "model.safetensors")
    assert same(contents(tmp_path), load_file(tmp_path / "model.safetensors"))
    assert (tmp_path / "model.safetensors.index.json").is_file()

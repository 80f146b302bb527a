"""Fake tensors may be made in threads that end: Python does not die of it, whichever build of torch runs where."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autoplan.capture import dry_run

PACKAGE = Path(dry_run.__file__).resolve().parents[1]

# The first fake mode of the process, and the first question of DTensor, in threads that have ended when the next begin.
ENDING_THREADS = """
import threading
import torch
from autoplan.check.ranks.run import run_ranks
from autoplan.capture.dry_run import fake_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

def plan():
    with fake_mode():
        torch.ones(2).detach()

def body(rank):
    mesh = init_device_mesh("cpu", (2,))
    whole = distribute_tensor(torch.ones(rows, 2), mesh, [Replicate()], src_data_rank=None)
    return (whole @ whole.t()).detach().to_local().shape[0]

for rows in range(2, 12):
    thread = threading.Thread(target=FIRST)
    thread.start()
    thread.join()
    assert run_ranks(body, 2) == [rows, rows]
print("alive")
"""


@pytest.mark.parametrize("first", ["plan", "lambda: run_ranks(body, 2)"], ids=["planning", "ranks"])
def test_python_outlives_threads_with_fake_tensors(first: str) -> None:
    code = ENDING_THREADS.replace("FIRST", first)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr[-2000:]


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.Thread]]:
    """Which threads enter a mode; nothing is registered yet, and the build is one for CUDA."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(dry_run, "_enter", lambda: threads.append(threading.current_thread()))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    dry_run.enter_first_in_a_lasting_thread.cache_clear()
    yield threads
    dry_run.enter_first_in_a_lasting_thread.cache_clear()


def test_the_first_mode_is_entered_in_a_thread_that_lasts(entered: list[threading.Thread]) -> None:
    short = threading.Thread(target=dry_run.enter_first_in_a_lasting_thread)
    short.start()
    short.join()
    dry_run.enter_first_in_a_lasting_thread()  # known already
    (lasting,) = entered
    assert lasting is not short and lasting.is_alive() and lasting.daemon


def test_the_main_thread_lasts(entered: list[threading.Thread]) -> None:
    dry_run.enter_first_in_a_lasting_thread()
    assert entered == [threading.main_thread()]


@pytest.mark.parametrize(("built", "available"), [(False, False), (True, True)])
def test_other_builds_are_left_alone(
    built: bool, available: bool, entered: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    dry_run.enter_first_in_a_lasting_thread()
    assert entered == []


def test_all_modes_are_made_here() -> None:
    makers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "doctor" not in path.parts  # they try torch's own
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "FakeTensorMode"
    }
    assert makers - {"capture/dry_run.py"} == set()

"""How a command ends: a full disk, a closed pipe, Ctrl-C, a killed rank, a module that only the parent can import."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from slow_cases import marked

from autoplan.check.ranks.common import RankLost, RankNotStarted
from autoplan.check.ranks.run import run_processes
from autoplan.cli.app import app, main
from autoplan.cli.estimate import on_mesh
from autoplan.common.stages import stage, watched

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

PLAN = {"up": "colwise", "down": "rowwise"}
def build():
    torch.manual_seed(0)
    return Mine(), {"x": torch.randn(2, 8)}
"""


def command(*arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 200, "env": environment, **how}
    code = (
        "import sys; sys.path.remove(''); from autoplan.cli.app import main; main(sys.argv[1:])"  # as the script does
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], text=True, **how)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NOT TRIED: there is no /dev/full here")
@pytest.mark.parametrize("arguments", [("rules", "list"), ("--help",), ("--version",), ("rules", "list", "--json")])
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = command(*arguments, stdout=full)
    assert done.returncode == 2
    assert "No space left" in done.stderr and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("arguments", [("rules", "list", "--json"), ("--help",)])
def test_a_reader_that_has_enough_hears_nothing(arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = command(*arguments, stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_said_and_leaves_no_file(ending: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import os, time, autoplan.cli.app as cli\n"
        "from autoplan.common.files import plain\n"
        "def slow(*_):\n    print('writing', flush=True); time.sleep(60)\n"
        "os.replace = slow\n"
        "cli.main(['rules', 'list', '-o', 'out.txt'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment, **pipes)
    assert running.stdout is not None and running.stdout.readline() == "writing\n"
    running.send_signal(ending)
    _, said = running.communicate(timeout=30)
    assert (running.returncode, said) == (2, "interrupted\n")
    assert list(tmp_path.iterdir()) == []


def _die(rank: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return rank


@pytest.mark.gloo
def test_a_rank_that_is_killed_is_no_verdict() -> None:
    with pytest.raises(RankLost, match="rank 1 of 2 was killed by SIGKILL.*before it returned a result"):
        run_processes(_die, (), 2, timeout=60)


@pytest.mark.gloo
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"  # more is sent than a pipe holds
    script.write_text(
        "from autoplan.check.ranks.run import run_processes\nrun_processes(print, (b'x' * 200_000,), 2, timeout=60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-2:]
    assert last[0].endswith("RankLost: rank 0 of 2 ended before it returned a result"), done.stderr
    assert "if __name__ == '__main__':" in last[1]


@pytest.mark.long
@pytest.mark.gloo
def test_verify_imports_in_its_ranks_what_the_command_imported(tmp_path: Path) -> None:
    (tmp_path / "mymodel.py").write_text(MODEL)
    done = command("verify", "mymodel:build", "--engine", "gloo", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True


@pytest.mark.gloo
def test_a_module_that_a_rank_cannot_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    def thing(rank: int) -> None:
        raise AssertionError("it was found")

    module: Any = types.ModuleType("only_here")
    thing.__module__, thing.__qualname__, module.thing = "only_here", "thing", thing
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(RankNotStarted, match="cannot import 'only_here'"):
        run_processes(thing, (), 2, timeout=60)


def test_a_plan_is_found_where_a_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoplan.decide.written_plans.dialects import plan_at

    (tmp_path / "mine_here.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    before = list(sys.path)
    assert plan_at("mine_here:PLAN", None) == {"up": "colwise", "down": "rowwise"}
    assert sys.path == before
    monkeypatch.setattr(sys.modules["__main__"], "PLAN", {"up": "colwise"}, raising=False)
    assert plan_at("__main__:PLAN", None) == {"up": "colwise"}


def test_stages_are_told_to_who_watches() -> None:
    told: list[str] = []
    stage("nobody hears this")
    with watched(told.append):
        stage("recording")
    stage("nor this")
    assert told == ["recording"]


ODD = ("", " ", "-5", "1e9", "x", "٣", "9" * 5000, "\udce4", "a=b", "[]", "--")


def _options() -> list[tuple[list[str], str]]:
    """Every option of every command that takes a value, and a command line up to it."""
    import typer

    found = []

    def collect(command: Any, path: list[str]) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            collect(inner, [*path, name])
        for parameter in command.params:
            takes = getattr(parameter, "opts", []) and not getattr(parameter, "is_flag", False)
            if takes and parameter.param_type_name == "option" and path:
                found.append((path, parameter.opts[0]))

    collect(typer.main.get_command(app), [])
    return found


NUMBERS = {"--tp", "--ep", "--jobs", "--tokens", "--timeout", "--seq"}
CHOICES = {"--prove", "--engine", "--to", "--fail-on", "--checks", "--checkpointing"}


@pytest.mark.parametrize("value", marked(ODD, slow=[" ", "x", "٣", "a=b", "[]"]))
def test_wrong_values_of_options_exit_2_with_one_message(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers and choices are refused by every command, whatever else it lacks."""
    tried = 0
    for path, option in _options():
        if option not in NUMBERS | CHOICES or value in ("-5", "1e9") and option == "--timeout":
            continue
        model = ["llama"] if path[0] not in ("rules", "scoreboard") else ["causal_lm"]
        with pytest.raises(SystemExit) as ended:
            main([*path, *model, option, value])
        said = capsys.readouterr().err
        assert ended.value.code == 2, (path, option, value)
        assert "Traceback" not in said and said.count("rror:") == 1, said
        tried += 1
    assert tried > 10


@pytest.mark.parametrize("size", ["nan", "-1", "0", "inf"])
def test_a_timeout_is_a_number_of_seconds(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["scoreboard", "causal_lm", "--only", "llama", "--timeout", size])
    assert ended.value.code == 2 and "timeout" in capsys.readouterr().err


def test_where_no_mesh_is_given_one_rank_is_meant() -> None:
    asked = [on_mesh(None, 1), on_mesh(None, 1, 4), on_mesh(None, 8), on_mesh(None, 2, 4)]
    assert asked == ["tp=1", "tp=4", "dp_shard=1,cp=8", "dp_shard=1,cp=2,tp=4"]

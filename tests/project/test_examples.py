"""The examples run and say what they promise: some as a reader would start them, others from a server of processes that
has imported torch, with the environment that torchrun sets."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from apart import Ended, run_apart, script

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

PROMISES = {
    "plan_from_config.py": "tp 8 → 4",
    "plain_torch.py": "gradients agree",
    "unfamiliar_checkpoint.py": "on simulated ranks: exact",
    "audit_a_plan.py": "the audit found it",
    "train_under_torchrun.py": "losses fall as in one process",
    "long_context_under_torchrun.py": "losses as on one device",
    "plug_into_automodel.py": "by path and by class",
}
HOSTS = {  # under examples/frameworks: what each says when it ran, and the libraries without which it cannot
    "plain_torch.py": ("plain torch: the loss went", ""),
    "trl_loop.py": ("TRL-style loop: the reward went", ""),
    "automodel.py": ("Automodel: shards", "nemo_automodel"),
    "torchtitan_llama3.py": ("torchtitan's llama3: the loss went", "torchtitan triton"),
    "accelerate_trainer.py": ("accelerate and Trainer: trained, saved and resumed", "accelerate"),
    "fabric.py": ("Lightning Fabric: the loss went", "lightning_fabric"),
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
AS_A_READER = ("train_under_torchrun.py", "frameworks/fabric.py")


def test_each_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISES)


@pytest.mark.parametrize("name", PROMISES)
def test_each_example_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 40


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.hosts if "automodel" in n else ()) for n in PROMISES]
)
def test_example(name: str, tmp_path: Path) -> None:
    if "automodel" in name and importlib.util.find_spec("nemo_automodel") is None:
        pytest.skip("NOT TRIED: nemo-automodel is absent; `make test-hosts` installs it and runs this example")
    done = started(name, tmp_path, ranks=2 if "torchrun" in name else 1)
    assert done.returncode == 0, done.stderr
    assert PROMISES[name] in done.stdout


def started(name: str, folder: Path, ranks: int) -> Ended:
    if name in AS_A_READER:
        return run(name, folder, TORCHRUN if ranks > 1 else [])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    each = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {} for rank in range(ranks)]
    return run_apart(folder, *((partial(script, environment=told), EXAMPLES / name) for told in each))


def run(name: str, folder: Path, launcher: list[str]) -> Ended:
    path = os.pathsep.join(filter(None, (str(EXAMPLES.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, str(EXAMPLES / name)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=folder)


def test_each_host_has_a_short_example() -> None:
    folder = EXAMPLES / "frameworks"
    assert {path.name for path in folder.glob("*.py")} == set(HOSTS)
    for name in HOSTS:
        text = (folder / name).read_text()
        compile(text, name, "exec")
        assert len(text.splitlines()) < 60


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.hosts if HOSTS[n][1] else ()) for n in HOSTS])
def test_host_example(name: str, tmp_path: Path) -> None:
    """It runs where its host is there; where not, it says in a line what to install."""
    promise, host = HOSTS[name]
    if any(importlib.util.find_spec(one) is None for one in host.split()):
        done = run(f"frameworks/{name}", tmp_path, [])
        assert done.returncode == 1 and "pip install" in done.stderr and len(done.stderr.splitlines()) == 1
        pytest.skip(f"NOT TRIED: {host} is absent; `make test-hosts` installs what it can")
    done = started(f"frameworks/{name}", tmp_path, ranks=1 if name.startswith("fabric") else 2)
    assert done.returncode == 0, done.stderr
    assert promise in done.stdout

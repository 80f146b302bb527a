"""transformers' Trainer and accelerate train a sharded model, save it, and go on from what they saved."""

from __future__ import annotations

from importlib.util import find_spec
from math import prod
from pathlib import Path

import pytest
import torch

from autoplan.check.ranks.run import run_processes

if find_spec("accelerate") is None:
    pytest.skip("NOT TRIED: accelerate is absent; `make test-hosts` installs it", allow_module_level=True)

from training_hosts import alone, built, fed, trained

pytestmark = [pytest.mark.hosts, pytest.mark.gloo]


MESHES = [{"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"cp": 2}, {"dp_shard": 2, "cp": 2}]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_trained_saved_and_resumed(sizes: dict[str, int], tmp_path: Path) -> None:
    wanted = {steps: alone(steps) for steps in (1, 2)}
    for found in run_processes(trained, (sizes, tmp_path, wanted), prod(sizes.values())):
        assert set(found) >= {"trained 1", "trained 2", "resumed", "accelerate from 0", "collected from 2", "predicted"}
        assert max(found.values()) < 2e-6, found  # losses are reported in float32
    assert (tmp_path / "whole" / "model.safetensors").is_file()
    for folder in ("saved", "accelerate"):
        state = type(built()).from_pretrained(tmp_path / folder, dtype=torch.float64).state_dict()
        weights = wanted[2 if folder == "saved" else 1]
        assert all(float((state[name] - value).abs().max()) < 1e-7 for name, value in weights.items())


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_ranks_train_on_the_batches_of_a_run_alone(rate: float, tmp_path: Path) -> None:
    """Also after an evaluation, and in a run that goes on from a checkpoint."""
    (wanted,) = run_processes(fed, (1, tmp_path / "alone", rate), 1)
    assert len(wanted["evaluated"]) == 8 and len(wanted["resumed"]) == 6
    assert run_processes(fed, (2, tmp_path / "ranks", rate), 2) == [wanted] * 2

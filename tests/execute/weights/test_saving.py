"""`save_pretrained` of a sharded model: the files of the unsharded one, written together, and no rank left waiting."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_toys import deep, layers_only, mesh_of
from torch import nn

import autoplan
from autoplan.check.ranks.run import run_processes, run_ranks
from autoplan.common.errors import AutoplanError
from autoplan.execute.weights.files import CheckpointFiles
from autoplan.hf.source import resolve

# Packed and transposed weights, experts in a stack that checkpoints have one by one, K/V heads that ranks share.
TYPES = ("gpt2", "mixtral", "falcon", "deepseek_v3")
SIZES = ({"tp": 2}, {"dp_shard": 2})


def built(model_type: str) -> Any:
    torch.manual_seed(0)
    return resolve(model_type).tiny(dtype=torch.float32, experts="batched_mm").eval()


def saved(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for sizes in SIZES:
        mesh = mesh_of(**sizes)
        for model_type in TYPES:
            plan = autoplan.plan(built(model_type), sizes.get("tp", 1), prove="none")
            model = autoplan.parallelize(built(model_type), mesh, plan)
            model.save_pretrained(folder / f"{model_type} {next(iter(sizes))}", max_shard_size="60KB")


@pytest.mark.gloo
def test_the_files_are_those_of_the_unsharded_model(tmp_path: Path) -> None:
    run_processes(saved, (tmp_path,), 2)
    for model_type in TYPES:
        model = built(model_type)
        model.save_pretrained(tmp_path / model_type)
        wanted = CheckpointFiles(tmp_path / model_type)
        for dim in ("tp", "dp_shard"):
            folder = tmp_path / f"{model_type} {dim}"
            found = CheckpointFiles(folder)
            assert set(found.keys) == set(wanted.keys)
            assert all(torch.equal(found.read(key), wanted.read(key)) for key in wanted.keys)
            settings = [(where / "config.json").read_text() for where in (folder, tmp_path / model_type)]
            assert settings[0] == settings[1]
            shards = [path.stat().st_size for path in folder.glob("model-*.safetensors")]
            largest = max(wanted.read(key).nbytes for key in wanted.keys)
            assert len(shards) > 2 and max(shards) < max(60_000, largest) + 20_000
            again = type(model).from_pretrained(folder)
            state = again.state_dict()
            assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_any_model_is_saved_and_loaded_and_an_older_checkpoint_gives_way(tmp_path: Path) -> None:
    models = [deep() for _ in range(4)]

    def rank_body(rank: int) -> None:
        model = autoplan.parallelize(models[rank], mesh_of(dp_replicate=2, dp_shard=2), layers_only(models[rank]))
        autoplan.save_weights(model, tmp_path, max_shard_size=500)
        autoplan.save_weights(model, tmp_path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        autoplan.load_weights(model, tmp_path)
        found = autoplan.full_tensors(model)
        assert all(torch.equal(found[name], value) for name, value in deep().named_parameters())

    run_ranks(rank_body, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_what_fails_on_the_writing_rank_is_known_to_all(tmp_path: Path) -> None:
    models = [deep() for _ in range(2)]
    file = tmp_path / "file"
    file.touch()

    def rank_body(rank: int) -> None:
        model = autoplan.parallelize(models[rank], mesh_of(dp_shard=2), layers_only(models[rank]))
        with pytest.raises(AutoplanError, match="failed on rank 0 of 2: .* could not be written: FileExistsError"):
            autoplan.save_weights(model, file)

    run_ranks(rank_body, 2)
    assert stat.S_ISREG(file.stat().st_mode)


def test_the_library_saves_its_own_model_again_when_the_plan_is_undone(tmp_path: Path) -> None:
    models = [built("gpt2") for _ in range(2)]
    plan = autoplan.plan(built("gpt2"), 2, prove="none")

    def rank_body(rank: int) -> None:
        model = autoplan.parallelize(models[rank], mesh_of(tp=2), plan)
        with pytest.raises(AutoplanError, match="cannot be saved with push_to_hub"):
            model.save_pretrained(tmp_path, push_to_hub=True)
        with pytest.raises(AutoplanError, match="max_shard_size='much'"):
            model.save_pretrained(tmp_path, max_shard_size="much")
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        model.save_pretrained(tmp_path / "gathered", state_dict=whole)
        autoplan.applied(model).undo()
        assert "save_pretrained" not in vars(model)

    run_ranks(rank_body, 2)
    again = type(models[0]).from_pretrained(tmp_path / "gathered").state_dict()
    assert all(torch.equal(again[name], value) for name, value in built("gpt2").state_dict().items())


def test_a_host_that_is_not_known_is_refused() -> None:
    with pytest.raises(AutoplanError, match="neither a Trainer nor an Accelerator"):
        autoplan.hand_over(nn.Module)
    with pytest.raises(AutoplanError, match="needs the sharded model"):
        autoplan.hand_over(type("Accelerator", (), {}), nn.Linear(2, 2))

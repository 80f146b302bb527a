"""Parity scripts of accelerate and NeMo Automodel, on models that autoplan shards, over two gloo processes.

accelerate's `test_performance` comes with it: it trains a classifier, and checks learning rates, accuracy and the saved
file. What needs a hub is replaced (model, data, metric); the results must be those of one process. Automodel's
`run_tp_output_parity_minified` is in its repository alone (THEIRS= names a folder that holds it): where it shards a
model by its own plan, autoplan does.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import BatchEncoding, LlamaConfig, LlamaForSequenceClassification

import autoplan
from autoplan.check.ranks.run import run_processes

FOLDER = Path(os.environ.get("THEIRS", "build/theirs"))
SCRIPT = "run_tp_output_parity_minified"
MODELS = ("qwen3", "qwen3_seq_cls", "ministral3", "llama", "qwen2")


class _Accuracy:
    """What `evaluate.load("glue", "mrpc")` does here."""

    def __init__(self, *_: str) -> None:
        self.hits: list[torch.Tensor] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.hits.append(predictions == references)

    def compute(self) -> dict[str, float]:
        hits, self.hits = torch.cat(self.hits), []
        return {"accuracy": float(hits.float().mean())}


def _data(*_: Any) -> tuple[Any, Any]:
    """Texts whose label is told by their last token: 640 to train on, 40 to evaluate."""
    ids = torch.randint(1, 64, (680, 9), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": (row[-1] > 32).long()} for row in ids]

    def collate(some: list[Any]) -> BatchEncoding:
        return BatchEncoding({name: torch.stack([row[name] for row in some]) for name in some[0]})

    return tuple(DataLoader(part, batch_size=16, collate_fn=collate) for part in (rows[:640], rows[640:]))


def _classifier() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_labels=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForSequenceClassification(config)


def _trained(rank: int, folder: str) -> None:
    """Run accelerate's script; on two ranks with a model that autoplan shards."""
    sys.modules["evaluate"] = ModuleType("evaluate")
    sys.modules["evaluate"].load = _Accuracy  # type: ignore[attr-defined]
    script: Any = importlib.import_module("accelerate.test_utils.scripts.external_deps.test_performance")
    accelerator: Any = importlib.import_module("accelerate").Accelerator
    model, host = _classifier(), accelerator
    if dist.get_world_size() > 1:
        plan = autoplan.plan_once(model, 2)
        model = autoplan.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
        host = autoplan.hand_over(accelerator, model)
    accelerator.end_training = lambda self: None  # it ends the processes' group
    script.Accelerator = lambda: host(cpu=True)
    script.get_dataloaders = _data
    script.AutoModelForSequenceClassification = Namespace(from_pretrained=lambda *_, **__: model)
    options = Namespace(
        model_name_or_path="", output_dir=folder, performance_lower_bound=0.8, add_pad_token=False, tp_plan=None,
        tp_size=None, model_dtype=None,
    )  # fmt: skip
    script.training_function({"lr": 3e-3, "num_epochs": 3, "seed": 42, "batch_size": 16}, options)


@pytest.mark.gloo
def test_accelerate_trains_to_the_same_performance(tmp_path: Path) -> None:
    if find_spec("accelerate") is None or find_spec("datasets") is None:
        pytest.skip("NOT TRIED: accelerate or datasets is absent; `make test-hosts` installs them")
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        run_processes(_trained, (str(tmp_path / str(ranks)),), ranks)
    alone, sharded = (json.loads((tmp_path / name / "all_results.json").read_text()) for name in "12")
    assert alone == sharded
    whole, saved = (load_file(tmp_path / name / "model.safetensors") for name in "12")
    assert set(whole) == set(saved)
    for name, value in whole.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-4)


def _compared(rank: int, path: str, model: str) -> int:
    """Run Automodel's script for one model, with and without sequence parallelism."""
    spec = importlib.util.spec_from_file_location(SCRIPT, path)
    assert spec is not None and spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT] = script
    spec.loader.exec_module(script)

    def sharded(module: torch.nn.Module, mesh: Any, sequence_parallel: bool) -> None:
        plan = autoplan.plan_once(module, 2, sequence_parallel=sequence_parallel)
        autoplan.parallelize(module, mesh, plan)
        assert autoplan.applied(module) is not None and plan.entries

    script._get_parallel_plan = lambda _, sequence_parallel, tp_shard_plan: sequence_parallel
    script.parallelize_module = sharded
    return int(script.main(["--models", model]))


@pytest.mark.gloo
@pytest.mark.parametrize("model", MODELS)
def test_automodel_finds_the_same_logits(model: str) -> None:
    places = list(FOLDER.glob(f"**/{SCRIPT}.py"))
    if not places or find_spec("nemo_automodel") is None:
        pytest.skip(f"NOT TRIED: no {SCRIPT}.py under {FOLDER} (it is in Automodel's repository), or no nemo_automodel")
    assert run_processes(_compared, (str(places[0].resolve()), model), 2) == [0, 0]

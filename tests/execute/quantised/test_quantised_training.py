"""Adapters on packed bases under FSDP2, mixed precision and checkpointing; what is saved is what was loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import METHODS, adapted, random_state, tiny
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.torch_version import TorchVersion

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.execute.quantised.modules import is_packed

MIXED = {"mp_policy": "bf16", "activation_checkpointing": True}
IDS = torch.arange(12).view(2, 6)
CASES = [
    pytest.param("fp8 blocks", 2, {"activation_checkpointing": "selective"}, 1e-4, marks=pytest.mark.long),
    ("awq", 2, MIXED, 0.1),
    pytest.param("fp8 blocks", 1, {}, 1e-4, id="dp only"),
    pytest.param("fp8 blocks", 2, MIXED, 0.1, marks=pytest.mark.slow),
    pytest.param("ct packed", 2, {}, 1e-4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "tp", "options", "tolerance"), CASES)
def test_adapters_train_on_a_sharded_packed_base(
    name: str, tp: int, options: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    """dp_shard=2 and tp, uneven cuts too: gradients of the adapters, and every stored bit of the base."""
    config = tiny(METHODS[name], intermediate_size=160)
    made = autoplan.plan(adapted(config, "meta"), tp_size=tp, prove="none", uneven="blocks")
    if name == "awq" and TorchVersion(torch.__version__) < (2, 12):
        pytest.skip("FSDP2 of torch 2.11 shards only floating-point parameters")
    assert made.uneven == ("blocks" if tp > 1 else "never")
    torch.manual_seed(3)
    whole = autoplan.packed_model(adapted(config, "meta"), made)
    save_file(random_state(whole), tmp_path / "model.safetensors")
    autoplan.load_weights(whole, tmp_path)
    whole(IDS, labels=IDS).loss.backward()
    expected = {key: p.grad for key, p in whole.named_parameters() if p.grad is not None}
    stored = load_file(tmp_path / "model.safetensors")
    saved = tmp_path / "saved"

    def rank_body(rank: int) -> None:
        sizes = {"dp_shard": 2, "tp": tp} if tp > 1 else {"dp_shard": 2}
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        model = autoplan.packed_model(adapted(config, "meta"), made)
        model = autoplan.parallelize(model, mesh, made, **options)
        autoplan.load_weights(model, tmp_path)
        model(IDS, labels=IDS).loss.backward()
        found = autoplan.full_tensors(model, grads=True)
        for key, gradient in expected.items():
            assert gradient is not None and (found[key] - gradient).abs().max() <= tolerance * gradient.abs().max(), key
        assert found.keys() == expected.keys()
        _holds(autoplan.full_tensors(model), stored)
        state = model.state_dict()
        assert all(tuple(state[key].shape) == tuple(value.shape) for key, value in stored.items())
        model.load_state_dict(state)
        _holds(autoplan.full_tensors(model), stored)
        model.save_pretrained(saved)
        if "mp_policy" in options:  # a unit of their own, which nothing casts
            packed = {key for key, module in model.named_modules() if is_packed(module)}
            units = [set(unit) for unit in autoplan.applied(model).units]  # type: ignore[union-attr]
            assert any(unit and unit <= packed for unit in units)

    run_ranks(rank_body, 2 * tp)
    _holds(load_file(saved / "model.safetensors"), stored)
    said = json.loads((saved / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == METHODS[name]["quant_method"]
    assert [stack.name for stack in autoplan.layers(whole)] == ["model.layers"]


def _holds(found: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    for key, value in stored.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key].float(), value.float()), key

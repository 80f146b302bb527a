"""States of sharded packed models: distributed checkpoints at another size, state dicts, and the format they keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from quantised_models import METHODS, MODELS, adapted, built, checkpoint, random_state, tiny
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from slow_cases import marked
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import run_ranks

IDS = torch.arange(12).view(2, 6)


def _same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype and found[key].shape == value.shape, key
        assert torch.equal(found[key].float(), value.float()), key


def _mesh(tp: int) -> Any:
    return init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))


@pytest.mark.parametrize(
    ("name", "before", "after"),
    marked(
        [
            (name, *sizes)
            for name in ("fp8 blocks", "bnb nf4", "awq", "ct packed act order")
            for sizes in ((2, 4), (4, 1))
        ],
        slow=[("bnb nf4", 2, 4), ("fp8 blocks", 4, 1), ("ct packed act order", 2, 4), ("awq", 2, 4), ("awq", 4, 1)],
    ),
)
def test_adapters_go_on_at_another_size(name: str, before: int, after: int, tmp_path: Path) -> None:
    """Two steps, a distributed checkpoint, two more at another size: the steps of one device."""
    config = tiny(METHODS[name])
    plans = {tp: autoplan.plan(adapted(config, "meta"), tp_size=tp, prove="none") for tp in (before, after)}
    torch.manual_seed(3)
    whole = autoplan.packed_model(adapted(config, "meta"), plans[before])
    state = random_state(whole)
    save_file(state, tmp_path / "model.safetensors")
    other = {key: value if "lora_" not in key else value / 2 for key, value in state.items()}
    (tmp_path / "other").mkdir()
    save_file({k: v.clone() if v.dtype.itemsize > 1 else torch.zeros_like(v) for k, v in other.items()},
              tmp_path / "other" / "model.safetensors")  # fmt: skip

    def steps(model: Any, optimizer: Any) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()

    def trained(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)

    autoplan.load_weights(whole, tmp_path)
    optimizer = trained(whole)
    steps(whole, optimizer)
    steps(whole, optimizer)
    wanted = {key: value.detach() for key, value in whole.state_dict().items()}

    def first(rank: int) -> None:
        model = autoplan.packed_model(adapted(config, "meta"), plans[before])
        model = autoplan.parallelize(model, _mesh(before), plans[before])
        autoplan.load_weights(model, tmp_path)
        optimizer = trained(model)
        steps(model, optimizer)
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "distributed")

    def second(rank: int) -> None:
        model = autoplan.packed_model(adapted(config, "meta"), plans[after])
        model = autoplan.parallelize(model, _mesh(after), plans[after])
        autoplan.load_weights(model, tmp_path / "other")
        optimizer = trained(model)
        weights, states = get_state_dict(model, optimizer)
        both = {"model": weights, "optimizer": states}
        dcp.load(both, checkpoint_id=tmp_path / "distributed")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        steps(model, optimizer)
        found = autoplan.full_tensors(model)
        for key, value in wanted.items():
            if "lora_" in key:
                torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-5, msg=key)
            else:
                assert found[key].dtype == value.dtype and torch.equal(found[key].float(), value.float()), key

    run_ranks(first, before)
    run_ranks(second, after)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("dense", "bnb nf4 double"),
        pytest.param("experts", "awq", marks=pytest.mark.slow),
        ("experts", "fp4 experts"),
        ("fused", "gptq"),
    ],
)
def test_full_states_and_what_is_saved(kind: str, name: str, tmp_path: Path) -> None:
    """Full state dicts are those of one device, go back in, and a saved folder loads at another size."""
    config = MODELS[kind](METHODS[name])
    plans = {tp: autoplan.plan(config, tp_size=tp, prove="none") for tp in (2, 4)}
    checkpoint(config, plans[2], tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file), file, metadata={"a.weight": "what a method writes there"})
    whole = autoplan.packed_model(built(config, "meta"), plans[2])
    autoplan.load_weights(whole, tmp_path)
    wanted = {key: value.detach() for key, value in whole.state_dict().items()}
    options = StateDictOptions(full_state_dict=True)

    def first(rank: int) -> None:
        model = autoplan.packed_model(built(config, "meta"), plans[2])
        model = autoplan.parallelize(model, _mesh(2), plans[2])
        autoplan.load_weights(model, tmp_path)
        full = get_model_state_dict(model, options=options)
        _same(full, wanted)
        set_model_state_dict(model, {k: v.clone() for k, v in full.items()}, options=options)
        _same(autoplan.full_tensors(model), wanted)
        model.save_pretrained(tmp_path / "saved")

    def second(rank: int) -> None:
        model = autoplan.packed_model(built(config, "meta"), plans[4])
        model = autoplan.parallelize(model, _mesh(4), plans[4])
        autoplan.load_weights(model, tmp_path / "saved")
        _same(autoplan.full_tensors(model), wanted)

    run_ranks(first, 2)
    run_ranks(second, 4)
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as saved:
        assert saved.metadata() == {"format": "pt", "a.weight": "what a method writes there"}
    own, found = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    if name == "bnb nf4 double":
        assert any(key.endswith(".nested_absmax") for key in own)
    _same({key: value for key, value in found.items() if "quant_state" not in key}, {
        key: value for key, value in own.items() if "quant_state" not in key
    })  # fmt: skip

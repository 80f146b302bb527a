"""Uneven cuts between the blocks of quantised weights: off unless asked for, and exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import METHODS, built, checkpoint, experts, latent, tiny
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import AutoplanError
from autoplan.common.layout import Layout
from autoplan.values.reasons import InsideQuantisedBlock, OfDim

FP8 = METHODS["fp8 blocks"]


def model(kind: str, name: str = "fp8 blocks", blocks: int = 5) -> Any:
    """Its MLP has so many blocks of 32."""
    config = {"dense": tiny, "experts": experts, "latent": latent}[kind](METHODS[name])
    config.intermediate_size = 32 * blocks
    if kind != "dense":
        config.moe_intermediate_size = 32 * blocks
    return config


def cuts(made: autoplan.Plan, ending: str) -> dict[str, str]:
    weight = next(weight for weight in made.packed if weight.name.endswith(ending))
    return {tensor.name: tensor.segment for tensor in weight.tensors}


def test_nothing_is_uneven_unless_asked_for() -> None:
    made = autoplan.plan(model("dense"), tp_size=2, prove="none")
    assert made.uneven == "never" and cuts(made, "gate_proj.weight")["weight"] == "whole"
    (found,) = [f for f in made.findings if f.level == "warn"]
    assert 'uneven="blocks"' in found.hint and found.bytes
    asked = autoplan.plan(model("dense"), tp_size=2, prove="none", uneven="blocks")
    assert asked.uneven == "blocks" and not [f for f in asked.findings if f.level == "warn"]
    assert cuts(asked, "down_proj.weight") == {"weight": "1:160!~32", "weight_scale_inv": "1:5!~1"}
    assert cuts(asked, "gate_proj.weight") == {"weight": "0:160!~32", "weight_scale_inv": "0:5!~1"}
    assert "the first rank 96 and the last 64" in asked.explain("model.layers.0.mlp.up_proj")
    assert asked.legal_tp == made.legal_tp


def test_sizes_that_divide_are_cut_evenly() -> None:
    made = autoplan.plan(model("dense", blocks=6), tp_size=2, prove="none", uneven="blocks")
    assert made.uneven == "never" and cuts(made, "down_proj.weight")["weight"] == "1:192!"


def test_sizes_that_do_not_divide_at_all() -> None:
    config = model("dense", blocks=7)
    config.num_attention_heads = config.num_key_value_heads = 6
    made = autoplan.plan(config, tp_size=3, prove="none", uneven="blocks")
    assert cuts(made, "up_proj.weight")["weight"] == "0:224!~32"


def test_fewer_blocks_than_ranks_stay_whole() -> None:
    made = autoplan.plan(model("dense", blocks=2), tp_size=4, prove="none", uneven="blocks")
    whole = {item.fqn: item for item in made.replicated}
    item = whole["model.layers.*.mlp.gate_proj.weight"]
    why = [one.why for one in item.why if isinstance(one, OfDim)]
    assert item.bytes and any(isinstance(one, InsideQuantisedBlock) and not one.uneven for one in why)
    (found,) = [f for f in made.findings if f.level == "warn"]
    assert "there are 2 for 4 ranks" in found.message and found.bytes and "uneven" not in found.hint


@pytest.mark.parametrize("blocks", [5, 6, 7, 9, 16])
@pytest.mark.parametrize("tp", [2, 3, 4, 5])
def test_pieces_are_whole_blocks_and_as_even_as_can_be(blocks: int, tp: int) -> None:
    layout = Layout.parse(f"{blocks * 8 - 3}!~8")  # the last block is a part
    held = [layout.rows(rank, tp) for rank in range(tp)]
    assert [row for rows in held for row in rows] == list(range(layout.size))
    counts = [len({row // 8 for row in rows}) for rows in held]
    assert sum(counts) == blocks and max(counts) - min(counts) <= 1
    assert Layout.parse(str(layout)) == layout and layout.is_uneven


CASES = [
    ("dense", {"tp_size": 4}),
    pytest.param("experts", {"tp_size": 4}, marks=pytest.mark.slow),
    pytest.param("latent", {"tp_size": 4}, marks=pytest.mark.slow),
    pytest.param("dense", {"mesh": "dp=2,tp=2"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "ranks"), CASES)
def test_outputs_gradients_and_training_are_exact(kind: str, ranks: dict[str, Any]) -> None:
    config = model(kind)
    made = autoplan.plan(config, tp_size=ranks.get("tp_size", 2), prove="none", uneven="blocks")
    report = autoplan.verify(built(config), made, **ranks)
    assert made.uneven == "blocks" and report.ok, report.findings
    assert {"forward", "state_dict"} <= set(report.details["checked"]) and max(report.gradients.values()) < 1e-10


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("dense", "awq"),
        pytest.param("dense", "gptq", marks=pytest.mark.slow),
        ("experts", "fp8 blocks"),
        pytest.param("latent", "ct packed", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_come_and_go(kind: str, name: str, tmp_path: Path) -> None:
    """Read by pieces into plain and packed models; state dicts and optimizer states have the checkpoint's shapes."""
    config = model(kind, name)
    made = autoplan.plan(config, tp_size=2, prove="none", uneven="blocks")
    plain = checkpoint(config, made, tmp_path)
    ids = torch.arange(12).view(2, 6)
    assert made.uneven == "blocks"

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        dense = autoplan.parallelize(built(config, "meta"), mesh, made)
        autoplan.load_weights(dense, tmp_path, dequantise=True)
        for key, value in autoplan.full_tensors(dense).items():
            assert torch.equal(value, plain[key].float()), key
        optimizer = torch.optim.AdamW(dense.parameters(), lr=1e-3)
        dense(ids, labels=ids).loss.backward()
        optimizer.step()
        shapes = {name: tuple(value.shape) for name, value in dense.state_dict().items() if name in plain}
        assert shapes == {name: tuple(value.shape) for name, value in plain.items()}
        names = [name for name, _ in dense.named_parameters()]
        for number, state in optimizer.state_dict()["state"].items():
            assert tuple(state["exp_avg"].shape) == tuple(plain[names[number]].shape)
        before = {name: value.clone() for name, value in autoplan.full_tensors(dense).items()}
        optimizer.load_state_dict(optimizer.state_dict())
        dense.load_state_dict(dense.state_dict())
        assert all(torch.equal(value, before[name]) for name, value in autoplan.full_tensors(dense).items())

    run_ranks(rank_body, 2)


def test_asked_for_where_nothing_is_stored_in_blocks() -> None:
    config = model("dense")
    config.quantization_config = None
    made = autoplan.plan(config, tp_size=2, prove="none", uneven="blocks")
    assert any("has no effect" in f.message for f in made.findings)
    with pytest.raises(AutoplanError, match="'rows'"):
        autoplan.plan(config, tp_size=2, uneven="rows")


def test_files_hold_it_and_a_later_edit_is_found(tmp_path: Path) -> None:
    config = model("dense")
    made = autoplan.plan(config, tp_size=2, prove="none", uneven="blocks")
    made.save(tmp_path / "plan.yaml")
    assert autoplan.load_plan(tmp_path / "plan.yaml") == made
    assert autoplan.plan(config, tp_size=2, source=str(tmp_path / "plan.yaml")).uneven == "blocks"

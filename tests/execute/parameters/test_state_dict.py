"""State dicts of sharded models: the checkpoint's names, shapes and row order, saved and loaded, under FSDP2 too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sharded_toys import TOYS, build, inputs, reference, rule, set_group, shard_parameters, tp_mesh
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autoplan.check.ranks.run import run_ranks
from autoplan.execute.collectives import RankGroup
from autoplan.execute.parameters.buffers import full_tensors

SPLIT = [name for name, (_, rules) in TOYS.items() if rules]
CASES = [(name, 2) for name in TOYS] + [("tied", 4), ("shared key", 4)]


def sharded(name: str, tp: int, fsdp: bool = False) -> Any:
    """The toy on a tp mesh, or on a 2 x tp mesh with its children and itself wrapped by FSDP2."""
    model = build(name)
    mesh = init_device_mesh("cpu", (2, tp), mesh_dim_names=("dp", "tp")) if fsdp else tp_mesh(tp)
    shard_parameters(model, mesh["tp"], TOYS[name][1])
    set_group(model, RankGroup.of(mesh["tp"]))
    if fsdp:
        fsdp_dim: dict[nn.Parameter, int] = {}
        for child in [model.block] if name == "tied" else []:
            fully_shard(child, mesh=mesh["dp"], shard_placement_fn=fsdp_dim.get)
        fully_shard(model, mesh=mesh["dp"])
    return model


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def changed(name: str) -> dict[str, torch.Tensor]:
    """Another state of the toy: what gets loaded."""
    return {key: value * 2 + 1 for key, value in build(name).state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert found[key].shape == value.shape, key
        assert torch.equal(whole(found[key]), value), key


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_a_sharded_state_dict_is_the_checkpoints(name: str, tp: int) -> None:
    def rank_body(rank: int) -> None:
        state = sharded(name, tp).state_dict()
        assert_same(state, build(name).state_dict())
        for key in dict(build(name).named_parameters(remove_duplicate=False)):
            assert isinstance(state[key], DTensor), key

    run_ranks(rank_body, tp)


@pytest.mark.parametrize("name", list(TOYS))
@pytest.mark.parametrize("fsdp", [False, True])
def test_plain_and_distributed_states_load(name: str, fsdp: bool) -> None:
    def rank_body(rank: int) -> None:
        model, expected = sharded(name, 2, fsdp), changed(name)
        result = model.load_state_dict(expected)
        assert not result.missing_keys and not result.unexpected_keys
        assert_same(model.state_dict(), expected)
        again = sharded(name, 2, fsdp)
        again.load_state_dict(model.state_dict())  # DTensors in checkpoint order
        assert_same(again.state_dict(), expected)
        mesh = next(iter(again.parameters())).device_mesh
        foreign = {
            key: distribute_tensor(value, mesh, [Shard(0), *[Replicate()] * (mesh.ndim - 1)], src_data_rank=None)
            if key in dict(again.named_parameters(remove_duplicate=False))
            else value
            for key, value in build(name).state_dict().items()
        }
        again.load_state_dict(foreign)  # DTensors that lie otherwise
        assert_same(again.state_dict(), build(name).state_dict())

    run_ranks(rank_body, 4 if fsdp else 2)


@pytest.mark.parametrize("name", SPLIT)
def test_fsdp_on_top_gives_the_same_gradients_and_state(name: str) -> None:
    def rank_body(rank: int) -> Any:
        model = sharded(name, 2, fsdp=True)
        for _ in range(2):
            model.zero_grad()
            output = model(inputs(name))
            output.square().sum().backward()
        return output.detach(), full_tensors(model), full_tensors(model, grads=True), _wholes(model.state_dict())

    output, gradients = reference(name)
    state = build(name).state_dict()
    for mine, weights, my_gradients, my_state in run_ranks(rank_body, 4):
        torch.testing.assert_close(mine, output)
        assert my_gradients.keys() == gradients.keys()
        for fqn, expected in gradients.items():
            torch.testing.assert_close(my_gradients[fqn], expected)
            assert torch.equal(weights[fqn], state[fqn])
        assert_same(my_state, state)


def _wholes(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: whole(value) for key, value in state.items()}


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("fsdp", [False, True])
def test_torchs_own_state_dict_functions_work(name: str, fsdp: bool) -> None:
    def rank_body(rank: int) -> None:
        model, options = sharded(name, 2, fsdp), StateDictOptions(full_state_dict=True)
        full = get_model_state_dict(model, options=options)
        assert_same(full, build(name).state_dict())
        if fsdp and name == "tied":  # torch 2.13 cannot scatter ten rows in FSDP2's form; its own limit, for any model
            model.load_state_dict(changed(name))
        else:
            set_model_state_dict(model, changed(name), options=options)
        assert_same(get_model_state_dict(model, options=options), changed(name))

    run_ranks(rank_body, 4 if fsdp else 2)


@pytest.mark.parametrize(("name", "fsdp"), [("packed", False), ("packed", True), ("shared key", True), ("tied", True)])
def test_a_distributed_checkpoint_loads_into_a_plain_model_and_back(name: str, fsdp: bool, tmp_path: Path) -> None:
    def save(rank: int) -> None:
        dcp.save(get_model_state_dict(sharded(name, 2, fsdp)), checkpoint_id=tmp_path)

    def load(rank: int) -> None:
        model = sharded(name, 2, fsdp)
        model.load_state_dict(changed(name))
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=tmp_path)
        set_model_state_dict(model, state)
        assert_same(_wholes(model.state_dict()), build(name).state_dict())

    run_ranks(save, 4 if fsdp else 2)
    plain = {key: torch.zeros_like(value) for key, value in build(name).state_dict().items()}
    dcp.load(plain, checkpoint_id=tmp_path, no_dist=True)
    assert_same(plain, build(name).state_dict())
    run_ranks(load, 4 if fsdp else 2)


def test_strictness_and_messages_are_torchs() -> None:
    def rank_body(rank: int) -> None:
        model, state = sharded("shared key", 2), build("shared key").state_dict()
        before = full_tensors(model)
        missing = {key: value for key, value in state.items() if key != "qk.weight"}
        with pytest.raises(RuntimeError, match='Missing key.*"qk.weight"'):
            model.load_state_dict(missing)
        assert model.load_state_dict(missing, strict=False).missing_keys == ["qk.weight"]
        with pytest.raises(RuntimeError, match='Unexpected key.*"other"'):
            model.load_state_dict(state | {"other": torch.ones(1)})
        wrong = state | {"qk.weight": torch.ones(48, 6)}  # the size in rank order is not the checkpoint's
        with pytest.raises(
            RuntimeError, match=r"size mismatch for qk.weight.*\[48, 6\].*model is torch.Size\(\[40, 6\]"
        ):
            model.load_state_dict(wrong)
        assert_same(full_tensors(model), before)

    run_ranks(rank_body, 2)


def test_states_can_be_assigned_to_a_meta_model() -> None:
    def rank_body(rank: int) -> None:
        model = build("packed", "meta")
        shard_parameters(model, tp_mesh(2), TOYS["packed"][1])
        assert all(value.is_meta for value in model.state_dict().values())
        model.load_state_dict(build("packed").state_dict(), assign=True)
        assert_same(model.state_dict(), build("packed").state_dict())
        assert isinstance(model.qkv.weight, nn.Parameter) and model.qkv.weight.placements == (Shard(0),)

    run_ranks(rank_body, 2)


def test_names_pass_through_checkpoint_wrappers() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def rank_body(rank: int) -> Any:
        model = sharded("tied", 2)
        model.block = checkpoint_wrapper(model.block)
        model(inputs("tied")).square().sum().backward()
        return full_tensors(model, grads=True)

    for gradients in run_ranks(rank_body, 2):
        assert gradients.keys() == reference("tied")[1].keys()
        for fqn, expected in reference("tied")[1].items():
            torch.testing.assert_close(gradients[fqn], expected)


def test_gradients_that_some_ranks_lack_count_as_zero_and_absent_ones_are_left_out() -> None:
    def rank_body(rank: int) -> Any:
        layer = nn.Linear(2, 4).double()
        with torch.no_grad():
            layer.weight.fill_(1.0), layer.bias.fill_(0.0)
        shard_parameters(layer, tp_mesh(2), {"weight": rule(0, "4!")})
        layer.bias.requires_grad_(False)
        if rank == 0:
            nn.functional.linear(torch.ones(1, 2).double(), layer.weight.to_local()).sum().backward()
        return full_tensors(layer, grads=True)

    for gradients in run_ranks(rank_body, 2):
        assert list(gradients) == ["weight"]
        assert gradients["weight"].tolist() == [[1.0, 1.0]] * 2 + [[0.0, 0.0]] * 2

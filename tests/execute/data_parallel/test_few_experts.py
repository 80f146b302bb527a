"""Stacks of fewer matrices than data-parallel ranks: cut inside of each, no rank has room for what is not its."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from experts_toys import Stacked, with_stacks
from mesh_toys import mesh_of
from slow_cases import marked
from torch.distributed.tensor import DTensor

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.execute.data_parallel.units import cut_dim
from autoplan.execute.parameters.buffers import full_tensors

CASES = {
    "FSDP2 alone": ({"dp_shard": 8}, 1, 4),
    "experts cut inside, along the same dim": ({"dp_shard": 4, "tp": 2}, 1, 2),
    "experts apart": ({"dp_shard": 4, "tp": 2}, 2, 4),
    "replicas": ({"dp_replicate": 2, "dp_shard": 4}, 1, 2),
}


@pytest.mark.parametrize("name", marked(CASES, long=["experts cut inside, along the same dim"], slow=["replicas"]))
def test_every_rank_holds_its_part_and_training_is_exact(name: str, tmp_path: Path) -> None:
    sizes, ep, experts = CASES[name]
    model, inputs = with_stacks(Stacked, experts=experts)
    expected = {fqn: value.detach().clone() for fqn, value in model.named_parameters()}
    plan = autoplan.plan(model, tp_size=sizes.get("tp", 1), ep_size=ep, inputs=inputs, prove="none")
    model(**inputs).square().mean().backward()
    gradients = {fqn: p.grad for fqn, p in model.named_parameters()}
    norm = torch.stack([g.norm() for g in gradients.values() if g is not None]).norm()

    def rank_body(rank: int) -> Any:
        other, _ = with_stacks(Stacked, experts=experts)
        mesh = mesh_of(**sizes)
        autoplan.parallelize(other, mesh, plan)
        each = sizes["dp_shard"] * sizes.get("tp", 1)
        for fqn, parameter in other.named_parameters():
            if fqn.endswith(("pool.up", "pool.down")):
                assert isinstance(parameter, DTensor)
                assert parameter._local_tensor.untyped_storage().nbytes() == 4 * expected[fqn].numel() // each, fqn
        other(**inputs).square().mean().backward()
        found = full_tensors(other, grads=True)
        length = autoplan.global_norm(other)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        autoplan.save_weights(other, tmp_path)
        again, _ = with_stacks(Stacked, experts=experts)
        autoplan.parallelize(again, mesh, plan)
        autoplan.load_weights(again, tmp_path)
        third, _ = with_stacks(Stacked, experts=experts)
        autoplan.parallelize(third, mesh, plan)
        third.load_state_dict(again.state_dict())
        return found, length, full_tensors(again), full_tensors(third)

    for found, length, loaded, copied in run_ranks(rank_body, math.prod(sizes.values())):
        for fqn, gradient in gradients.items():
            torch.testing.assert_close(found[fqn], gradient)
            assert torch.equal(loaded[fqn], 2 * expected[fqn]) and torch.equal(copied[fqn], loaded[fqn]), fqn
        torch.testing.assert_close(torch.as_tensor(length, dtype=norm.dtype), norm)


def test_which_dim_is_cut() -> None:
    assert cut_dim((8, 40, 96), 8) == 0
    assert cut_dim((4, 40, 96), 8) == 1
    assert cut_dim((4, 41, 96), 8) == 2
    assert cut_dim((4, 41, 95), 8) == 0

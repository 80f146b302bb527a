"""Megatron-FSDP: the call that would be made, and why it is not made here."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from mesh_toys import Block, deep, layers_only, mesh_of, model_of, plan_of

from autoplan import megatron_call
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import AutoplanError


def test_the_call_can_be_looked_at() -> None:
    def rank_body(rank: int) -> Any:
        model = model_of("llama")
        mesh = mesh_of(dp_replicate=1, dp_shard=1, tp=2)
        return megatron_call(model, mesh, plan_of("llama", 2), zero_dp_strategy="optim_grads", nccl_ub=True)

    call = run_ranks(rank_body, 2)[0]
    assert call.function == "fully_shard_model"
    (unit,) = call.arguments["fsdp_unit_modules"]
    assert unit.__name__ == "LlamaDecoderLayer"
    rest = {key: call.arguments[key] for key in call.arguments if key not in ("device_mesh", "fsdp_unit_modules")}
    assert rest == {
        "dp_shard_dim": "dp_shard",
        "dp_outer_dim": "dp_replicate",
        "tp_dim": "tp",
        "zero_dp_strategy": "optim_grads",
        "nccl_ub": True,
    }
    assert "megatron_fsdp.fully_shard_model(" in str(call) and "modeling_llama.LlamaDecoderLayer" in str(call)


def call_on_one_rank(**options: Any) -> Any:
    model = deep()
    return run_ranks(lambda rank: megatron_call(model, mesh_of(dp=1), layers_only(model), **options), 1)[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only where there is no CUDA device")
def test_without_cuda_it_refuses_before_touching_the_model() -> None:
    call = call_on_one_rank()
    before = [id(parameter) for parameter in call.model.parameters()]
    with pytest.raises(AutoplanError, match="CUDA devices only.*not touched"):
        call.run()
    assert [id(parameter) for parameter in call.model.parameters()] == before


def test_what_is_called_and_with_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in library on a machine that claims a GPU."""
    seen: list[Any] = []

    def fully_shard(
        model: Any, optimizer: Any, device_mesh: Any, dp_shard_dim: str, fsdp_unit_modules: Any, nccl_ub: bool = False
    ) -> Any:
        seen.append((model, optimizer, dp_shard_dim, fsdp_unit_modules, nccl_ub))
        return model, optimizer

    library = types.ModuleType("megatron_fsdp")
    library.fully_shard = fully_shard  # type: ignore[attr-defined]
    library.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "megatron_fsdp", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    optimizer = torch.optim.SGD(deep().parameters(), lr=0.1)
    call = call_on_one_rank(optimizer=optimizer, nccl_ub=True)
    assert call.run() == (call.model, optimizer)
    assert seen == [(call.model, optimizer, "dp", [Block], True)]
    with pytest.raises(AutoplanError, match="does not support disable_bucketing"):
        call_on_one_rank(optimizer=optimizer, disable_bucketing=True).run()


def test_unknown_options_and_useless_calls_are_refused() -> None:
    from autoplan.check.ranks.common import RankError

    for options, said in (
        ({"zero": 3}, "no Megatron-FSDP option zero"),
        ({"mesh_dims": {"dp_shard": "x"}}, "no dim named 'x'"),
    ):
        with pytest.raises(RankError, match=said):
            call_on_one_rank(**options)

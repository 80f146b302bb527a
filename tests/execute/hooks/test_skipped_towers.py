"""Ranks that skip a stack of blocks, or run another one, train as one device does; and no rank waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from mesh_toys import clone, layers_only, mesh_of, model_of
from slow_cases import marked
from torch import nn
from torch.distributed.fsdp import FSDPModule

import autoplan
from autoplan.check.ranks.run import count_collectives, run_ranks
from autoplan.common.errors import AutoplanError
from autoplan.values import Plan

WISHED = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="FSDP2 of torch 2.11 takes no such wish"
)


class Towers(nn.Module):
    """Two towers, a table and a trunk of two kinds of block; all but the trunk's first kind may be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.first, self.second, self.trunk = (nn.ModuleList(Block() for _ in range(2)) for _ in range(3))
        self.trunk.insert(1, Crossing())
        self.table = nn.Embedding(7, 6)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, towers: str, ids: torch.Tensor | None = None) -> torch.Tensor:
        seen = torch.zeros(2, 6, dtype=torch.float64)
        for letter, tower in (("a", self.first), ("b", self.second)):
            if letter in towers:
                x = self.stem(torch.full((2, 6), 0.5, dtype=torch.float64))
                states = []
                for block in tower:
                    x = block(x)
                    states.append(x)
                seen = seen + states["e" in towers and -1]  # else the last block's output is used by nobody
        x = seen if ids is None else seen + self.table(ids)
        for block in self.trunk:
            x = x if isinstance(block, Crossing) and "c" not in towers else block(x)
        return x.sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(x))


class Crossing(Block):
    """Stands for cross-attention."""


def towers() -> Towers:
    torch.manual_seed(0)
    return Towers().double()


IDS = torch.tensor([1, 4])
# What each of four ranks runs, one after the other: towers "a" and "b", crossing "c", to the "e"nd of the towers
STEPS = {
    "one of four": ("abce", "", "", ""),
    "all differ": ("ae", "be", "ce", ""),
    "then the others": ("", "abce", "a", "be"),
    "output unused": ("a", "", "b", "c"),
    "none": ("", "", "", ""),
    "all": ("abce", "abce", "abce", "abce"),
}


def given(step: str, rank: int) -> dict[str, Any]:
    """The last rank gives no ids where another one has a tower."""
    return {"towers": STEPS[step][rank], "ids": None if rank == 3 and step == "all differ" else IDS}


def away(found: dict[str, torch.Tensor], model: nn.Module) -> float:
    """From the gradients of one device; what it has none for may be zero."""
    wanted = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    none = {name: torch.zeros_like(value) for name, value in wanted.items()} | found
    return max(float((none[name] - value).abs().max()) for name, value in wanted.items())


def alone(change: Callable[[Towers], object], *steps: str) -> Towers:
    model = towers()
    change(model)
    for step in steps:
        for rank in range(4):
            loss = model(**given(step, rank)) / 4
            if loss.requires_grad:
                loss.backward()
    return model


CHANGES: dict[str, Callable[[Towers], object]] = {
    "all is trained": lambda model: None,
    "a frozen tower": lambda model: model.first.requires_grad_(False),
    "only one tower is trained": lambda model: (model.requires_grad_(False), model.second.requires_grad_(True)),
    "a frozen stem": lambda model: model.stem.requires_grad_(False),
}


@WISHED
@pytest.mark.parametrize("change", marked(CHANGES, slow=["a frozen stem"]))
def test_ranks_that_run_different_towers_train_as_one_device(change: str) -> None:
    plan = layers_only(towers())
    checkpointed = change == "all is trained"
    sizes = {"dp_replicate": 2, "dp_shard": 2} if change == "a frozen stem" else {"dp_shard": 4}
    steps = [step for step in STEPS if change != "only one tower is trained" or step in ("one of four", "all")]
    wanted = {step: alone(CHANGES[change], step) for step in steps}

    def rank_body(rank: int) -> dict[str, float]:
        model = towers()
        CHANGES[change](model)
        parallel: Any = autoplan.parallelize(model, mesh_of(**sizes), plan, activation_checkpointing=checkpointed)
        parallel.set_reduce_scatter_unused_params(True)
        found = {}
        for step in steps:
            parallel.zero_grad()
            with torch.no_grad():
                parallel(**given(step, rank))
            parallel(**given(step, rank)).backward()
            found[step] = away(autoplan.full_tensors(parallel, grads=True), wanted[step])
        return found

    for found in run_ranks(rank_body, 4, timeout=60):
        assert max(found.values()) < 1e-12, found


@WISHED
def test_gradients_accumulate_over_other_towers() -> None:
    plan, wanted = layers_only(towers()), alone(lambda model: None, "one of four", "then the others", "none")

    def rank_body(rank: int) -> float:
        model: Any = autoplan.parallelize(towers(), mesh_of(dp_shard=4), plan)
        model.set_reduce_scatter_unused_params(True)
        for step in ("one of four", "then the others", "none"):
            model.set_requires_gradient_sync(step == "none")
            model(**given(step, rank)).backward()
        return away(autoplan.full_tensors(model, grads=True), wanted)

    assert max(run_ranks(rank_body, 4, timeout=60)) < 1e-12


@WISHED
def test_what_all_ranks_skip_is_gathered_by_none() -> None:
    plan = layers_only(towers())

    def rank_body(rank: int) -> list[int]:
        mesh, counts = mesh_of(dp_shard=2), []
        for asked in (False, True):
            model: Any = autoplan.parallelize(towers(), mesh, plan)
            model.set_reduce_scatter_unused_params(asked)
            with torch.no_grad(), count_collectives() as counted:
                model("", IDS)
            counts.append(sum(count for kind, count in counted.items() if "gather" in kind))
        return counts

    for plain, asked in run_ranks(rank_body, 2):
        assert plain == asked


@WISHED
def test_units_inside_of_skipped_blocks_are_refused_on_every_rank() -> None:
    def odd() -> Towers:
        model = towers()
        for block in model.first:
            block.norm = nn.LayerNorm(6)  # type: ignore[assignment]
            block.norm.float()
        return model

    plan = layers_only(odd())

    def rank_body(rank: int) -> str:
        model: Any = autoplan.parallelize(odd(), mesh_of(dp_shard=2), plan)
        model.set_reduce_scatter_unused_params(True)
        with pytest.raises(AutoplanError, match="some ranks skip first.0: first.0.norm inside it") as caught:
            model("a" if rank else "", IDS)
        return str(caught.value)

    first, second = run_ranks(rank_body, 2, timeout=30)
    assert first == second and "run it on every rank" in first


# ------------------------------------------------------------------------------------------------ a multimodal model


@cache
def planned(kind: str) -> Plan:
    return autoplan.plan(model_of(kind), 2, prove="none", inputs=dict(clone(kind).feeds))


@WISHED
@pytest.mark.parametrize("kind", ["llava", *(pytest.param(k, marks=pytest.mark.slow) for k in ("qwen3_vl", "mllama"))])
def test_batches_with_and_without_images_train_together(kind: str) -> None:
    """FSDP2 × tensor parallelism: one data-parallel rank has images, the other has none, and they change places."""
    feeds = clone(kind).feeds
    batches = [next(one for name, one in feeds.items() if name != "text"), feeds["text"]]
    plan, whole = planned(kind), model_of(kind)
    sum(loss(whole, batch) / 2 for batch in batches).backward()  # type: ignore[union-attr]
    wanted = {name: value.grad for name, value in whole.named_parameters() if value.grad is not None}
    largest = max(float(value.abs().max()) for value in wanted.values())

    def rank_body(rank: int) -> float:
        mesh, worst = mesh_of(dp_shard=2, tp=2), 0.0
        model: Any = autoplan.parallelize(model_of(kind), mesh, plan)
        model.set_reduce_scatter_unused_params(True)
        for turn in (0, 1):
            model.zero_grad()
            loss(model, batches[(mesh.get_local_rank("dp_shard") + turn) % 2]).backward()
            found = autoplan.full_tensors(model, grads=True)
            worst = max(worst, *(float((found[name] - value).abs().max()) for name, value in wanted.items()))
        return worst / largest

    assert max(run_ranks(rank_body, 4, timeout=120)) < 1e-6  # models compute their losses in float32


def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = model(**batch, labels=batch["input_ids"]).loss
    return found

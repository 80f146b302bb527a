"""Streams of shape (sequence, batch, features): the sequence is cut, not the batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autoplan
from autoplan.values import AllGatherSequenceSumGradient, OwnPositions, ReduceScatterSequence, ScatterSequence


class Mixer(nn.Module):
    """Heads of parameters of its own. `joins`: the residual and the norm are its own, too."""

    def __init__(self, joins: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(32, 4, 8) / 6) for _ in range(4))
        self.norm, self.joins = nn.LayerNorm(32), joins

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.einsum("ibh,hnd->ibnd", x, weight) for weight in (self.q, self.k, self.v))
        seen = torch.softmax(torch.einsum("ibnd,jbnd->bnij", q, k), -1)
        mixed = torch.einsum("ibnd,hnd->ibh", torch.einsum("bnij,jbnd->ibnd", seen, v), self.o)
        made: torch.Tensor = self.norm(mixed + x) if self.joins else self.norm(mixed)
        return made


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, batch, _ = x.shape

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(length, batch * 4, 8).transpose(0, 1)

        seen = torch.softmax(torch.bmm(heads(self.q(x)), heads(self.k(x)).transpose(1, 2)), -1)
        mixed: torch.Tensor = self.o(torch.bmm(seen, heads(self.v(x))).transpose(0, 1).reshape(length, batch, 32))
        return mixed


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.joins = kind == "joins"
        self.mixer = Attention() if kind == "projections" else Mixer(self.joins)
        self.out, self.back, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mixer(x) if self.joins else x + self.mixer(x)
        made: torch.Tensor = self.norm(x + self.back(torch.relu(self.out(x))))
        return made


class SequenceFirst(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 32), nn.Linear(32, 40)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids.t())
        if not (ids >= 0).any():  # which reads across the batch, but in no block
            x = -x
        for block in self.blocks:
            x = block(x)
        made: torch.Tensor = self.head(x.transpose(0, 1))
        return made


def ids_of(length: int) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(40, (3, length))}


@pytest.mark.parametrize("kind", ["joins", "adds", "projections"])
def test_sequence_parallelism_cuts_the_sequence(kind: str) -> None:
    torch.manual_seed(3)
    model = SequenceFirst(kind).double()
    plan = autoplan.plan(model, tp_size=2, sequence_parallel=True, inputs=ids_of(12), prove="none")
    assert plan.sequence_parallel
    assert {one.dim for one in plan.runtime.of(ScatterSequence)} == {-3}
    assert {one.dim for one in plan.runtime.of(ReduceScatterSequence)} == {-3}
    gathered = {one.pattern for one in plan.runtime.of(AllGatherSequenceSumGradient)}
    assert gathered.isdisjoint({"blocks.*", "blocks.0", "blocks.1"})  # or a whole block would run on all positions
    for length in (12, 9):
        report = autoplan.verify(copy.deepcopy(model), plan, inputs=ids_of(length), checks=["forward"])
        assert report.ok, report


@pytest.mark.parametrize("kind", ["adds", "projections"])
def test_context_parallelism_cuts_the_sequence(kind: str) -> None:
    torch.manual_seed(3)
    model = SequenceFirst(kind).double()
    plan = autoplan.plan(model, cp_size=2, inputs=ids_of(12), prove="none")
    cut = {(one.pattern.partition(".")[0], one.dim) for one in plan.runtime.of(OwnPositions)}
    assert cut and cut <= {("blocks", -3), ("table", -2)}  # (sequence, batch, features), or ids of (sequence, batch)
    for length in (12, 9):
        report = autoplan.verify(copy.deepcopy(model), plan, inputs=ids_of(length), checks=["forward"])
        assert report.ok, report

"""Recurrent networks: the rows of their weights lie in shards, something is gathered, and every number is exact."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from slow_cases import marked
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import autoplan
from autoplan.values import CellCall, RecurrentCall

IDS = torch.arange(14).view(2, 7) * 5
WIDTH, HIDDEN = 16, 24


class Network(nn.Module):
    def __init__(self, inner: nn.Module, width: int = HIDDEN, packed: bool = False) -> None:
        super().__init__()
        self.table, self.inner, self.head, self.packed = nn.Embedding(80, WIDTH), inner, nn.Linear(width, 80), packed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        if not self.packed:
            return self.head(self.inner(x)[0])
        made, _ = self.inner(pack_padded_sequence(x, torch.tensor([7, 4]), batch_first=True))
        return self.head(pad_packed_sequence(made, batch_first=True)[0])


class Cell(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(80, WIDTH), inner, nn.Linear(HIDDEN, 80)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        state, states = None, []
        for step in self.table(ids).unbind(1):
            state = self.inner(step, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return self.head(torch.stack(states, 1))


def of(kind: type[nn.Module], *, layers: int = 2, packed: bool = False, **how: Any) -> Callable[[], nn.Module]:
    width = how.get("proj_size", HIDDEN) * (2 if how.get("bidirectional") else 1)
    return lambda: Network(kind(WIDTH, HIDDEN, layers, batch_first=True, **how), width, packed)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": of(nn.LSTM),
    "LSTM both ways with a projection": of(nn.LSTM, bidirectional=True, proj_size=10),
    "GRU without biases": of(nn.GRU, bias=False),
    "packed sequences": of(nn.RNN, layers=1, packed=True, nonlinearity="relu"),
    "LSTM cell": lambda: Cell(nn.LSTMCell(WIDTH, HIDDEN)),
    "GRU cell": lambda: Cell(nn.GRUCell(WIDTH, HIDDEN)),
    "RNN cell without biases": lambda: Cell(nn.RNNCell(WIDTH, HIDDEN, bias=False)),
}


QUICK = [("LSTM", 2), ("LSTM", 5), ("GRU cell", 2)]
CASES = list(product(MODELS, (2, 5)))


@pytest.mark.parametrize(("name", "tp"), marked(CASES, slow=[case for case in CASES if case not in QUICK]))
def test_rows_in_shards_are_exact(name: str, tp: int) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    plan = autoplan.plan(model, tp_size=tp, inputs={"ids": IDS})
    whole = {item.fqn for item in plan.replicated}
    assert not [key for key, p in model.named_parameters() if p.dim() > 1 and key in whole], plan
    report = autoplan.verify(model, plan, tp_size=tp, inputs={"ids": IDS})
    assert report.ok, report


@pytest.mark.parametrize(
    ("name", "kind", "word"), [("LSTM", RecurrentCall, "each rank"), ("GRU cell", CellCall, "state")]
)
def test_the_plan_says_what_is_gathered(name: str, kind: Any, word: str) -> None:
    plan = autoplan.plan(MODELS[name](), tp_size=2, inputs={"ids": IDS}, prove="none")
    assert [type(one) for one in plan.runtime.of(kind)] == [kind]
    assert "a step needs the full previous state" in plan.explain("inner") and word in plan.explain("inner")


def test_what_somebody_keeps_whole_is_whole() -> None:
    given = {"inner.*": "replicate"}
    plan = autoplan.plan(MODELS["LSTM"](), tp_size=2, inputs={"ids": IDS}, prove="none", overrides=given)
    assert not plan.runtime.of(RecurrentCall)
    assert {"inner.weight_ih_l0", "inner.weight_hh_l1"} <= {item.fqn for item in plan.replicated}

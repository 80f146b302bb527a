"""Large tables beside that of tokens: cut by columns, whatever is looked up in them, and every number is exact."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from slow_cases import marked
from torch import nn

import autoplan


class Recommender(nn.Module):
    """A table for each kind of thing, one of them in bags."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.user, self.item, self.tags = (
            nn.Embedding(900, 20),
            nn.Embedding(300, 20),
            nn.EmbeddingBag(500, 20, mode=mode),
        )
        self.up, self.down = nn.Linear(60, 32), nn.Linear(32, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.user(user), self.item(item), self.tags(tags)], -1)
        return self.down(torch.relu(self.up(x)))


class Weighted(nn.Module):
    """The rows of a bag have weights, whose gradients ranks know in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.score, self.norm = nn.EmbeddingBag(500, 20, mode="sum"), nn.Linear(6, 4), nn.LayerNorm(20)

    def forward(self, tags: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.tags(tags, per_sample_weights=self.score(x)))


class Shapes(nn.Module):
    """Ids that are made where none are given (RoCBert's shapes), and a table too large to be held twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shape, self.word = nn.Embedding(5000, 8), nn.Embedding(12000, 16)
        self.up, self.down = nn.Linear(24, 64), nn.Linear(64, 24)

    def forward(self, ids: torch.Tensor, shapes: torch.Tensor | None = None) -> torch.Tensor:
        shapes = torch.zeros_like(ids) if shapes is None else shapes
        x = torch.cat([self.word(ids), self.shape(shapes)], -1)
        return x + self.down(torch.relu(self.up(x)))


class Odd(nn.Module):
    """A head that the model itself reads across, with a number of columns that ranks cannot share evenly."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(300, 16), nn.LayerNorm(16), nn.Linear(16, columns)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(ids))).log_softmax(-1)


SPARSE = {"user": torch.arange(4) * 200, "item": torch.arange(4) * 70, "tags": torch.arange(20).view(4, 5) * 24}
CASES = {
    "sum": (lambda: Recommender("sum"), SPARSE, ("item", "tags")),
    "max": (lambda: Recommender("max"), SPARSE, ("item", "tags")),
    "weighted": (Weighted, {"tags": SPARSE["tags"][:, :4], "x": torch.linspace(-1, 1, 24).view(4, 6)}, ("tags",)),
    "ids that are made": (Shapes, {"ids": torch.arange(14).view(2, 7) * 800}, ("shape",)),
}


@pytest.mark.parametrize(
    ("name", "tp"), marked(product(CASES, (2, 3)), slow=[("max", 3), ("weighted", 3), ("ids that are made", 3)])
)
def test_columns_are_cut_and_gathered(name: str, tp: int) -> None:
    torch.manual_seed(0)
    build, inputs, tables = CASES[name]
    model = build()
    plan = autoplan.plan(model, tp_size=tp, inputs=inputs)
    assert plan.proof.ok, plan
    for table in tables:
        (entry,) = [one for one in plan.entries if one.pattern == table]
        assert entry.segments == (f"1:{model.get_submodule(table).weight.shape[1]}!",)
        assert "moves half as much as summing" in entry.reason
    report = autoplan.verify(model, plan, tp_size=tp, inputs=inputs)
    assert report.ok, report


def test_small_tables_stay_whole() -> None:
    model = nn.Sequential(nn.Embedding(6000, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    model.append(Positions()).append(nn.LayerNorm(32))
    plan = autoplan.plan(model, tp_size=2, inputs={"input": torch.arange(14).view(2, 7)}, prove="none")
    assert any("position" in item.fqn for item in plan.replicated), plan


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.position(torch.arange(x.shape[1]))


@pytest.mark.parametrize(("columns", "cut"), [(301, True), (25, False)])  # 16 on each rank are worth it
def test_a_head_is_gathered_from_uneven_parts(columns: int, cut: bool) -> None:
    plan = autoplan.plan(Odd(columns), tp_size=2, inputs={"ids": torch.arange(14).view(2, 7) * 20})
    assert plan.proof.ok, plan
    styles = {entry.pattern: entry.style for entry in plan.entries}
    assert styles.get("head") == ("colwise_gather_output" if cut else None)

"""Weights that can be split although something on their way looks as if it needed them whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from slow_cases import marked
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import autoplan
from autoplan.common.patterns import matches

WIDTH, INNER = 32, 64


class OnlyTheLoud(nn.Module):
    """What lies below mean + std of all hidden features is cut off: statistics of a split value."""

    def __init__(self, keepdim: bool = True, correction: int = 0) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.keepdim, self.correction = keepdim, correction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.near(torch.tanh(x))
        spread = torch.std(hidden, dim=-1, keepdim=self.keepdim, correction=self.correction)
        spread = spread if self.keepdim else spread.unsqueeze(-1)
        loud = torch.relu(hidden - hidden.mean(-1, keepdim=True) - 0.5 * spread)
        return x + self.far(loud)


class ScaledByVariance(nn.Module):
    """A norm written out, over all heads at once, with the mean of two dims."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.near(torch.tanh(x)).unflatten(-1, (8, 8))
        heads = heads * torch.rsqrt(heads.var((-2, -1), keepdim=True) + 1e-3)
        return x + self.far(torch.tanh(heads).flatten(-2))


class Normalized(nn.Module):
    """Hidden features divided by their length, by three ways of writing it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.near, self.far, self.way = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.near(torch.tanh(x))
        if self.way == "normalize":
            hidden = F.normalize(hidden, dim=-1)
        elif self.way == "norm":
            hidden = hidden / (hidden.norm(dim=-1, keepdim=True) + 1e-3)
        else:
            hidden = hidden * torch.linalg.vector_norm(hidden, dim=-1).unsqueeze(-1).reciprocal()
        return x + self.far(torch.tanh(hidden))


class WeightNormed(nn.Module):
    """Two convolutions whose weights are directions and lengths; the second's run over the split channels."""

    def __init__(self) -> None:
        super().__init__()
        self.near = weight_norm(nn.Conv1d(WIDTH, INNER, 3, padding=1))
        self.far = weight_norm(nn.Conv1d(INNER, WIDTH, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.far(torch.tanh(self.near(torch.tanh(x).mT))).mT


class NormedInside(nn.Module):
    """torch's own RMSNorm over a width that is split."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.level, self.far = nn.Linear(WIDTH, INNER), nn.RMSNorm(INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.far(torch.tanh(self.level(self.near(torch.tanh(x)))))


class MeasuredByIdentity(nn.Module):
    """The way down is divided by its lengths; its weight is read by sending an identity matrix through it.

    Its bias is taken off again before, as adapters that are normed do.
    """

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.near, self.far, self.detached = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), detached
        self.low, self.high = nn.Linear(INNER, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.near(torch.tanh(x)))
        identity = torch.eye(self.low.weight.shape[1], dtype=x.dtype)
        added = self.high(self.low(identity)).T
        length = (self.far.weight + (added.detach() if self.detached else added)).norm(dim=1)
        return x + (self.far(hidden) - self.far.bias + self.high(self.low(hidden))) / length


class BesideIdentity(nn.Module):
    """An identity matrix that is multiplied, and added to what it was multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.turn = nn.Parameter(torch.randn(INNER, INNER) / INNER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = torch.eye(INNER, dtype=x.dtype)
        turned = torch.tanh(self.near(torch.tanh(x))) @ (identity + identity @ self.turn)
        return x + self.far(torch.tanh(turned))


class Bags(nn.Module):
    """A table whose rows are averaged, and an MLP that reads them."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.table, self.near, self.far = nn.EmbeddingBag(60, INNER, mode=mode), nn.Linear(INNER, 32), nn.Linear(32, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.far(torch.tanh(self.near(torch.tanh(self.table(x)))))


class TwoLayerHead(nn.Module):
    """A classifier that is wider inside than the classes are many: its two layers are a pair, not a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(WIDTH, INNER), nn.Linear(INNER, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.far(torch.tanh(self.near(torch.tanh(x))))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.far(torch.tanh(self.near(torch.tanh(x))))


class FrozenMatrix(nn.Module):
    """A bare, frozen parameter leads into the stream. The input lies channels first: matmul makes copies of it."""

    def __init__(self) -> None:
        super().__init__()
        self.above = Mlp()
        self.bridge = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        channels_first = x.transpose(1, 2).contiguous()
        return self.above(torch.matmul(channels_first.transpose(1, 2), self.bridge))


class LinearOfColumns(nn.Module):
    """A linear layer whose input lies channels first is a product and a sum. Everyone reads all of its result."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.bridge, self.above = nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.above(self.bridge(x.transpose(1, 2).contiguous().transpose(1, 2)))


class RowByNumber(nn.Module):
    """Where the input is padded, a row of the table is taken by its number: a third time that the table is read."""

    def __init__(self, row: int, whole: bool) -> None:
        super().__init__()
        self.table, self.above, self.row, self.whole = nn.Embedding(512, WIDTH), Mlp(), row, whole

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        padding = self.table.weight[self.row] if self.whole else self.table.weight[self.row, : WIDTH // 2].repeat(2)
        padded = torch.where((ids % 3 == 0)[..., None], padding, self.table(ids))
        return self.above(padded) @ self.table.weight.T


class TableForEachFrame(nn.Module):
    """One text is read next to each of three frames: its ids are copied before they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.above, self.out = nn.Embedding(512, WIDTH), Mlp(), nn.Linear(WIDTH, 8, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.above(self.table(ids.repeat_interleave(3, dim=0))))


class Chosen(nn.Module):
    """Each position is worked on by the member that it scores highest; a trace may see one of them at work."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 8)
        self.members = nn.ModuleDict({f"m{n}": Mlp() for n in range(7)} | {"m7": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        best = self.score(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number in best.indices.unique().tolist():
            rows = torch.where(best.indices == number)[0]
            out = out.index_add(0, rows, self.members[f"m{number}"](flat[rows]) * best.values[rows, None])
        return x + out.view_as(x)


class OnePieceWhole(nn.Module):
    """Equal pieces of one projection, of which a norm reads the first across and the second is split."""

    def __init__(self, part: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, INNER)
        self.norm, self.out, self.part = nn.LayerNorm(INNER), nn.Linear(INNER, WIDTH), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept, worked = self.part(self.both(x))
        return x + self.out(self.norm(kept + self.down(torch.tanh(worked))).softmax(-1))


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    split: frozenset[str]
    inputs: dict[str, torch.Tensor]


STREAM = {"x": torch.randn(2, 6, WIDTH)}
IDS = {"ids": torch.randint(512, (2, 6))}
BOTH = frozenset({"near.weight", "near.bias", "far.weight"})

PARTING: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "chunk": lambda both: both.chunk(2, -1),
    "split": lambda both: torch.split(both, split_size_or_sections=INNER, dim=2),
    "tensor_split": lambda both: both.tensor_split(2, dim=-1),
    "dsplit": lambda both: both.dsplit(2),
}

CASES = {
    **{
        f"divided by a length, {way}": Case(partial(Normalized, way), BOTH, STREAM)
        for way in ("normalize", "norm", "vector_norm")
    },
    "weight norms": Case(
        WeightNormed, frozenset({f"{name}.parametrizations.weight.original1" for name in ("near", "far")}), STREAM
    ),
    **{
        f"identity sent through, {detached=}": Case(
            partial(MeasuredByIdentity, detached), BOTH | {"low.weight"}, STREAM
        )
        for detached in (False, True)
    },
    "identity added": Case(BesideIdentity, frozenset({"turn"}), STREAM),
    "RMSNorm inside": Case(NormedInside, BOTH | {"level.weight"}, STREAM),
    **{
        f"bags, {mode}": Case(
            partial(Bags, mode), frozenset({"table.weight", "near.weight"}), {"x": torch.arange(15).view(5, 3) * 4}
        )
        for mode in ("mean", "sum", "max")
    },
    "a head of two layers": Case(TwoLayerHead, BOTH, STREAM),
    "std": Case(OnlyTheLoud, BOTH, STREAM),
    "std, dim dropped": Case(lambda: OnlyTheLoud(keepdim=False, correction=1), BOTH, STREAM),
    "variance over heads and width": Case(ScaledByVariance, BOTH, STREAM),
    "bare matrix": Case(FrozenMatrix, frozenset({"bridge", "above.near.weight", "above.far.weight"}), STREAM),
    "sum after a product": Case(lambda: LinearOfColumns(False), frozenset({"bridge.weight", "bridge.bias"}), STREAM),
    "row of a table": Case(lambda: RowByNumber(300, True), frozenset({"table.weight"}), IDS),
    "table read with copied ids": Case(TableForEachFrame, frozenset({"table.weight"}), IDS),
    "part of a row": Case(lambda: RowByNumber(-1, False), frozenset({"table.weight"}), IDS),
    **{
        f"one of two pieces, {way}": Case(
            partial(OnePieceWhole, part), frozenset({"both.weight", "both.bias", "down.weight"}), STREAM
        )
        for way, part in PARTING.items()
    },
    "members that never ran": Case(Chosen, frozenset(f"members.m{n}.far.weight" for n in range(7)), STREAM),
    "frozen": Case(lambda: LinearOfColumns(True), frozenset({"bridge.weight", "bridge.bias"}), STREAM),
}


VARIANTS = [  # of what another case shows
    "bags, sum", "std, dim dropped", "divided by a length, norm", "divided by a length, normalize",
    "identity sent through, detached=True", "one of two pieces, split", "one of two pieces, tensor_split",
    "one of two pieces, dsplit",
]  # fmt: skip


@pytest.mark.parametrize("name", marked(CASES, slow=VARIANTS))
def test_split_and_exact(name: str, size: int = 4) -> None:
    torch.manual_seed(0)
    build, split, inputs = CASES[name]
    model = build()
    plan = autoplan.plan(model, tp_size=size, inputs=inputs)
    rules = [rule.pattern for rule in plan.runtime.parameters if rule.dim is not None]
    assert all(any(matches(rule, name) for rule in rules) for name in split), plan
    report = autoplan.verify(model, plan, tp_size=size, inputs=inputs, checks=["parameters", "forward", "state_dict"])
    assert report.ok and max(report.gradients.values()) < 1e-9, report.findings


class Vmapped(nn.Module):
    """One part whose calls see wrappers around the values, and one that is plain."""

    def __init__(self) -> None:
        super().__init__()
        self.ups, self.downs = nn.Parameter(torch.randn(4, WIDTH, INNER)), nn.Parameter(torch.randn(4, INNER, WIDTH))
        self.near, self.far = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.vmap(lambda up, down: torch.relu(x @ up) @ down)(self.ups, self.downs).sum(0)
        return x + self.far(torch.tanh(self.near(x)))


def test_an_ensemble_under_vmap_is_split_beside_plain_layers() -> None:
    inputs = {"x": torch.randn(2, 6, WIDTH, dtype=torch.float64)}
    model = Vmapped().double()
    plan = autoplan.plan(model, 2, inputs=inputs)
    assert {rule.pattern for rule in plan.runtime.parameters if rule.dim is not None} == BOTH | {"ups", "downs"}
    assert autoplan.verify(model, plan, inputs=inputs).ok


class FewRows(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH)
        self.near, self.far = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return x + self.far(torch.tanh(self.near(x)))


@pytest.mark.parametrize("rows", [9, 10])
def test_no_rank_is_left_without_a_row(rows: int) -> None:
    """Nine rows in pieces of three: the fourth rank would have none, and the table is cut by columns."""
    inputs = {"ids": torch.arange(8).view(2, 4)}
    model = FewRows(rows).double()
    plan = autoplan.plan(model, 4, inputs=inputs)
    dims = {rule.pattern: rule.dim for rule in plan.runtime.parameters if rule.dim is not None}
    assert dims["table.weight"] == 1 or rows % 4 >= 2
    report = autoplan.verify(model, plan, inputs=inputs)
    assert report.ok, report.findings


# Products that add to a value (`addmm`, `baddbmm`), summed over ranks: operands by keyword, `alpha` and `beta`.


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, product: Product) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 48, bias=False), nn.Parameter(torch.randn(48, 64) / 7)
        self.norm, self.product = nn.LayerNorm(64), product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.up(self.norm(x)).relu(), self.down)


def by_keywords(x: torch.Tensor, h: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return x.baddbmm(batch1=h, batch2=down.expand(len(x), -1, -1), beta=0.3, alpha=2)


def by_place(x: torch.Tensor, h: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return torch.addmm(x.flatten(0, 1), h.flatten(0, 1), down, alpha=0.5).view_as(x)


@pytest.mark.parametrize("product", [by_keywords, by_place])
def test_they_are_summed_over_ranks(product: Product) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(Block(product), Block(product)), {"input": torch.randn(3, 5, 64)}
    plan = autoplan.plan(model, tp_size=2, inputs=inputs)
    assert {entry.pattern: entry.style for entry in plan.entries}["*"] == "rowwise", plan
    assert autoplan.verify(model, plan, inputs=inputs).ok

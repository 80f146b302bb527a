"""Indexing, scatter, experts that are chosen, tables, tied and shared weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
IDS = ids(2, 6)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.block, self.head = nn.Embedding(32, 16), Mlp(), nn.Linear(16, 32, bias=False)

    def forward(self, input_ids):
        return self.head(self.block(self.table(input_ids)))


@case(call(IDS))
class TiedHead(Tokens):
    """The head is the table: sound."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.table.weight


@case(call(IDS), allowed=HOSTILE)
class TiedByFunction(Tokens):
    def forward(self, input_ids):
        return F.linear(self.block(self.table(input_ids)), self.table.weight)


@case(call(IDS), call(ids(2, 6, below=32, seed=3)), allowed=HOSTILE)
class DerivedIds(Tokens):
    """Rows are looked up by ids that are made inside: zeros, then all that is there."""

    def forward(self, input_ids):
        types = torch.zeros_like(input_ids) + (input_ids > 15) * 20
        return self.head(self.block(self.table(input_ids) + self.table(types)))


@case(call(IDS, types=torch.zeros(2, 6).long()), call(IDS, types=IDS), call(IDS), allowed=HOSTILE)
class SecondTable(Tokens):
    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(32, 16)

    def forward(self, input_ids, types=None):
        types = torch.zeros_like(input_ids) if types is None else types
        return self.head(self.block(self.table(input_ids) + self.kinds(types)))


@case(call(IDS), allowed=HOSTILE)
class BigramTable(Tokens):
    """A hash of two ids picks a row."""

    def __init__(self):
        super().__init__()
        self.pairs = nn.Embedding(64, 16)

    def forward(self, input_ids):
        two = (input_ids * 31 + input_ids.roll(1, 1) * 17) % 64
        return self.head(self.block(self.table(input_ids) + self.pairs(two)))


@case(call(ids(2, 6, below=31)), allowed=HOSTILE)
class TableWithPadding(Tokens):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 16, padding_idx=0)


@case(call(ids(2, 6)), allowed=HOSTILE)
class TableWithLargestNorm(Tokens):
    """max_norm rewrites rows while they are looked up."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 16, max_norm=1.0)


@case(call(IDS), allowed=HOSTILE)
class BagOfRows(Tokens):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(32, 16, mode="mean")


@case(call(IDS), allowed=HOSTILE)
class OneHotTimesTable(Tokens):
    def forward(self, input_ids):
        return self.head(self.block(F.one_hot(input_ids, 32).to(self.table.weight.dtype) @ self.table.weight))


@case(call(IDS), allowed=HOSTILE)
class TableByIndex(Tokens):
    def forward(self, input_ids):
        return self.head(
            self.block(self.table.weight[input_ids] + self.table.weight[-1] + self.table.weight[:4].sum(0))
        )


@case(call(X))
class SharedBlock(nn.Module):
    """One block runs twice: sound."""

    def __init__(self):
        super().__init__()
        self.a = Mlp()
        self.b = self.a

    def forward(self, x):
        return self.b(self.a(x))


@case(call(X), allowed=HOSTILE)
class TransposedSharing(nn.Module):
    """The second layer is the first one, transposed."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)

    def forward(self, x):
        return x + F.linear(self.up(x).relu(), self.up.weight.t())


@case(call(X), allowed=HOSTILE)
class SharedAcrossRoles(nn.Module):
    """One square weight widens in one place and narrows in another."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.b.weight = self.a.weight

    def forward(self, x):
        return x + self.b(self.a(x).relu())


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(Mlp(16, 8) for _ in range(4))


@case(call(X), call(floats(2, 1, 16)), allowed=HOSTILE)
class TopOneLoop(Experts):
    def forward(self, x):
        flat = x.flatten(0, 1)
        best = self.router(flat).softmax(-1).max(-1)
        y = torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            rows = (best.indices == n).nonzero(as_tuple=True)[0]
            if len(rows):
                y = y.index_add(0, rows, expert(flat[rows]) * best.values[rows, None])
        return x + y.view_as(x)


@case(call(X), allowed=HOSTILE)
class TopTwoStacked(nn.Module):
    """Expert weights are gathered for each token."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 8) / 4), nn.Parameter(torch.randn(4, 8, 16) / 3)

    def forward(self, x):
        w, chosen = self.router(x).softmax(-1).topk(2, -1)
        h = torch.einsum("btd,btkdf->btkf", x, self.up[chosen]).relu()
        return x + (torch.einsum("btkf,btkfd->btkd", h, self.down[chosen]) * w[..., None]).sum(2)


@case(call(X), allowed=HOSTILE)
class CapacityDrops(Experts):
    """An expert takes three tokens at most, the first that come."""

    def forward(self, x):
        flat = x.flatten(0, 1)
        chosen = F.one_hot(self.router(flat).argmax(-1), 4)
        place = (chosen.cumsum(0) - 1) * chosen
        kept = chosen * (place < 3)
        return x + sum(e(flat) * kept[:, n, None] for n, e in enumerate(self.experts)).view_as(x)


@case(call(X), allowed=HOSTILE)
class RoutesByHidden(Mlp):
    """The largest of all hidden units picks the row of a table."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(32, 16)

    def forward(self, x):
        h = self.inner(x)
        return x + self.down(h) + self.rows(h.argmax(-1))


@case(call(X), allowed=HOSTILE)
class SortsHidden(Mlp):
    def forward(self, x):
        return x + self.down(self.inner(x).sort(-1).values)


@case(call(X), allowed=HOSTILE)
class ScattersHidden(Mlp):
    """Hidden units go to places that a fixed permutation names."""

    def __init__(self):
        super().__init__()
        self.register_buffer("places", torch.randperm(32))

    def forward(self, x):
        h = self.inner(x)
        return x + self.down(torch.zeros_like(h).index_copy(-1, self.places, h))


@case(call(X), allowed=HOSTILE)
class PicksFixedUnits(Mlp):
    """Four units by number are doubled."""

    def forward(self, x):
        h = self.inner(x).clone()
        h[..., [0, 3, 17, 31]] *= 2
        return x + self.down(h)


@case(call(X), allowed=HOSTILE)
class GathersHeads(Attention):
    """A permutation of heads."""

    def mixed(self, x):
        y = torch.softmax(self.scores(x), -1) @ parted(self.v(x), self.heads)
        return joined(y[:, [2, 0, 3, 1]])


@case(call(X), allowed=HOSTILE)
class LastTokenPooled(Mlp):
    """The longest row of the sequence by norm."""

    def forward(self, x):
        y = super().forward(x)
        at = y.norm(dim=-1).argmax(1)
        return y[torch.arange(len(y)), at]

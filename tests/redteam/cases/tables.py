"""Recommenders and tabular models: many tables, crosses of features, towers, tasks that share experts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import call, case, floats, ids
from ..parts import Attention, Mlp

C = ids(4, 6)
D = floats(4, 8)
CD = {"ids": C, "dense": D}
BOTH = (2, 4)


@case(call(C, D), inputs=CD, tp=BOTH, vary=False)
class Dlrm(nn.Module):
    """A table for each column, products of all pairs, the upper triangle, a top MLP."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(32, 16) for _ in range(6)])
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.top = nn.Sequential(nn.Linear(16 + 21, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids, dense):
        d = self.bottom(dense)
        rows = torch.stack([d, *[table(ids[:, n]) for n, table in enumerate(self.tables)]], 1)
        pairs = rows @ rows.transpose(1, 2)
        i, j = torch.triu_indices(7, 7, 1)
        return self.top(torch.cat([d, pairs[:, i, j]], 1)).sigmoid().squeeze(1)


@case(call(C, D), inputs=CD, tp=BOTH, vary=False)
class OffsetTable(nn.Module):
    """One table for all columns, an offset for each; factorization machine, linear part and an MLP (DeepFM)."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(6 * 32, 16), nn.Embedding(6 * 32, 1)
        self.register_buffer("offsets", torch.arange(6) * 32)
        self.deep = nn.Sequential(nn.Linear(96 + 8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids, dense):
        at = ids + self.offsets
        v = self.table(at)
        machine = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(-1)
        deep = self.deep(torch.cat([v.flatten(1), dense], 1)).squeeze(1)
        return self.linear(at).sum((1, 2)) + machine + deep


@case(call(D), tp=BOTH)
class DeepCross(nn.Module):
    """Cross layers with low-rank experts, gated."""

    def __init__(self):
        super().__init__()
        self.u, self.v = nn.Parameter(torch.randn(4, 8, 4) / 2), nn.Parameter(torch.randn(4, 4, 8) / 2)
        self.gate, self.bias = nn.Linear(8, 4), nn.Parameter(torch.zeros(8))
        self.deep = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        y = x
        for _ in range(2):
            h = torch.einsum("bd,edr->ber", y, self.u).tanh()
            h = torch.einsum("ber,erd->bed", h, self.v)
            y = x * (h * self.gate(y).softmax(-1)[..., None]).sum(1) + self.bias + y
        return self.deep(y)


@case(call(C, ids(4, 6, seed=3)), inputs={"ids": C, "items": ids(4, 6, seed=3)}, tp=BOTH, vary=False)
class TwoTowers(nn.Module):
    """Two towers, normed, with the other rows of the batch as negatives, and popularity taken off."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(32, 16), nn.Embedding(32, 16)
        self.a, self.b, self.scale = Mlp(), Mlp(), nn.Parameter(torch.tensor(2.0))

    def forward(self, ids, items):
        u = F.normalize(self.a(self.users(ids).mean(1)), dim=-1)
        i = F.normalize(self.b(self.items(items).mean(1)), dim=-1)
        z = self.scale.exp() * u @ i.T
        same = (items[:, None] == items[None]).all(-1) & ~torch.eye(len(z), dtype=torch.bool)
        z = z.masked_fill(same, -1e9)
        at = torch.arange(len(z))
        return (F.cross_entropy(z, at) + F.cross_entropy(z.T, at)) / 2, u, i


@case(
    call(C, ids(4, 6, seed=1), ids(4, 6, seed=2)),
    inputs={"ids": C, "good": ids(4, 6, seed=1), "bad": ids(4, 6, seed=2)},
    tp=BOTH,
    vary=False,
)
class Sequential(nn.Module):
    """SASRec: the table of the history scores next items and sampled ones, padding masked."""

    def __init__(self):
        super().__init__()
        self.table, self.places = nn.Embedding(32, 16, padding_idx=0), nn.Embedding(6, 16)
        self.block, self.mlp, self.norm = Attention(), Mlp(), nn.LayerNorm(16)

    def forward(self, ids, good, bad):
        x = self.table(ids) * 4 + self.places.weight
        x = x * (ids != 0)[..., None]
        x = self.norm(self.mlp(self.block(x)))
        a, b = (x * self.table(good)).sum(-1), (x * self.table(bad)).sum(-1)
        loss = F.softplus(-a) + F.softplus(b)
        return loss[good != 0].mean(), a > b


@case(call(D), tp=BOTH)
class SharedExpertsOfTasks(nn.Module):
    """MMoE: experts in stacked weights, a gate and a tower for each task."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16) / 3), nn.Parameter(torch.randn(4, 16, 8) / 4)
        self.gates = nn.ModuleList([nn.Linear(8, 4, bias=False) for _ in range(3)])
        self.towers = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(3)])

    def forward(self, x):
        h = torch.einsum("bei,eio->beo", torch.einsum("bd,edh->beh", x, self.up).relu(), self.down)
        mixed = [torch.einsum("be,beo->bo", gate(x).softmax(-1), h) for gate in self.gates]
        return {f"task{n}": tower(m).squeeze(-1) for n, (tower, m) in enumerate(zip(self.towers, mixed, strict=True))}


@case(call(D), tp=BOTH)
class UncertaintyWeights(nn.Module):
    """Losses of tasks are weighted by learned variances; a task's logits go into the next one's."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.heads = nn.ModuleList([nn.Linear(16 + n, 1) for n in range(3)])
        self.log_variance = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        h, losses = self.trunk(x), []
        for head in self.heads:
            z = head(h)
            losses.append(F.softplus(z).mean())
            h = torch.cat([h, z], -1)
        return (torch.stack(losses) * torch.exp(-self.log_variance) + self.log_variance).sum(), losses


@case(call(C, ids(4, seed=5)), inputs={"ids": C, "item": ids(4, seed=5)}, tp=BOTH, vary=False)
class InterestNetwork(nn.Module):
    """DIN: an MLP over history, candidate, difference and product gives weights that are not normed."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 8)
        self.score = nn.Sequential(nn.Linear(32, 32), nn.PReLU(), nn.Linear(32, 1))
        self.top = nn.Sequential(nn.Linear(16, 32), nn.PReLU(32), nn.Linear(32, 1))

    def forward(self, ids, item):
        h, c = self.table(ids), self.table(item)
        q = c[:, None].expand_as(h)
        weight = self.score(torch.cat([h, q, h - q, h * q], -1)).squeeze(-1) * (ids > 2)
        return self.top(torch.cat([torch.einsum("bt,btd->bd", weight, h), c], -1))


@case(
    call(ids(9), torch.tensor([0, 2, 2, 6])), inputs={"ids": ids(9), "offsets": torch.tensor([0, 2, 2, 6])}, vary=False
)
class BagsByOffsets(nn.Module):
    """Flat ids with offsets, an empty bag among them, weights of their own."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(32, 16, mode="sum")
        self.weight, self.mlp = nn.Embedding(32, 1), Mlp()

    def forward(self, ids, offsets):
        return self.mlp(self.table(ids, offsets, per_sample_weights=self.weight(ids).squeeze(-1)))


@case(call(C), tp=BOTH)
class QuotientAndRemainder(nn.Module):
    """Large ids in two small tables, multiplied."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.mlp = nn.Embedding(8, 16), nn.Embedding(4, 16), Mlp()

    def forward(self, ids):
        return self.mlp(self.a(torch.div(ids, 4, rounding_mode="floor")) * self.b(ids % 4))


@case(call(C), tp=BOTH)
class SeveralHashes(nn.Module):
    """Three hashed rows of one table are summed by weights of the id."""

    def __init__(self):
        super().__init__()
        self.table, self.weight, self.mlp = nn.Embedding(16, 16), nn.Embedding(32, 3), Mlp()

    def forward(self, ids):
        at = torch.stack([(ids * p + 7) % 16 for p in (3, 5, 11)], -1)
        return self.mlp((self.table(at) * self.weight(ids)[..., None]).sum(-2))


@case(call(C), tp=BOTH)
class FeaturesAttend(nn.Module):
    """AutoInt: tokens are columns, the head reads all of them at once."""

    def __init__(self):
        super().__init__()
        self.table, self.block, self.skip, self.head = (
            nn.Embedding(32, 16),
            Attention(),
            nn.Linear(16, 16),
            nn.Linear(96, 2),
        )

    def forward(self, ids):
        x = self.table(ids)
        return self.head((self.block(x) + self.skip(x)).relu().flatten(1))


@case(call(D), tp=BOTH)
class NumericTokens(nn.Module):
    """FT-Transformer: each number scales a vector of its own; a class token is last."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 16) / 4), nn.Parameter(torch.randn(8, 16) / 4)
        self.token, self.block, self.mlp = nn.Parameter(torch.randn(16)), Attention(), Mlp()
        self.head = nn.Sequential(nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        t = x[..., None] * self.weight + self.bias
        t = torch.cat([t, self.token.expand(len(t), 1, -1)], 1)
        return self.head(self.mlp(self.block(t))[:, -1])


@case(call(D), tp=BOTH)
class SparseSteps(nn.Module):
    """TabNet: steps of attention over columns with a prior, and sparsemax by sorting."""

    def __init__(self):
        super().__init__()
        self.first, self.attend, self.step = nn.Linear(8, 32), nn.Linear(16, 8), nn.Linear(8, 64)
        self.out = nn.Linear(16, 2)

    def sparse(self, z):
        s = z.sort(-1, descending=True).values
        n = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype)
        total = s.cumsum(-1) - 1
        count = (s - total / n > 0).sum(-1, keepdim=True)
        return (z - total.gather(-1, count - 1) / count).clamp(min=0)

    def forward(self, x):
        prior, out, a = torch.ones_like(x), 0, F.glu(self.first(x))
        for _ in range(2):
            mask = self.sparse(self.attend(a) * prior)
            prior = prior * (1.3 - mask)
            d, a = F.glu(self.step(mask * x)).chunk(2, -1)
            out = out + d.relu()
        return self.out(out)


@case(call(D), tp=BOTH)
class SoftTrees(nn.Module):
    """Oblivious decision trees (NODE): soft splits, products over all leaves."""

    def __init__(self):
        super().__init__()
        self.pick, self.at = nn.Parameter(torch.randn(8, 8, 3)), nn.Parameter(torch.randn(8, 3))
        self.leaves = nn.Parameter(torch.randn(8, 8, 4))
        bits = torch.arange(8)[:, None] >> torch.arange(3) & 1
        self.register_buffer("bits", bits.double())

    def forward(self, x):
        s = (torch.einsum("bd,dtk->btk", x, self.pick.softmax(0)) - self.at).sigmoid()
        s = s[:, :, None]
        p = (self.bits.to(x.dtype) * s + (1 - self.bits.to(x.dtype)) * (1 - s)).prod(-1)
        return torch.einsum("btl,tlo->bo", p, self.leaves)


@case(call(ids(2, 6)), tp=(2, 4))
class PaddingOfAnyRank(nn.Module):
    """Nothing says how many dims the ids have; gradients of rows are scaled by how often an id comes."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 16, padding_idx=3, scale_grad_by_freq=True)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 32)

    def forward(self, numbers):
        return self.down(torch.tanh(self.up(self.table(numbers))))

"""Codebooks, memories and keys: quantised hidden values, averages that training moves, caches that are written."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Mlp

X = floats(2, 6, 16)
BOTH = (2, 4)


class Quantised(nn.Module):
    """An encoder, a codebook of 12 rows of 32, a decoder."""

    def __init__(self):
        super().__init__()
        self.encode, self.book, self.decode = nn.Linear(16, 32), nn.Embedding(12, 32), nn.Linear(32, 16)

    def nearest(self, z):
        return torch.cdist(z, self.book.weight[None]).argmin(-1)

    def forward(self, x):
        z = self.encode(x)
        at = self.nearest(z)
        q = self.book(at)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return self.decode(z + (q - z).detach()), loss, at


@case(call(X), tp=BOTH)
class PlainCodes(Quantised):
    pass


@case(call(X), tp=BOTH)
class ExpandedDistance(Quantised):
    """|z|² - 2 z·e + |e|², flattened."""

    def nearest(self, z):
        flat, e = z.flatten(0, 1), self.book.weight
        away = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ e.T + e.pow(2).sum(1)
        return away.argmin(1).view(z.shape[:2])


@case(call(X), tp=BOTH)
class CosineCodes(Quantised):
    def nearest(self, z):
        return (F.normalize(z, dim=-1) @ F.normalize(self.book.weight, dim=-1).T).argmax(-1)


class Averaged(nn.Module):
    """The codebook is a buffer that training moves towards what it stands for."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("book", floats(12, 32) * 0.5)
        self.register_buffer("count", torch.ones(12))
        self.register_buffer("total", floats(12, 32) * 0.5)

    def forward(self, x):
        z = self.encode(x)
        flat = z.flatten(0, 1)
        at = torch.cdist(flat, self.book).argmin(-1)
        if self.training:
            with torch.no_grad():
                self.move(flat, F.one_hot(at, 12).to(x.dtype))
        q = F.embedding(at, self.book).view_as(z)
        return self.decode(z + (q - z).detach()), F.mse_loss(z, q)

    def move(self, z, hot):
        self.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        self.total.mul_(0.9).add_(hot.T @ z, alpha=0.1)
        n = self.count.sum()
        count = (self.count + 1e-5) / (n + 12e-5) * n
        self.book.copy_(self.total / count[:, None])


@case(call(X, _train=True), call(X), tp=BOTH)
class AveragesOfCodes(Averaged):
    pass


@case(call(X, _train=True), call(X), tp=BOTH)
class DeadCodesRevived(Averaged):
    """Codes that nobody used are set to values of the batch."""

    def move(self, z, hot):
        super().move(z, hot)
        dead = self.count < 1.0
        self.book.copy_(torch.where(dead[:, None], z[:12], self.book))


@case(call(X, _train=True), call(X), tp=BOTH)
class FilledAtFirst(Averaged):
    """The first batch of training becomes the codebook."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ready", torch.tensor(False))

    def move(self, z, hot):
        if not self.ready:
            self.book.data.copy_(z[:12])
            self.ready.fill_(True)
        super().move(z, hot)


@case(call(X, _train=True), call(X), tp=BOTH)
class Entropies(Averaged):
    """Usage of codes as an average of soft assignments, and its perplexity."""

    def __init__(self):
        super().__init__()
        self.register_buffer("usage", torch.full((12,), 1 / 12))

    def forward(self, x):
        z = self.encode(x)
        p = (-torch.cdist(z, self.book[None])).softmax(-1)
        if self.training:
            self.usage = self.usage.lerp(p.mean((0, 1)).detach(), 0.1)
        perplexity = (-(self.usage * (self.usage + 1e-9).log()).sum()).exp()
        return self.decode(p @ self.book), perplexity


@case(call(X), tp=BOTH)
class Residuals(nn.Module):
    """RVQ: each book codes what the one before left."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 32), nn.Linear(32, 16)
        self.books = nn.ParameterList(nn.Parameter(floats(8, 32, seed=n) * 0.5) for n in range(3))

    def forward(self, x):
        z = self.encode(x)
        left, out, codes, loss = z, torch.zeros_like(z), [], 0.0
        for book in self.books:
            at = torch.cdist(left, book[None]).argmin(-1)
            q = book[at]
            loss = loss + F.mse_loss(q, left.detach())
            left, out = left - q.detach(), out + q
            codes.append(at)
        return self.decode(z + (out - z).detach()), loss, torch.stack(codes, -1)


@case(call(X), tp=BOTH)
class LookupFree(nn.Module):
    """LFQ: signs of units are bits of a code."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 8), nn.Linear(8, 16)
        self.register_buffer("power", 2 ** torch.arange(8))

    def forward(self, x):
        z = self.encode(x)
        q = torch.where(z > 0, 1.0, -1.0).to(z.dtype)
        p = z.sigmoid().mean((0, 1))
        entropy = -(p * p.log() + (1 - p) * (1 - p).log()).sum()
        return self.decode(z + (q - z).detach()), ((z > 0).long() * self.power).sum(-1), entropy


@case(call(X), tp=BOTH)
class FiniteLevels(nn.Module):
    """FSQ: each unit has levels of its own, from a list of the module."""

    levels = (8, 5, 5, 3)

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 4), nn.Linear(4, 16)

    def forward(self, x):
        level = torch.tensor(self.levels, dtype=x.dtype)
        z = self.encode(x).tanh() * (level - 1) / 2
        q = z + (z.round() - z).detach()
        basis = torch.tensor([1, 8, 40, 200])
        return self.decode(q), ((q + (level - 1) / 2).round().long() * basis).sum(-1)


@case(call(X), tp=BOTH)
class GroupedCodes(nn.Module):
    """Four groups of units, a book for each, one shared projection."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 32), nn.Linear(32, 16)
        self.book = nn.Parameter(floats(4, 6, 8) * 0.5)

    def forward(self, x):
        z = self.encode(x).unflatten(-1, (4, 8))
        away = (z[..., None, :] - self.book).pow(2).sum(-1)
        hot = F.one_hot(away.argmin(-1), 6).to(x.dtype)
        hot = hot + away.neg().softmax(-1) - away.neg().softmax(-1).detach()
        return self.decode(torch.einsum("btgn,gnd->btgd", hot, self.book).flatten(-2))


@case(call(X), tp=BOTH)
class KeysAndValues(nn.Module):
    """A memory of 24 rows, read by a softmax over the best three."""

    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(16, 32), nn.Linear(32, 16)
        self.keys, self.values = nn.Parameter(floats(24, 32)), nn.Embedding(24, 32)

    def forward(self, x):
        top = (self.query(x) @ self.keys.T / 32**0.5).topk(3, -1)
        return x + self.out((top.values.softmax(-1)[..., None] * self.values(top.indices)).sum(-2))


@case(call(X), call(X), tp=BOTH)
class WrittenMemory(nn.Module):
    """What was seen is written into a ring of rows, and read by attention."""

    def __init__(self):
        super().__init__()
        self.key, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.mlp = Mlp()
        self.register_buffer("rows", torch.zeros(8, 16))
        self.register_buffer("at", torch.tensor(0))

    def forward(self, x):
        k = self.key(x)
        read = (k @ self.rows.T).softmax(-1) @ self.rows
        place = (self.at + torch.arange(2)) % 8
        self.rows = self.rows.index_copy(0, place, k.mean(1).detach())
        self.at = (self.at + 2) % 8
        return self.mlp(x + self.out(read))


@case(call(X), call(X), tp=BOTH)
class QueueOfHidden(nn.Module):
    """MoCo's queue of normalised keys, in columns."""

    def __init__(self):
        super().__init__()
        self.body, self.project = Mlp(), nn.Linear(16, 32)
        self.register_buffer("queue", F.normalize(floats(32, 12), dim=0))
        self.pointer = 0

    def forward(self, x):
        z = F.normalize(self.project(self.body(x).mean(1)), dim=-1)
        logits = z @ self.queue.clone() / 0.2
        with torch.no_grad():
            self.queue[:, self.pointer : self.pointer + 2] = z.T
            self.pointer = (self.pointer + 2) % 12
        return logits


@case(call(X, _train=True), call(X), tp=BOTH)
class CentreOfClass(nn.Module):
    """Centres of classes are moved by what is near them; distances are the logits."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.register_buffer("centre", floats(5, 16))

    def forward(self, x):
        h = self.body(x).mean(1)
        z = -torch.cdist(h, self.centre.clone())
        if self.training:
            p = z.softmax(-1).detach()
            self.centre.lerp_((p.T @ h.detach()) / p.sum(0)[:, None], 0.1)
        return z


@case(call(X, _train=True), call(X), tp=BOTH)
class CentresOfHidden(nn.Module):
    """Means of the hidden units, moved in training, are taken off: a buffer as wide as the cut units."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        h = self.up(x)
        if self.training:
            self.steps += 1
            self.mean += (h.detach().mean((0, 1)) - self.mean) / self.steps
        return x + self.down((h - self.mean).relu())


@case(call(X, _train=True), call(X), tp=BOTH)
class WhitenedUnits(nn.Module):
    """The covariance of units is averaged, and its root divides them: mixed over all units."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 8), nn.Linear(8, 16)
        self.register_buffer("cov", torch.eye(8))

    def forward(self, x):
        h = self.up(x)
        if self.training:
            flat = h.detach().flatten(0, 1)
            self.cov.mul_(0.9).add_(flat.T @ flat / flat.shape[0], alpha=0.1)
        value, vector = torch.linalg.eigh(self.cov + 0.01 * torch.eye(8, dtype=x.dtype))
        return x + self.down(h @ (vector * value.rsqrt()) @ vector.T)


@case(call(X), tp=BOTH, allowed=HOSTILE)
class UsageCounted(nn.Module):
    """How often each hidden unit was on, counted in a plain tensor of the module."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.on = nn.Linear(16, 32), nn.Linear(32, 16), None

    def forward(self, x):
        h = self.up(x).relu()
        count = (h > 0).sum((0, 1))
        self.on = count if self.on is None else self.on + count
        return x + self.down(h / (1 + self.on.to(h.dtype) / 100))


@case(call(ids(2, 6)), tp=BOTH)
class HashedTables(nn.Module):
    """Rows of three tables by hashes of n-grams, gated."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(16, 16) for _ in range(3))
        self.gate, self.mlp = nn.Linear(16, 3), Mlp()

    def forward(self, input_ids):
        before = F.pad(input_ids, (1, 0))[:, :-1]
        at = [input_ids % 16, (input_ids * 31 + before) % 16, (input_ids ^ (before * 7)) % 16]
        rows = torch.stack([table(one) for table, one in zip(self.tables, at, strict=True)], -2)
        return self.mlp((self.gate(rows[..., 0, :]).softmax(-1)[..., None] * rows).sum(-2))

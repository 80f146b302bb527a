"""What models keep between calls, tie, derive, or let hooks do for them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp

X = floats(2, 6, 16)
two = case(call(X), call(X.flip(0)))


@two
class StreamOfCallBefore(nn.Module):
    """A memory of the stream, detached, is read by attention in the next call."""

    def __init__(self):
        super().__init__()
        self.attention, self.mlp, self.memory = Attention(), Mlp(), None

    def forward(self, x):
        seen = x if self.memory is None else torch.cat([self.memory, x], 1)
        y = self.attention(seen)[:, -x.shape[1] :]
        self.memory = x.detach()
        return self.mlp(y)


@two
class CovarianceKept(nn.Module):
    """A running covariance of the stream whitens it."""

    def __init__(self):
        super().__init__()
        self.mlp = Mlp()
        self.register_buffer("covariance", torch.eye(16))

    def forward(self, x):
        h = self.mlp(x)
        flat = h.detach().flatten(0, 1)
        self.covariance.mul_(0.9).add_(flat.T @ flat / flat.shape[0], alpha=0.1)
        return torch.linalg.solve(self.covariance, h.mT).mT


@two
class HiddenCovarianceKept(nn.Module):
    """The same of hidden units."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x):
        h = self.up(x)
        self.scale.lerp_(h.detach().pow(2).mean((0, 1)), 0.1)
        return self.down(h / (self.scale + 1e-3).sqrt())


@two
class FeaturesByOwnHook(nn.Module):
    """A hook made in the constructor keeps what a block gives, and the forward reads it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.last, self.kept = Mlp(), Mlp(), nn.Linear(16, 8), {}
        self.a.register_forward_hook(lambda module, given, out: self.kept.__setitem__("a", out))

    def forward(self, x):
        y = self.b(self.a(x))
        return self.last(y + self.kept.pop("a"))


@two
class ScaledByPreHook(nn.Module):
    """A pre-hook of a layer normalises its weight into an attribute."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.v = nn.Parameter(torch.randn(32, 16) / 4)
        del self.up.weight
        self.up.weight = None
        self.up.register_forward_pre_hook(self.make)

    def make(self, module, given):
        module.weight = F.normalize(self.v, dim=1)

    def forward(self, x):
        return self.down(self.up(x).relu())


@two
class WeightOfFactors(nn.Module):
    """A weight is the sum of a frozen one and two factors, made in each call, and kept for a penalty."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 32, bias=False).requires_grad_(False)
        self.a, self.b, self.down = nn.Linear(16, 4, bias=False), nn.Linear(4, 32, bias=False), nn.Linear(32, 16)

    def forward(self, x):
        w = self.base.weight + self.b.weight @ self.a.weight
        return self.down(F.linear(x, w).relu()), w.pow(2).sum()


@two
class SoftmaxWeights(nn.Module):
    """Rows of a weight are distributions."""

    def __init__(self):
        super().__init__()
        self.w, self.down = nn.Parameter(torch.randn(32, 16)), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(F.linear(x, self.w.softmax(1)).log1p() if False else F.linear(x, self.w.softmax(1)).tanh())


@two
class ColumnsShared(nn.Module):
    """Two layers use halves of one weight."""

    def __init__(self):
        super().__init__()
        self.w, self.down = nn.Parameter(torch.randn(64, 16) / 4), nn.Parameter(torch.randn(16, 32) / 6)

    def forward(self, x):
        gate, up = F.linear(x, self.w[:32]), F.linear(x, self.w[32:])
        return x + F.linear(F.silu(gate) * up, self.down)


@case(call(ids(2, 6)), call(ids(2, 6, seed=3)))
class CachedTable(nn.Module):
    """A table times a projection is kept until the weights change."""

    def __init__(self):
        super().__init__()
        self.table, self.project, self.mlp = nn.Embedding(32, 8), nn.Linear(8, 16, bias=False), Mlp()
        self.head = nn.Linear(16, 32, bias=False)
        self.key, self.value = None, None

    def forward(self, input_ids):
        key = (self.table.weight._version, self.project.weight._version, torch.is_grad_enabled())
        if self.key != key or torch.is_grad_enabled():
            self.key, self.value = key, self.project(self.table.weight)
        return self.head(self.mlp(F.embedding(input_ids, self.value)))


@two
class SlowCopyInForward(nn.Module):
    """MoCo: the key encoder follows by .data, in each forward."""

    def __init__(self):
        super().__init__()
        self.query, self.key = (nn.Sequential(Mlp(), nn.Linear(16, 8)) for _ in range(2))
        self.key.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                k.data = k.data * 0.9 + q.data * 0.1
        return (F.normalize(self.query(x), dim=-1) * F.normalize(self.key(x), dim=-1)).sum(-1)


@two
class SlowCopyByState(nn.Module):
    """The same by state dicts."""

    def __init__(self):
        super().__init__()
        self.online, self.target = Mlp(), Mlp()
        self.target.requires_grad_(False)

    def forward(self, x):
        fast, slow = self.online.state_dict(), self.target.state_dict()
        self.target.load_state_dict({name: 0.9 * slow[name] + 0.1 * fast[name] for name in slow})
        return self.online(x) - self.target(x).detach()


@two
class SlowCopyByNames(nn.Module):
    """The same by a dict of parameters, and copy_."""

    def __init__(self):
        super().__init__()
        self.online, self.target = Attention(), Attention()
        self.target.requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        fast = dict(self.online.named_parameters())
        for name, slow in self.target.named_parameters():
            slow.copy_(slow * 0.9 + fast[name] * 0.1)

    def forward(self, x):
        self.follow()
        return self.online(x) - self.target(x).detach()


@two
class HeadAssignedInForward(nn.Module):
    """The table's weight is given to the head as an attribute of each call."""

    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Linear(16, 32, bias=False), Mlp(32, 64)
        self.out = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        self.out.weight = nn.Parameter(self.embed.weight.T) if False else self.out.weight
        return self.out(self.body(self.embed(x)))


@case(call(X), call(X, _train=True), call(X), allowed=HOSTILE)
class MergedByTrain(nn.Module):
    """`train` merges and unmerges a low-rank pair into the weight."""

    def __init__(self):
        super().__init__()
        self.w, self.down = nn.Parameter(torch.randn(32, 16) / 4), nn.Linear(32, 16)
        self.a, self.b, self.merged = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.randn(32, 2) / 4), False

    def train(self, mode=True):
        if self.merged == mode:
            self.w.data += (-1 if mode else 1) * (self.b @ self.a).data
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        h = F.linear(x, self.w)
        return self.down((h if self.merged else h + x @ self.a.T @ self.b.T).relu())

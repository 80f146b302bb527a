"""Blocks as people publish them, in pictures, sound, graphs, recommenders, series, control: all of them sound."""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from ..case import call, case, floats, ids

X = floats(2, 8, 16)
M = floats(2, 16, 8, 8)
S = floats(2, 16, 24)
TABLE = ids(4, 6, below=32)


@case(call(S))
class HifiResidual(nn.Module):
    """HiFi-GAN: weight-normed dilated convolutions from residual to residual."""

    def __init__(self):
        super().__init__()
        normed = parametrizations.weight_norm
        self.pre = normed(nn.Conv1d(16, 32, 7, padding=3))
        self.one = nn.ModuleList(normed(nn.Conv1d(32, 32, 3, dilation=d, padding=d)) for d in (1, 3))
        self.two = nn.ModuleList(normed(nn.Conv1d(32, 32, 3, padding=1)) for _ in range(2))
        self.post = normed(nn.Conv1d(32, 1, 7, padding=3))

    def forward(self, x):
        x = self.pre(x)
        for one, two in zip(self.one, self.two, strict=True):
            x = x + two(F.leaky_relu(one(F.leaky_relu(x, 0.1)), 0.1))
        return self.post(F.leaky_relu(x)).tanh()


@case(call(X))
class BitLinears(nn.Module):
    """BitNet b1.58: ternary weights, rounded activations, straight through."""

    class Bit(nn.Linear):
        def forward(self, x):
            x = F.layer_norm(x, x.shape[-1:])
            scale = 1.0 / self.weight.abs().mean().clamp(min=1e-5)
            rounded = (self.weight * scale).round().clamp(-1, 1) / scale
            return F.linear(x, self.weight + (rounded - self.weight).detach())

    def __init__(self):
        super().__init__()
        self.up, self.down = self.Bit(16, 32), self.Bit(32, 16)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)).square())


@case(call(M))
class StandardisedResidual(nn.Module):
    """BiT: StdConv2d by F.conv2d with `var_mean`, GroupNorm before."""

    class Std(nn.Conv2d):
        def forward(self, x):
            w = self.weight
            v, m = torch.var_mean(w, dim=[1, 2, 3], keepdim=True, unbiased=False)
            return F.conv2d(x, (w - m) / torch.sqrt(v + 1e-5), self.bias, self.stride, self.padding)

    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.GroupNorm(4, 16), nn.GroupNorm(4, 32)
        self.c1, self.c2 = self.Std(16, 32, 3, padding=1), self.Std(32, 16, 3, padding=1)

    def forward(self, x):
        return x + self.c2(self.n2(self.c1(self.n1(x).relu())).relu())


@case(call(X))
class PenalisedRecommender(nn.Module):
    """Its forward returns scores and the squared length of all parameters."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(self.up(x).relu()), 1e-3 * sum(p.square().sum() for p in self.parameters())


@case(call(TABLE))
class FactorisationMachine(nn.Module):
    """DeepFM: second-order terms of all fields, and a deep part."""

    def __init__(self):
        super().__init__()
        self.rows, self.bias = nn.Embedding(32, 16), nn.Embedding(32, 1)
        self.deep = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        e = self.rows(x)
        second = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(-1, keepdim=True)
        return (self.bias(x).sum(1) + second + self.deep(e.flatten(1))).squeeze(-1).sigmoid()


@case(call(X))
class CrossNetwork(nn.Module):
    """DCN v2 with low-rank crossing."""

    def __init__(self):
        super().__init__()
        self.u = nn.ModuleList(nn.Linear(32, 8, bias=False) for _ in range(2))
        self.v = nn.ModuleList(nn.Linear(8, 32) for _ in range(2))
        self.inp, self.head = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x):
        first = x = self.inp(x)
        for u, v in zip(self.u, self.v, strict=True):
            x = first * v(u(x)) + x
        return self.head(x)


@case(call(floats(10, 16), torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8]])), vary=False)
class GraphAttention(nn.Module):
    """GAT over an edge list: softmax over the edges of a node by scatter."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(16, 32, bias=False)
        self.src, self.dst = nn.Parameter(torch.randn(1, 4, 8)), nn.Parameter(torch.randn(1, 4, 8))
        self.out = nn.Linear(32, 8)

    def forward(self, x, edges):
        h = self.lin(x).view(-1, 4, 8)
        row, col = edges
        e = F.leaky_relu((h * self.src).sum(-1)[row] + (h * self.dst).sum(-1)[col], 0.2)
        e = (e - e.max()).exp()
        total = torch.zeros(x.shape[0], 4, dtype=x.dtype).index_add(0, col, e)
        a = e / (total[col] + 1e-16)
        y = torch.zeros_like(h).index_add(0, col, h[row] * a[..., None])
        return self.out(F.elu(y.flatten(1)))


@case(call(X))
class DuelingHeads(nn.Module):
    """Dueling Q-network."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.value = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        self.advantage = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x):
        h = self.body(x)
        a = self.advantage(h)
        return self.value(h) + a - a.mean(-1, keepdim=True)


@case(call(floats(4, 16)))
class GaussianPolicy(nn.Module):
    """SAC: mean and clamped log deviation, squashed; the log-probability of the mean action."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.mean, self.log_std = nn.Linear(64, 4), nn.Linear(64, 4)

    def forward(self, x):
        h = self.body(x)
        mean, log_std = self.mean(h), self.log_std(h).clamp(-20, 2)
        law = torch.distributions.Normal(mean, log_std.exp())
        action = mean.tanh()
        logp = (law.log_prob(mean) - torch.log(1 - action.square() + 1e-6)).sum(-1)
        return action, logp


@case(call(floats(4, 24)))
class Nbeats(nn.Module):
    """N-BEATS: backcast and forecast of generic blocks, doubly residual."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
            self.theta = nn.Linear(32, 30)

        def forward(self, x):
            theta = self.theta(self.layers(x))
            return theta[:, :24], theta[:, 24:]

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x):
        y = 0
        for block in self.blocks:
            back, ahead = block(x)
            x, y = x - back, y + ahead
        return y


@case(call(floats(2, 4, 8, 8), torch.tensor([3, 7])), vary=False)
class DiffusionUnet(nn.Module):
    """A small U-Net with time embedding, GroupNorm, one level down and up."""

    class Res(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.n1, self.c1 = nn.GroupNorm(4, a), nn.Conv2d(a, b, 3, padding=1)
            self.n2, self.c2 = nn.GroupNorm(4, b), nn.Conv2d(b, b, 3, padding=1)
            self.time, self.skip = nn.Linear(32, b), nn.Conv2d(a, b, 1) if a != b else nn.Identity()

        def forward(self, x, t):
            h = self.c1(F.silu(self.n1(x))) + self.time(F.silu(t))[:, :, None, None]
            return self.skip(x) + self.c2(F.silu(self.n2(h)))

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.inp, self.out = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)
        self.down, self.mid, self.up = self.Res(16, 32), self.Res(32, 32), self.Res(48, 16)

    def forward(self, x, t):
        f = torch.exp(-math.log(1e4) * torch.arange(8, dtype=x.dtype) / 8)
        a = t[:, None].to(x.dtype) * f
        t = self.time(torch.cat([a.sin(), a.cos()], -1))
        x = self.inp(x)
        h = self.mid(F.avg_pool2d(self.down(x, t), 2), t)
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        return self.out(self.up(torch.cat([h, x], 1), t))


@case(call(S))
class CausalConvolutions(nn.Module):
    """TCN: old weight_norm hooks, causal by chomp, a 1×1 skip."""

    class Block(nn.Module):
        def __init__(self, a, b, d):
            super().__init__()
            self.pad = 2 * d
            self.c1 = nn.utils.weight_norm(nn.Conv1d(a, b, 3, padding=self.pad, dilation=d))
            self.c2 = nn.utils.weight_norm(nn.Conv1d(b, b, 3, padding=self.pad, dilation=d))
            self.skip = nn.Conv1d(a, b, 1) if a != b else None

        def forward(self, x):
            h = self.c1(x)[:, :, : -self.pad].contiguous().relu()
            h = self.c2(h)[:, :, : -self.pad].contiguous().relu()
            return (h + (x if self.skip is None else self.skip(x))).relu()

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(self.Block(16, 32, 1), self.Block(32, 32, 2))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.net(x)[:, :, -1])


@case(call(X))
class WrappedForward(nn.Module):
    """A decorator of the user's own around forward, without functools.wraps."""

    def timed(function):
        def run(*args, **kwargs):
            return function(*args, **kwargs)

        return run

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    @timed
    def forward(self, x):
        return x + self.down(self.up(x).relu())


@case(call(X))
class CachedPositions(nn.Module):
    """A table of positions is made when a longer sequence comes, and kept."""

    def __init__(self):
        super().__init__()
        self.inp, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.table = None

    def forward(self, x):
        if self.table is None or self.table.shape[0] < x.shape[1]:
            at = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.linspace(1, 0, 8, dtype=x.dtype)
            self.table = torch.cat([at.sin(), at.cos()], -1)
        x = self.inp(x) + self.table[: x.shape[1]]
        return x + self.down(F.gelu(self.up(x)))


@case(call(X))
class TiedDecoder(nn.Module):
    """An autoencoder whose decoder is its encoder, transposed."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 8)
        self.b1, self.b2 = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(16))

    def forward(self, x):
        z = self.second(self.first(x).relu())
        h = F.linear(z, self.second.weight.t(), self.b1).relu()
        return F.linear(h, self.first.weight.t(), self.b2), z


@case(call(floats(6, 3)))
class SineField(nn.Module):
    """SIREN: sines between linear layers, as NeRF codes use."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 64), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x):
        return self.c(torch.sin(30 * self.b(torch.sin(30 * self.a(x)))))


@case(call(M))
class SpectralDiscriminator(nn.Module):
    """SN-GAN's residual block: spectral norm on each convolution, sums pooled."""

    def __init__(self):
        super().__init__()
        normed = parametrizations.spectral_norm
        self.c1, self.c2 = normed(nn.Conv2d(16, 32, 3, padding=1)), normed(nn.Conv2d(32, 32, 3, padding=1))
        self.skip, self.head = normed(nn.Conv2d(16, 32, 1)), normed(nn.Linear(32, 1))

    def forward(self, x):
        h = F.avg_pool2d(self.c2(self.c1(x.relu()).relu()), 2) + F.avg_pool2d(self.skip(x), 2)
        return self.head(h.relu().sum((2, 3)))


@case(call(X))
class SparseTables(nn.Module):
    """A table read by indexing, and a projection back by the same table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, 16) / 4)
        self.mix = nn.Linear(16, 32)
        self.back = nn.Linear(32, 16)

    def forward(self, x):
        code = x.abs().sum(-1).mul(3).long() % 32
        h = self.table[(code,)] * 4
        h = h + self.back(self.mix(h).relu())
        return h @ self.table.T


@case(call(S), tp=(2, 4))
class ResidualNormed(nn.Module):
    """Single weight-normed convolutions from residual to residual."""

    normed = staticmethod(parametrizations.weight_norm)

    def __init__(self):
        super().__init__()
        self.pre, self.post = nn.Conv1d(16, 32, 1), nn.Conv1d(32, 8, 1)
        self.convs = nn.ModuleList(self.normed(nn.Conv1d(32, 32, 3, padding=1)) for _ in range(2))

    def forward(self, x):
        x = self.pre(x)
        for conv in self.convs:
            x = x + F.leaky_relu(conv(x), 0.1)
        return self.post(x)


@case(call(S), tp=(2, 4))
class ResidualNormedByHooks(ResidualNormed):
    normed = staticmethod(nn.utils.weight_norm)


@case(call(ids(2, 6, below=64)), call(ids(2, 6, below=64, seed=3) - 64), tp=(2, 4))
class TableByIndexing(nn.Module):
    """recurrentgemma: rows by table[(ids,)], from the front or the end, and a tied head."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Parameter(torch.randn(64, 16)), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids):
        x = self.table[(ids,)] * 4
        x = x + self.down(F.gelu(self.up(x)))
        return self.norm(x) @ self.table.T


@case(call(ids(2, 6, below=64), floats(2, 16)), tp=(2, 4))
class LargeTableByIndexing(nn.Module):
    """A large table that nothing else reads."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 32))
        self.inp, self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, items, x):
        return self.down(F.gelu(self.up(self.table[items].mean(1) + self.inp(x))))


class Kind(Enum):
    PAPER = "paper"
    AUTHOR = "author"


WRITES = ("author", "writes", "paper")


NODES, EDGES = {Kind.PAPER: floats(6, 16), Kind.AUTHOR: floats(4, 16)}, {WRITES: ids(2, 9, below=4)}


@case(call(NODES, EDGES), inputs={"nodes": NODES, "edges": EDGES})
class EdgeTypes(nn.Module):
    """Nodes by members of an Enum, edges by tuples, as graph libraries key them; weights of no module of their own."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ParameterList(nn.Parameter(torch.randn(16, 32) / 4) for _ in Kind)
            self.down = nn.ParameterList(nn.Parameter(torch.randn(32, 16) / 4) for _ in Kind)

        def forward(self, nodes):
            return {
                kind: F.relu(nodes[kind] @ up) @ down for kind, up, down in zip(Kind, self.up, self.down, strict=True)
            }

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, nodes, edges):
        for layer in self.layers:
            made = layer(nodes)
            sources, targets = edges[WRITES]
            sent = torch.zeros_like(nodes[Kind.PAPER]).index_add(0, targets, made[Kind.AUTHOR][sources])
            nodes = {Kind.PAPER: nodes[Kind.PAPER] + made[Kind.PAPER] + sent, Kind.AUTHOR: made[Kind.AUTHOR]}
        return nodes

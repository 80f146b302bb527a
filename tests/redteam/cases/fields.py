"""Networks from many fields as they are published: state spaces, molecules, sound, tables, pictures, control."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from ..case import call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
Y = floats(2, 6, 16, seed=2)
N = floats(10, 16)
E = ids(2, 24, below=10)
P = floats(10, 3)
PICTURE = floats(2, 16, 8, 8)
BOTH = (2, 4)


@case(call(X), tp=BOTH)
class DiagonalKernel(nn.Module):
    """S4D: a kernel of complex exponentials, convolved by Fourier transform."""

    def __init__(self):
        super().__init__()
        self.enter, self.out = nn.Linear(16, 32), nn.Linear(32, 64)
        self.log_dt, self.c = nn.Parameter(floats(32) * 0.1 - 2), nn.Parameter(floats(32, 4, 2))
        self.log_re, self.im = (
            nn.Parameter(torch.full((32, 4), -0.7)),
            nn.Parameter(torch.arange(4).repeat(32, 1) * math.pi),
        )
        self.skip, self.last = nn.Parameter(floats(32)), nn.Linear(32, 16)

    def forward(self, x):
        u, length = self.enter(x).mT, x.shape[1]
        a = torch.complex(-self.log_re.exp(), self.im)
        dta = a * self.log_dt.exp()[:, None]
        k = torch.exp(dta[..., None] * torch.arange(length).to(x.dtype))
        k = 2 * torch.einsum("hn,hnl->hl", torch.view_as_complex(self.c) * (dta.exp() - 1) / a, k).real
        y = torch.fft.irfft(torch.fft.rfft(k, 2 * length) * torch.fft.rfft(u, 2 * length), 2 * length)[..., :length]
        return x + self.last(F.glu(self.out(F.gelu(y + u * self.skip[:, None]).mT), -1))


@case(call(X), tp=BOTH)
class ChunkedStateSpace(nn.Module):
    """Mamba 2's quadratic form: decays are summed by segments, heads share B and C."""

    def __init__(self):
        super().__init__()
        self.enter, self.a, self.d = (
            nn.Linear(16, 32 + 32 + 4 + 4 + 4),
            nn.Parameter(floats(4)),
            nn.Parameter(floats(4)),
        )
        self.norm, self.out = nn.RMSNorm(32), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        z, u, b, c, dt = self.enter(x).split([32, 32, 4, 4, 4], -1)
        u, dt = u.unflatten(-1, (4, 8)), F.softplus(dt)
        decay = (dt * -self.a.exp()).cumsum(1).mT
        apart = torch.exp((decay[..., :, None] - decay[..., None, :]).tril()).tril()
        y = torch.einsum("bln,bsn,bhls,bsh,bshp->blhp", c, b, apart, dt, u) + self.d[:, None] * u
        return x + self.out(self.norm(y.flatten(2) * F.silu(z)))


@case(call(N, E, P), tp=BOTH)
class ContinuousFilters(nn.Module):
    """SchNet: filters are made from distances through Gaussians, with a smooth cutoff."""

    def __init__(self):
        super().__init__()
        self.enter, self.filter = (
            nn.Linear(16, 32, bias=False),
            nn.Sequential(nn.Linear(8, 32), nn.Softplus(), nn.Linear(32, 32)),
        )
        self.out = nn.Sequential(nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 16))

    def forward(self, x, edges, places):
        d = (places[edges[0]] - places[edges[1]]).norm(dim=-1)
        basis = torch.exp(-2 * (d[:, None] - torch.linspace(0, 5, 8).to(d.dtype)) ** 2)
        w = self.filter(basis) * (0.5 * (torch.cos(d * math.pi / 5) + 1) * (d < 5))[:, None]
        m = self.enter(x)[edges[0]] * w
        return x + self.out(torch.zeros(x.shape[0], 32, dtype=x.dtype).index_add_(0, edges[1], m))


@case(call(N, E), tp=BOTH)
class SecondGraphAttention(nn.Module):
    """GATv2: a score of each edge by an additive attention per head, softmax by scatter."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 32), nn.Linear(16, 32)
        self.att, self.out, self.bias = nn.Parameter(floats(1, 4, 8)), nn.Linear(32, 16), nn.Parameter(floats(32))

    def forward(self, x, edges):
        a, b = self.left(x).view(-1, 4, 8)[edges[0]], self.right(x).view(-1, 4, 8)[edges[1]]
        score = (F.leaky_relu(a + b, 0.2) * self.att).sum(-1)
        top = score.new_full((x.shape[0], 4), -1e9).scatter_reduce(0, edges[1][:, None].expand_as(score), score, "amax")
        e = (score - top[edges[1]].detach()).exp()
        total = torch.zeros_like(top).index_add(0, edges[1], e)
        y = (a * (e / (total[edges[1]] + 1e-9))[..., None]).flatten(1)
        return self.out(F.elu(x.new_zeros(x.shape[0], 32).index_add(0, edges[1], y) + self.bias))


@case(call(N, E), tp=BOTH)
class GatedGraph(nn.Module):
    """GGNN with a virtual node: a GRU cell updates nodes, all of them read a mean of all."""

    def __init__(self):
        super().__init__()
        self.enter, self.message, self.cell = nn.Linear(16, 32), nn.Linear(32, 32), nn.GRUCell(32, 32)
        self.virtual, self.gate, self.out = Mlp(32, 64), nn.Linear(64, 16), nn.Linear(32, 16)

    def forward(self, x, edges):
        h = begin = torch.tanh(self.enter(x))
        for _ in range(2):
            m = torch.zeros_like(h).scatter_add(0, edges[1][:, None].expand(-1, 32), self.message(h)[edges[0]])
            h = self.cell(m + self.virtual(h.mean(0, keepdim=True)), h)
        return (torch.sigmoid(self.gate(torch.cat([h, begin], -1))) * torch.tanh(self.out(h))).sum(0)


@case(call(PICTURE), tp=BOTH)
class GridAndBlocks(nn.Module):
    """MaxViT: attention in blocks, then over a grid, behind a mobile convolution with squeeze and excitation."""

    def __init__(self):
        super().__init__()
        self.expand, self.depth, self.project = (
            nn.Conv2d(16, 32, 1),
            nn.Conv2d(32, 32, 3, padding=1, groups=32),
            nn.Conv2d(32, 16, 1),
        )
        self.less, self.more = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.blocks, self.grid = Attention(), Attention()

    def forward(self, x):
        h = F.gelu(self.depth(F.gelu(self.expand(x))))
        h = h * self.more(F.silu(self.less(h.mean((2, 3), keepdim=True)))).sigmoid()
        x = x + self.project(h)
        b, c, height, width = x.shape
        y = x.view(b, c, height // 4, 4, width // 4, 4).permute(0, 2, 4, 3, 5, 1)
        y = self.blocks(y.reshape(-1, 16, c)).view(b, height // 4, width // 4, 4, 4, c)
        y = y.permute(0, 3, 4, 1, 2, 5)
        y = self.grid(y.reshape(-1, (height // 4) * (width // 4), c)).view(b, 4, 4, height // 4, width // 4, c)
        return y.permute(0, 5, 3, 1, 4, 2).reshape(x.shape)


@case(call(PICTURE), tp=BOTH)
class FusedPyramid(nn.Module):
    """BiFPN: levels are joined with weights that are kept positive and normalised by their sum."""

    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList(nn.Conv2d(16, 32, 1) for _ in range(3))
        self.down, self.up = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 3))
        self.mix = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Conv2d(32, 32, 1)) for _ in range(4)
        )
        self.out = nn.Conv2d(32, 16, 1)

    def forward(self, x):
        a, b, c = (level(F.avg_pool2d(x, 2**n)) for n, level in enumerate(self.levels))
        d = F.relu(self.down) / (F.relu(self.down).sum(1, keepdim=True) + 1e-4)
        b1 = self.mix[0](F.silu(d[0, 0] * b + d[0, 1] * F.interpolate(c, scale_factor=2)))
        a1 = self.mix[1](F.silu(d[1, 0] * a + d[1, 1] * F.interpolate(b1, scale_factor=2)))
        u = F.relu(self.up) / (F.relu(self.up).sum(1, keepdim=True) + 1e-4)
        b2 = self.mix[2](F.silu(u[0, 0] * b + u[0, 1] * b1 + u[0, 2] * F.max_pool2d(a1, 2)))
        c2 = self.mix[3](F.silu(u[1, 0] * c + u[1, 1] * F.max_pool2d(b2, 2)))
        return [self.out(level) for level in (a1, b2, c2)]


@case(call(PICTURE), tp=BOTH)
class FocalModulation(nn.Module):
    """FocalNet: contexts of several ranges are gated and multiplied with the query."""

    def __init__(self):
        super().__init__()
        self.enter, self.h, self.out = nn.Linear(16, 2 * 32 + 3), nn.Conv2d(32, 32, 1), nn.Linear(32, 16)
        self.focal = nn.ModuleList(nn.Conv2d(32, 32, k, padding=k // 2, groups=32, bias=False) for k in (3, 5))

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        q, context, gates = torch.split(self.enter(x).permute(0, 3, 1, 2), (32, 32, 3), 1)
        total = 0
        for level, focal in enumerate(self.focal):
            context = F.gelu(focal(context))
            total = total + context * gates[:, level : level + 1]
        total = total + F.gelu(context.mean((2, 3), keepdim=True)) * gates[:, 2:]
        return x + self.out((q * self.h(total)).permute(0, 2, 3, 1))


@case(call(PICTURE), tp=BOTH)
class Wavelets(nn.Module):
    """Haar wavelets: four bands are joined as channels, worked on, and put together again."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(64, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1)
        )

    def forward(self, x):
        a, b, c, d = x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]
        bands = torch.cat([a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d], 1) / 2
        bands = bands + self.body(bands)
        ll, lh, hl, hh = bands.chunk(4, 1)
        y = torch.zeros_like(x)
        y[..., ::2, ::2], y[..., 1::2, ::2] = (ll + lh + hl + hh) / 2, (ll - lh + hl - hh) / 2
        y[..., ::2, 1::2], y[..., 1::2, 1::2] = (ll + lh - hl - hh) / 2, (ll - lh - hl + hh) / 2
        return y


@case(call(floats(2, 1, 64)), vary=False, tp=BOTH)
class MaskedSources(nn.Module):
    """Conv-TasNet: an encoder, dilated blocks with a norm over everything, masks of two sources, a decoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Conv1d(1, 32, 8, 4, bias=False), nn.ConvTranspose1d(32, 1, 8, 4, bias=False)
        self.less, self.mask = nn.Conv1d(32, 16, 1), nn.Conv1d(16, 64, 1)
        self.blocks = nn.ModuleList(self.block(dilation) for dilation in (1, 2))

    def block(self, dilation):
        depth = nn.Conv1d(32, 32, 3, padding=dilation, dilation=dilation, groups=32)
        return nn.ModuleList([nn.Conv1d(16, 32, 1), nn.PReLU(), nn.GroupNorm(1, 32), depth, nn.Conv1d(32, 16, 1)])

    def forward(self, wave):
        w = F.relu(self.encoder(wave))
        h = self.less(w)
        for enter, act, norm, depth, leave in self.blocks:
            h = h + leave(depth(norm(act(enter(h)))))
        m = self.mask(h).unflatten(1, (2, 32)).sigmoid()
        return self.decoder((m * w[:, None]).flatten(0, 1)).view(wave.shape[0], 2, -1)


@case(call(X), tp=BOTH)
class VarianceAdaptor(nn.Module):
    """FastSpeech: durations are predicted, rounded, and rows repeated by them."""

    def __init__(self):
        super().__init__()
        self.body, self.predict, self.pitch = (
            Mlp(),
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 1)),
            nn.Embedding(8, 16),
        )
        self.out = Mlp()

    def forward(self, x):
        h = self.body(x)
        d = self.predict(h)[..., 0]
        times = d.detach().exp().round().clamp(1, 3).long()
        h = h + self.pitch(torch.bucketize(d.detach(), torch.linspace(-1, 1, 7).to(d.dtype)))
        longest = int(times.sum(1).max())
        rows = [
            F.pad(torch.repeat_interleave(row, n, 0), (0, 0, 0, longest - int(n.sum())))
            for row, n in zip(h, times, strict=True)
        ]
        return self.out(torch.stack(rows)), d


@case(call(ids(4, 6, below=20), floats(4, 3)), tp=BOTH)
class SqueezedFields(nn.Module):
    """FiBiNET: fields are weighed by squeeze and excitation and meet by bilinear products of each pair."""

    def __init__(self):
        super().__init__()
        self.table, self.dense = nn.Embedding(20, 8), nn.Linear(3, 8)
        self.weigh = nn.Sequential(nn.Linear(7, 3, bias=False), nn.ReLU(), nn.Linear(3, 7, bias=False), nn.ReLU())
        self.pairs = nn.ParameterList(nn.Parameter(floats(8, 8, seed=n) * 0.3) for n in range(21))
        self.deep = nn.Sequential(nn.Linear(21 * 16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, fields, numbers):
        x = torch.cat([self.table(fields), self.dense(numbers)[:, None]], 1)
        v = x * self.weigh(x.mean(-1))[..., None]
        at = torch.combinations(torch.arange(7))
        met = [
            torch.cat([(e[:, i] @ w) * e[:, j] for (i, j), w in zip(at.tolist(), self.pairs, strict=True)], -1)
            for e in (x, v)
        ]
        return torch.sigmoid(self.deep(torch.cat(met, -1)))


@case(call(X, Y), tp=BOTH)
class ProgressiveExtraction(nn.Module):
    """PLE: experts of each task and shared ones, in two levels of gates; heads in a dict."""

    def __init__(self):
        super().__init__()
        names = [level + name for level in "12" for name in ("click", "buy", "shared")]
        self.experts = nn.ModuleDict({name: nn.ModuleList([self.expert(), self.expert()]) for name in names})
        self.gates = nn.ModuleDict({name: nn.Linear(16, 6 if "shared" in name else 4) for name in names})
        self.heads = nn.ModuleDict({"click": nn.Linear(16, 1), "buy": nn.Linear(16, 3)})

    def expert(self):
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x, y):
        state = {"click": x, "buy": y, "shared": x + y}
        for level in "12":
            done = {name: [expert(state[name]) for expert in self.experts[level + name]] for name in state}
            after = {}
            for name in state:
                own = sum(done.values(), []) if name == "shared" else done[name] + done["shared"]
                gate = self.gates[level + name](state[name]).softmax(-1)
                after[name] = torch.einsum("...e,...ed->...d", gate, torch.stack(own, -2))
            state = after
        return {name: head(state[name]) for name, head in self.heads.items()}


@case(call(X), tp=BOTH)
class CosineWithPositionNet(nn.Module):
    """Swin 2: cosine attention with a clamped temperature, biases from an MLP over log distances."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(16, 96, bias=False), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.full((4, 1, 1), math.log(10.0)))
        self.net = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 4, bias=False))
        self.q_bias, self.v_bias = nn.Parameter(floats(32) * 0.1), nn.Parameter(floats(32, seed=1) * 0.1)

    def forward(self, x):
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias, requires_grad=False), self.v_bias])
        q, k, v = F.linear(x, self.qkv.weight, bias).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4).unbind(0)
        at = torch.arange(x.shape[1])
        apart = (at[:, None] - at).to(x.dtype)
        apart = torch.sign(apart) * torch.log2(apart.abs() + 1)
        a = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.scale.clamp(max=math.log(100)).exp()
        a = a + 16 * self.net(apart[..., None]).permute(2, 0, 1).sigmoid()
        return x + self.o(joined(a.softmax(-1) @ v))


@case(call(X), tp=BOTH)
class ClassAttention(nn.Module):
    """CaiT: only a class token asks; outputs are scaled by small vectors."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(floats(1, 1, 16))
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.norm, self.mlp, self.scales = (
            nn.LayerNorm(16),
            Mlp(),
            nn.ParameterList(nn.Parameter(torch.full((16,), 0.1)) for _ in range(2)),
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        token = self.token.expand(x.shape[0], -1, -1)
        u = self.norm(torch.cat((token, x), 1))
        q, k, v = parted(self.q(u[:, :1]), 4), parted(self.k(u), 4), parted(self.v(u), 4)
        y = self.o(joined((q * 0.5 @ k.mT).softmax(-1) @ v))
        token = token + self.scales[0] * y
        token = token + self.scales[1] * self.mlp(token)
        return self.head(torch.cat((token, x), 1)[:, 0])

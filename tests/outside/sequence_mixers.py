"""Models that mix a sequence otherwise than by attention, written as people write them who know no library."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 48
HEADS = 12
VOCABULARY = 120


class MambaBlock(nn.Module):
    """mamba-minimal style"""

    def __init__(self, d=WIDTH, e=2, n=8, r=4, k=4):
        super().__init__()
        self.d, self.n, self.r, self.e = (d, n, r, e * d)
        self.ip = nn.Linear(d, 2 * e * d, bias=False)
        self.cv = nn.Conv1d(e * d, e * d, k, groups=e * d, padding=k - 1)
        self.xp = nn.Linear(e * d, r + 2 * n, bias=False)
        self.dt = nn.Linear(r, e * d)
        self.al = nn.Parameter(torch.log(torch.arange(1, n + 1).float().repeat(e * d, 1)))
        self.D = nn.Parameter(torch.ones(e * d))
        self.op = nn.Linear(e * d, d, bias=False)
        self.g = nn.Parameter(torch.ones(d))

    def forward(self, x):
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-05) * self.g
        b, size, d = h.shape
        u, res = self.ip(h).split([self.e, self.e], -1)
        u = F.silu(self.cv(u.transpose(1, 2))[..., :size].transpose(1, 2))
        A = -torch.exp(self.al.float()).to(x.dtype)
        dl, B, C = self.xp(u).split([self.r, self.n, self.n], -1)
        dl = F.softplus(self.dt(dl))
        dA = torch.exp(torch.einsum("bld,dn->bldn", dl, A))
        dBu = torch.einsum("bld,bln,bld->bldn", dl, B, u)
        st = torch.zeros(b, self.e, self.n, dtype=x.dtype, device=x.device)
        ys = []
        for i in range(size):
            st = dA[:, i] * st + dBu[:, i]
            ys.append(torch.einsum("bdn,bn->bd", st, C[:, i]))
        y = torch.stack(ys, 1) + u * self.D
        return x + self.op(y * F.silu(res))


class Mamba(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(VOCABULARY, WIDTH)
        self.l = nn.ModuleList([MambaBlock() for _ in range(2)])
        self.o = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.o.weight = self.t.weight

    def forward(self, ids):
        x = self.t(ids)
        for layer in self.l:
            x = layer(x)
        return self.o(x)


class RetNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(VOCABULARY, WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.g = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.o = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.gn = nn.GroupNorm(HEADS, 2 * WIDTH, affine=False)
        self.h = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("decay", torch.log(1 - 2.0 ** (-5 - torch.arange(HEADS).float())))

    def forward(self, ids):
        x = self.t(ids)
        b, size, _ = x.shape
        q = self.q(x).view(b, size, HEADS, -1).transpose(1, 2)
        k = self.k(x).view(b, size, HEADS, -1).transpose(1, 2) * (WIDTH // HEADS) ** (-0.5)
        v = self.v(x).view(b, size, HEADS, -1).transpose(1, 2)
        i = torch.arange(size)
        d = (i[:, None] - i[None]).to(x.dtype)
        m = torch.exp(d * self.decay.to(x.dtype)[:, None, None]).masked_fill(d < 0, 0)
        y = q @ k.transpose(-1, -2) * m @ v
        y = self.gn(y.transpose(1, 2).reshape(b * size, 2 * WIDTH)).view(b, size, -1)
        return self.h(x + self.o(F.silu(self.g(x)) * y))


class Hyena(nn.Module):
    """fft long conv with implicit filter"""

    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(VOCABULARY, WIDTH)
        self.i = nn.Linear(WIDTH, 3 * WIDTH)
        self.sc = nn.Conv1d(3 * WIDTH, 3 * WIDTH, 3, padding=2, groups=3 * WIDTH)
        self.f = nn.Sequential(nn.Linear(5, 32), nn.SiLU(), nn.Linear(32, WIDTH))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.h = nn.Linear(WIDTH, VOCABULARY)
        self.b = nn.Parameter(torch.randn(WIDTH))

    def forward(self, ids):
        x = self.t(ids)
        size = x.shape[1]
        u = self.sc(self.i(x).transpose(1, 2))[..., :size]
        a, b, v = u.chunk(3, 1)
        p = torch.linspace(0, 1, size, dtype=x.dtype)[:, None] * torch.arange(1, 6, dtype=x.dtype)
        k = self.f(p.cos()).T
        v = v * a
        y = (
            torch.fft.irfft(torch.fft.rfft(v, 2 * size) * torch.fft.rfft(k, 2 * size), 2 * size)[..., :size]
            + v * self.b[:, None]
        )
        return self.h(x + self.o((y * b).transpose(1, 2)))


class GatedLinearAttention(nn.Module):
    """linear attention, cumulative, elu+1, gated, low-rank decay"""

    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(VOCABULARY, WIDTH)
        self.qkvg = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.ga = nn.Linear(WIDTH, 8, bias=False)
        self.gb = nn.Linear(8, WIDTH)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.n = nn.RMSNorm(WIDTH // HEADS)
        self.h = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.t(ids)
        b, size, _ = x.shape
        q, k, v, g = [z.view(b, size, HEADS, -1).transpose(1, 2) for z in self.qkvg(x).split(WIDTH, -1)]
        d = F.logsigmoid(self.gb(self.ga(x))).view(b, size, HEADS, -1).transpose(1, 2) / 16
        S = x.new_zeros(b, HEADS, WIDTH // HEADS, WIDTH // HEADS)
        ys = []
        for i in range(size):
            S = S * d[:, :, i].exp()[..., None] + (F.elu(k[:, :, i]) + 1)[..., None] * v[:, :, i, None]
            ys.append(((F.elu(q[:, :, i]) + 1)[..., None] * S).sum(-2))
        y = self.n(torch.stack(ys, 2)) * F.silu(g)
        return self.h(x + self.o(y.transpose(1, 2).flatten(2)))


class LSTMModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(VOCABULARY, WIDTH)
        self.r = nn.LSTM(WIDTH, 96, 2, batch_first=True)
        self.p = nn.Linear(96, WIDTH)
        self.o = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.o(self.p(self.r(self.t(ids))[0]))


class GRUByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(VOCABULARY, WIDTH)
        self.c = nn.GRUCell(WIDTH, WIDTH)
        self.o = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.t(ids)
        h = x.new_zeros(x.shape[0], WIDTH)
        ys = []
        for i in range(x.shape[1]):
            h = self.c(x[:, i], h)
            ys.append(h)
        return self.o(torch.stack(ys, 1))


class Mixer(nn.Module):
    def __init__(self, n=16):
        super().__init__()
        self.t = nn.Linear(12, WIDTH)
        self.b = nn.ModuleList(
            [
                nn.ModuleDict(
                    dict(
                        n=nn.LayerNorm(WIDTH),
                        a=nn.Linear(n, 64),
                        b=nn.Linear(64, n),
                        m=nn.LayerNorm(WIDTH),
                        c=nn.Linear(WIDTH, 4 * WIDTH),
                        d=nn.Linear(4 * WIDTH, WIDTH),
                    )
                )
                for _ in range(2)
            ]
        )
        self.o = nn.Linear(WIDTH, 7)

    def forward(self, x):
        x = self.t(x)
        for b in self.b:
            x = x + b["b"](F.gelu(b["a"](b["n"](x).transpose(1, 2)))).transpose(1, 2)
            x = x + b["d"](F.gelu(b["c"](b["m"](x))))
        return self.o(x.mean(1))

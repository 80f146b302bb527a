"""Experts, vision, diffusion, tables, towers: code of other kinds that no library here has."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 48
HEADS = 12
VOCABULARY = 120


class RoutedExperts(nn.Module):
    """top-1 with index_add per expert"""

    def __init__(self, E=4):
        super().__init__()
        self.r = nn.Linear(WIDTH, E, bias=False)
        self.ex = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH)) for _ in range(E)]
        )

    def forward(self, x):
        f = x.reshape(-1, WIDTH)
        p = self.r(f).softmax(-1)
        w, i = p.max(-1)
        out = torch.zeros_like(f)
        for e, m in enumerate(self.ex):
            idx = (i == e).nonzero(as_tuple=True)[0]
            out.index_add_(0, idx, m(f[idx]) * w[idx, None])
        return x + out.view_as(x)


class WeightedExperts(nn.Module):
    def __init__(self, E=4):
        super().__init__()
        self.r = nn.Linear(WIDTH, E)
        self.a = nn.Parameter(torch.randn(E, WIDTH, 96) * 0.1)
        self.b = nn.Parameter(torch.randn(E, 96, WIDTH) * 0.1)

    def forward(self, x):
        p = self.r(x).softmax(-1)
        return x + torch.einsum(
            "ble,bled->bld", p, torch.einsum("blef,efd->bled", F.gelu(torch.einsum("bld,edf->blef", x, self.a)), self.b)
        )


class WithExperts(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.t = nn.Embedding(VOCABULARY, WIDTH)
        self.l = nn.Sequential(kind(), kind())
        self.o = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.o(self.l(self.t(ids)))


class ViTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1 = nn.LayerNorm(WIDTH)
        self.n2 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.pr = nn.Linear(WIDTH, WIDTH)
        self.f1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.f2 = nn.Linear(4 * WIDTH, WIDTH)
        self.ls = nn.Parameter(torch.ones(WIDTH) * 0.1)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(self.n1(x)).reshape(B, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        a = q * (C // HEADS) ** (-0.5) @ k.transpose(-2, -1)
        a = a.softmax(-1)
        x = x + self.ls * self.pr((a @ v).transpose(1, 2).reshape(B, N, C))
        return x + self.ls * self.f2(F.gelu(self.f1(self.n2(x))))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Conv2d(3, WIDTH, 4, 4)
        self.c = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pe = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.b = nn.Sequential(*[ViTBlock() for _ in range(2)])
        self.n = nn.LayerNorm(WIDTH)
        self.h = nn.Linear(WIDTH, 10)

    def forward(self, img):
        x = self.p(img).flatten(2).transpose(1, 2)
        x = torch.cat([self.c.expand(x.shape[0], -1, -1), x], 1) + self.pe
        return self.h(self.n(self.b(x))[:, 0])


class DiTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.ad = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.o = nn.Linear(WIDTH, WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(24, 2 * WIDTH)
        self.co = nn.Linear(WIDTH, WIDTH)
        self.m = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))
        self.qn = nn.RMSNorm(WIDTH // HEADS)
        self.kn = nn.RMSNorm(WIDTH // HEADS)

    def heads(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x, c, ctx):
        a, b, g, d, e, h = self.ad(c)[:, None].chunk(6, -1)
        q, k, v = map(self.heads, self.qkv(self.n(x) * (1 + b) + a).chunk(3, -1))
        x = x + g * self.o(F.scaled_dot_product_attention(self.qn(q), self.kn(k), v).transpose(1, 2).flatten(2))
        k, v = map(self.heads, self.kv(ctx).chunk(2, -1))
        x = x + self.co(F.scaled_dot_product_attention(self.heads(self.q(x)), k, v).transpose(1, 2).flatten(2))
        return x + h * self.m(self.n(x) * (1 + e) + d)


class DiT(nn.Module):
    """adaLN-zero, timestep embedding, cross attention"""

    def __init__(self):
        super().__init__()
        self.x = nn.Linear(8, WIDTH)
        self.te = nn.Sequential(nn.Linear(32, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.bl = nn.ModuleList([DiTBlock() for _ in range(2)])
        self.f = nn.Linear(WIDTH, 8)
        self.ad = nn.Linear(WIDTH, 2 * WIDTH)
        self.n = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def forward(self, x, t, ctx):
        x = self.x(x)
        fr = torch.exp(-math.log(10000.0) * torch.arange(16, dtype=x.dtype) / 16)
        e = t[:, None] * fr
        c = self.te(torch.cat([e.cos(), e.sin()], -1))
        for b in self.bl:
            x = b(x, c, ctx)
        sh, sc = self.ad(F.silu(c)).chunk(2, -1)
        return self.f(self.n(x) * (1 + sc[:, None]) + sh[:, None])


class ResidualConvs(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a = nn.GroupNorm(4, c)
        self.b = nn.Conv2d(c, c, 3, padding=1)
        self.c = nn.GroupNorm(4, c)
        self.d = nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x):
        return x + self.d(F.silu(self.c(self.b(F.silu(self.a(x))))))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Conv2d(3, 16, 3, padding=1)
        self.d = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.r1 = ResidualConvs(32)
        self.u = nn.ConvTranspose2d(32, 16, 2, 2)
        self.r2 = ResidualConvs(16)
        self.o = nn.Conv2d(16, 3, 1)

    def forward(self, img):
        a = self.i(img)
        b = self.r1(self.d(a))
        return self.o(self.r2(self.u(b) + a))


class Bottleneck(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a = nn.Conv2d(c, c * 2, 1, bias=False)
        self.an = nn.BatchNorm2d(c * 2)
        self.b = nn.Conv2d(c * 2, c * 2, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(c * 2)
        self.c = nn.Conv2d(c * 2, c, 1, bias=False)
        self.cn = nn.BatchNorm2d(c)

    def forward(self, x):
        return F.relu(x + self.cn(self.c(F.relu(self.bn(self.b(F.relu(self.an(self.a(x)))))))))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.st = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.bl = nn.Sequential(*[Bottleneck(32) for _ in range(2)])
        self.fc = nn.Linear(32, 10)

    def forward(self, img):
        return self.fc(self.bl(self.st(img)).mean((2, 3)))


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.ModuleList([nn.EmbeddingBag(n, 32, mode="sum") for n in (64, 100, 72)])
        self.b = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(32 + 6, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense, sparse):
        x = self.b(dense)
        z = torch.stack([x] + [e(sparse[:, i]) for i, e in enumerate(self.e)], 1)
        m = z @ z.transpose(1, 2)
        i, j = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, m[:, i, j]], 1)).sigmoid()


class TwoTowers(nn.Module):
    """two towers, CLIP loss output"""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(20, 96), nn.GELU(), nn.Linear(96, WIDTH), nn.LayerNorm(WIDTH))
        self.b = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))
        self.ls = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, ids):
        a = F.normalize(self.a(x), dim=-1)
        b = F.normalize(self.b(ids).mean(1), dim=-1)
        size = self.ls.exp() * a @ b.T
        y = torch.arange(len(x))
        return (F.cross_entropy(size, y) + F.cross_entropy(size.T, y)) / 2


class CodeBookAutoencoder(nn.Module):
    """conv1d autoencoder with weight norm, VQ straight-through"""

    def __init__(self):
        super().__init__()
        wn = nn.utils.parametrizations.weight_norm
        self.e = nn.Sequential(wn(nn.Conv1d(1, 32, 7, 2, 3)), nn.ELU(), wn(nn.Conv1d(32, WIDTH, 7, 2, 3)))
        self.cb = nn.Embedding(64, WIDTH)
        self.d = nn.Sequential(
            wn(nn.ConvTranspose1d(WIDTH, 32, 4, 2, 1)), nn.ELU(), wn(nn.ConvTranspose1d(32, 1, 4, 2, 1))
        )

    def forward(self, w):
        z = self.e(w).transpose(1, 2)
        i = torch.cdist(z, self.cb.weight[None]).argmin(-1)
        q = self.cb(i)
        q = z + (q - z).detach()
        return self.d(q.transpose(1, 2))


class SkippingUNet(nn.Module):
    """What a transposed convolution takes is joined of two lots of channels."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.b = nn.Conv2d(16, 32, 3, padding=1)
        self.u = nn.ConvTranspose2d(48, 16, 3, stride=2, padding=1, output_padding=1)
        self.o = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, img):
        a = F.relu(self.a(img))
        return self.o(F.relu(self.u(torch.cat([a, self.b(a)], 1))))


class ColumnsOfFeatures(nn.Module):
    """One matrix of floats has ids and features; what tables hold is joined with the features."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(60, 32), nn.Embedding(40, 32)])
        self.m = nn.Sequential(nn.Linear(66, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        items = [table(x[:, i].long()) for i, table in enumerate(self.tables)]
        return self.m(torch.cat([*items, x[:, 2:]], 1))


class GraphScores(nn.Module):
    """A table alone: its rows are averaged over a graph, and pairs of them are scored."""

    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(40, 32)

    def forward(self, edges):
        x = self.t.weight
        near = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]) / 4
        x = (x + near) / 2
        return (x[edges[0]] * x[edges[1]]).sum(-1)


class PositionsByConvolution(nn.Module):
    """Positions come of a convolution in groups, from the stream to the stream, as wav2vec 2.0's."""

    def __init__(self):
        super().__init__()
        self.i = nn.Linear(20, 64)
        self.c = nn.utils.parametrizations.weight_norm(nn.Conv1d(64, 64, 8, padding=4, groups=4), dim=2)
        self.d = nn.Conv1d(64, 64, 3, padding=1, groups=2)
        self.m = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        x = self.i(x)
        x = x + F.gelu(self.c(x.transpose(1, 2))[..., :-1]).transpose(1, 2)
        x = x + self.d(x.transpose(1, 2)).transpose(1, 2)
        return x + self.m(x)

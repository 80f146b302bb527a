"""More blocks as people publish them, all of them sound."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from ..case import call, case, floats, ids

X = floats(2, 8, 16)
M = floats(2, 16, 8, 8)
S = floats(2, 16, 24)


@case(call(S))
class GatedWave(nn.Module):
    """WaveNet: gated weight-normed convolutions with residual and skip."""

    class Layer(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.conv = parametrizations.weight_norm(nn.Conv1d(16, 64, 3, padding=d, dilation=d))
            self.out = parametrizations.weight_norm(nn.Conv1d(32, 32, 1))

        def forward(self, x):
            a, b = self.conv(x).chunk(2, 1)
            res, skip = self.out(a.tanh() * b.sigmoid()).chunk(2, 1)
            return x + res, skip

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(d) for d in (1, 2))
        self.head = nn.Conv1d(16, 8, 1)

    def forward(self, x):
        total = 0
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        return self.head(total.relu())


@case(call(X))
class ConformerBlock(nn.Module):
    """Two half feed-forwards, attention, and a convolution with GLU and BatchNorm between."""

    def __init__(self):
        super().__init__()
        ff = lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16))  # noqa: E731
        self.ff1, self.ff2, self.n1, self.n2, self.n3 = ff(), ff(), nn.LayerNorm(16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn = nn.MultiheadAttention(16, 4, batch_first=True)
        self.p1, self.deep = nn.Conv1d(16, 64, 1), nn.Conv1d(32, 32, 5, padding=2, groups=32)
        self.bn, self.p2 = nn.BatchNorm1d(32), nn.Conv1d(32, 16, 1)

    def forward(self, x):
        x = x + 0.5 * self.ff1(x)
        h = self.n1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        h = F.glu(self.p1(self.n2(x).transpose(1, 2)), 1)
        x = x + self.p2(F.silu(self.bn(self.deep(h)))).transpose(1, 2)
        return self.n3(x + 0.5 * self.ff2(x))


@case(call(floats(4, 8), ids(4, 3, below=32)))
class Dlrm(nn.Module):
    """DLRM: three tables, a bottom net, dot products of pairs, a top net."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(32, 16, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(22, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        e = [t(sparse[:, i : i + 1]) for i, t in enumerate(self.tables)]
        z = torch.stack([x, *e], 1)
        dots = z @ z.transpose(1, 2)
        i, j = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, dots[:, i, j]], 1))


@case(call(ids(2, 8, below=40)))
class SelfAttentiveRecommender(nn.Module):
    """SASRec: items scored by the table that they are read from."""

    def __init__(self):
        super().__init__()
        self.items, self.places = nn.Embedding(40, 16, padding_idx=0), nn.Embedding(12, 16)
        self.n1, self.n2, self.n3 = (nn.LayerNorm(16, eps=1e-8) for _ in range(3))
        self.attn = nn.MultiheadAttention(16, 2)
        self.c1, self.c2 = nn.Conv1d(16, 32, 1), nn.Conv1d(32, 16, 1)

    def forward(self, log):
        x = self.items(log) * 4
        x = x + self.places(torch.arange(log.shape[1]))
        x = x * (log != 0).unsqueeze(-1)
        t = x.shape[1]
        mask = ~torch.ones(t, t, dtype=torch.bool).tril()
        q = self.n1(x).transpose(0, 1)
        kv = x.transpose(0, 1)
        x = (q + self.attn(q, kv, kv, attn_mask=mask)[0]).transpose(0, 1)
        h = self.n2(x)
        x = h + self.c2(self.c1(h.transpose(1, 2)).relu()).transpose(1, 2)
        return self.n3(x) @ self.items.weight.T


@case(call(floats(4, 16)))
class MultiGateExperts(nn.Module):
    """MMoE: experts that two tasks weigh by their own gates."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU()) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(16, 3) for _ in range(2))
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(2))

    def forward(self, x):
        e = torch.stack([one(x) for one in self.experts], 1)
        return [
            tower((gate(x).softmax(-1).unsqueeze(-1) * e).sum(1))
            for gate, tower in zip(self.gates, self.towers, strict=True)
        ]


@case(call(floats(12, 16), floats(12, 12).gt(0.5).double()), vary=False)
class DenseGraphConvolution(nn.Module):
    """GCN on a dense adjacency, normalised on both sides; GIN-like MLP after."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.eps = nn.Parameter(torch.zeros(()))
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x, adj):
        a = adj + torch.eye(adj.shape[0], dtype=x.dtype)
        d = a.sum(1).pow(-0.5)
        a = d[:, None] * a * d[None]
        h = a @ self.w2((a @ self.w1(x)).relu())
        return self.mlp((1 + self.eps) * x + h)


@case(call(floats(6, 16), floats(6, 3)), vary=False)
class Equivariant(nn.Module):
    """EGNN: messages of all pairs from distances; coordinates move along differences."""

    def __init__(self):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(33, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU())
        self.coord = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1, bias=False))
        self.node = nn.Sequential(nn.Linear(48, 32), nn.SiLU(), nn.Linear(32, 16))

    def forward(self, h, x):
        n = h.shape[0]
        diff = x[:, None] - x[None]
        d2 = diff.square().sum(-1, keepdim=True)
        m = self.edge(torch.cat([h[:, None].expand(n, n, -1), h[None].expand(n, n, -1), d2], -1))
        x = x + (diff * self.coord(m)).mean(1)
        return h + self.node(torch.cat([h, m.sum(1)], -1)), x


@case(call(floats(2, 5, 3, 12, 12)), vary=False)
class RecurrentAgent(nn.Module):
    """IMPALA: convolutions on each frame, an LSTM over them, policy and value."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 16, 3, stride=2)
        self.fc, self.core = nn.Linear(64, 32), nn.LSTM(32, 32, batch_first=True)
        self.policy, self.value = nn.Linear(32, 6), nn.Linear(32, 1)

    def forward(self, x):
        b, t = x.shape[:2]
        h = self.c2(self.c1(x.flatten(0, 1)).relu()).relu().flatten(1)
        h, _ = self.core(self.fc(h).relu().view(b, t, -1))
        return self.policy(h).log_softmax(-1), self.value(h).squeeze(-1)


@case(call(floats(4, 16), floats(4, 4)))
class TwinCritics(nn.Module):
    """TD3: two critics, and the smaller of both."""

    def __init__(self):
        super().__init__()
        net = lambda: nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))  # noqa: E731
        self.one, self.two = net(), net()

    def forward(self, s, a):
        x = torch.cat([s, a], -1)
        one, two = self.one(x), self.two(x)
        return one, two, torch.min(one, two)


@case(call(floats(2, 24, 6)))
class PatchForecast(nn.Module):
    """PatchTST: each channel alone, patches as tokens, its own mean and deviation put back."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Linear(8, 16), nn.Parameter(torch.randn(5, 16) / 8)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(80, 4)

    def forward(self, x):
        mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True, unbiased=False) + 1e-5
        h = ((x - mean) / std).transpose(1, 2)
        b, c, _ = h.shape
        h = h.unfold(-1, 8, 4).reshape(b * c, -1, 8)
        h = self.encoder(self.embed(h) + self.place)
        y = self.head(h.flatten(1)).view(b, c, -1).transpose(1, 2)
        return y * std + mean


@case(call(floats(2, 24, 16)))
class SeriesMixer(nn.Module):
    """TSMixer: an MLP over time, an MLP over channels, LayerNorm before each."""

    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.t1, self.t2 = nn.Linear(24, 32), nn.Linear(32, 24)
        self.c1, self.c2, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(24, 6)

    def forward(self, x):
        x = x + self.t2(self.t1(self.n1(x).transpose(1, 2)).relu()).transpose(1, 2)
        x = x + self.c2(self.c1(self.n2(x)).relu())
        return self.head(x.transpose(1, 2)).transpose(1, 2)


@case(call(X, floats(2, 8)))
class ZeroModulated(nn.Module):
    """DiT: six modulations of a condition, attention from one packed projection."""

    def __init__(self):
        super().__init__()
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(8, 96))
        self.n1, self.n2 = (nn.LayerNorm(16, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x, c):
        s1, k1, g1, s2, k2, g2 = self.ada(c)[:, None].chunk(6, -1)
        b, n, d = x.shape
        q, k, v = self.qkv(self.n1(x) * (1 + k1) + s1).reshape(b, n, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        x = x + g1 * self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        h = self.n2(x) * (1 + k2) + s2
        return x + g2 * self.down(F.gelu(self.up(h), approximate="tanh"))


@case(call(floats(2, 16, 8)))
class StraightThroughCodes(nn.Module):
    """VQ-VAE: the nearest row of a codebook, straight through, and its two losses."""

    def __init__(self):
        super().__init__()
        self.e1, self.e2 = nn.Conv1d(16, 64, 3, padding=1), nn.Conv1d(64, 16, 1)
        self.d1, self.d2 = nn.Conv1d(16, 64, 3, padding=1), nn.Conv1d(64, 16, 1)
        self.codes = nn.Embedding(32, 16)

    def forward(self, x):
        z = self.e2(self.e1(x).relu()).transpose(1, 2)
        flat, w = z.reshape(-1, 16), self.codes.weight
        distance = flat.square().sum(1, keepdim=True) - 2 * flat @ w.T + w.square().sum(1)
        q = self.codes(distance.argmin(1)).view_as(z)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        q = z + (q - z).detach()
        return self.d2(self.d1(q.transpose(1, 2)).relu()), loss


@case(call(floats(2, 32, 8, 8)))
class SqueezedMobile(nn.Module):
    """EfficientNet: expand, depthwise, squeeze and excite, project, hard swish."""

    def __init__(self):
        super().__init__()
        self.expand, self.b1 = nn.Conv2d(32, 64, 1, bias=False), nn.BatchNorm2d(64)
        self.deep, self.b2 = nn.Conv2d(64, 64, 5, padding=2, groups=64, bias=False), nn.BatchNorm2d(64)
        self.squeeze, self.excite = nn.Conv2d(64, 16, 1), nn.Conv2d(16, 64, 1)
        self.project, self.b3 = nn.Conv2d(64, 32, 1, bias=False), nn.BatchNorm2d(32)

    def forward(self, x):
        h = F.hardswish(self.b2(self.deep(F.hardswish(self.b1(self.expand(x))))))
        h = h * F.hardsigmoid(self.excite(self.squeeze(F.adaptive_avg_pool2d(h, 1)).relu()))
        return x + self.b3(self.project(h))


@case(call(floats(2, 4, 4, 16)))
class ShiftedWindows(nn.Module):
    """Swin: windows of 2×2 with a table of relative places, rolled."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(9, 4) / 4)
        at = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        off = (at[:, :, None] - at[:, None]).permute(1, 2, 0) + 1
        self.register_buffer("index", off[..., 0] * 3 + off[..., 1])
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x):
        b, h, w, c = x.shape
        y = torch.roll(self.norm(x), (-1, -1), (1, 2))
        y = y.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        q, k, v = self.qkv(y).reshape(-1, 4, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(4, 4, 4).permute(2, 0, 1)
        a = (q @ k.transpose(-1, -2) * (c // 4) ** -0.5 + bias).softmax(-1)
        y = self.proj((a @ v).transpose(1, 2).reshape(-1, 4, c))
        y = y.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        x = x + torch.roll(y, (1, 1), (1, 2))
        return x + self.mlp(x)


@case(call(floats(4, 16)))
class CouplingFlow(nn.Module):
    """RealNVP: two affine couplings, and the log of their determinant."""

    def __init__(self):
        super().__init__()
        net = lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))  # noqa: E731
        self.one, self.two = net(), net()

    def forward(self, x):
        a, b = x.chunk(2, -1)
        s, t = self.one(a).chunk(2, -1)
        s = s.tanh()
        b = b * s.exp() + t
        u, v = self.two(b).chunk(2, -1)
        u = u.tanh()
        a = a * u.exp() + v
        return torch.cat([a, b], -1), s.sum(-1) + u.sum(-1)


@case(call(X))
class PrunedFeedForward(nn.Module):
    """Pruned by magnitude in both layers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        for layer in (self.net[0], self.net[2]):
            prune.l1_unstructured(layer, "weight", amount=0.4)

    def forward(self, x):
        return x + self.net(x)


@case(call(X))
class LowRankAdapted(nn.Module):
    """LoRA on frozen linears, scaled, with weight decomposition (DoRA) on one of them."""

    class Adapted(nn.Module):
        def __init__(self, a, b, dora):
            super().__init__()
            self.base = nn.Linear(a, b).requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(4, a) / 4), nn.Parameter(torch.randn(b, 4) / 4)
            self.size = nn.Parameter(self.base.weight.norm(dim=1)) if dora else None

        def forward(self, x):
            if self.size is None:
                return self.base(x) + F.linear(F.linear(x, self.a), self.b) * 2
            w = self.base.weight + 2 * self.b @ self.a
            w = w * (self.size / w.norm(dim=1).detach())[:, None]
            return F.linear(x, w, self.base.bias)

    def __init__(self):
        super().__init__()
        self.up, self.down = self.Adapted(16, 32, True), self.Adapted(32, 16, False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


@case(call(X))
class LinearRecurrence(nn.Module):
    """RWKV: token shift, receptance, keys squared, channel mixing."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.rand(2, 16))
        self.key, self.receptance, self.value = (
            nn.Linear(16, 64, bias=False),
            nn.Linear(16, 16, bias=False),
            nn.Linear(64, 16, bias=False),
        )

    def forward(self, x):
        last = F.pad(x, (0, 0, 1, -1))
        k = x * self.mix[0] + last * (1 - self.mix[0])
        r = x * self.mix[1] + last * (1 - self.mix[1])
        return x + self.receptance(r).sigmoid() * self.value(self.key(k).relu().square())

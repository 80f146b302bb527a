"""Forecasts, clouds of points, detectors, speech, click models: attention, cells and grids as published."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
Y = floats(2, 6, 16, seed=2)
PICTURE = floats(2, 16, 8, 8)
BOTH = (2, 4)


class GatedResidual(nn.Module):
    """TFT's block: an ELU, a context, a gated linear unit, a norm of the sum."""

    def __init__(self, i, h, o):
        super().__init__()
        self.a, self.b, self.gate = nn.Linear(i, h), nn.Linear(h, h), nn.Linear(h, 2 * o)
        self.context, self.skip, self.norm = (
            nn.Linear(16, h, bias=False),
            nn.Linear(i, o) if i != o else None,
            nn.LayerNorm(o),
        )

    def forward(self, x, context=None):
        h = self.a(x) if context is None else self.a(x) + self.context(context)
        y = F.glu(self.gate(self.b(F.elu(h))), -1)
        return self.norm(y + (x if self.skip is None else self.skip(x)))


@case(call(X, floats(2, 16)), tp=BOTH)
class FusedForecast(nn.Module):
    """TFT: variables are chosen by a softmax of a gated block, heads share one value, their mean is read out."""

    def __init__(self):
        super().__init__()
        self.each, self.choose = nn.ModuleList(GatedResidual(4, 16, 16) for _ in range(4)), GatedResidual(16, 32, 4)
        self.q, self.k, self.v, self.o = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(4, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x, static):
        w = self.choose(x, static[:, None]).softmax(-1)
        parts = torch.stack([net(part) for net, part in zip(self.each, x.chunk(4, -1), strict=True)], -1)
        h = (parts * w[..., None, :]).sum(-1)
        q, k = parted(self.q(h), 4), parted(self.k(h), 4)
        mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()
        a = (q @ k.mT / 2).masked_fill(~mask, -1e9).softmax(-1).mean(1)
        return self.out(h + self.o(a @ self.v(h))), a


@case(call(floats(2, 10, 16)), tp=BOTH)
class DynamicEdges(nn.Module):
    """DGCNN: edges to the nearest neighbours of hidden values, a maximum over them, a shared MLP of pairs."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(32, 32), nn.Linear(64, 32), nn.Linear(64, 8)

    def edges(self, x, layer):
        near = torch.cdist(x, x).topk(4, -1, largest=False).indices
        other = x[torch.arange(x.shape[0])[:, None, None], near]
        return F.leaky_relu(layer(torch.cat([x[:, :, None].expand_as(other), other - x[:, :, None]], -1)), 0.2).amax(2)

    def forward(self, x):
        a = self.edges(x, self.first)
        b = self.edges(a, self.second)
        return self.out(torch.cat([a, b], -1).amax(1))


@case(call(floats(2, 12, 3)), tp=BOTH)
class SpatialTransform(nn.Module):
    """PointNet: small networks make matrices that points and features are multiplied with; a penalty is returned."""

    def __init__(self):
        super().__init__()
        self.t3, self.t32 = (
            nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 9)),
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32 * 32)),
        )
        self.enter, self.norm, self.out = nn.Linear(3, 32), nn.BatchNorm1d(32), nn.Linear(32, 5)

    def forward(self, x):
        t = self.t3(x).amax(1).view(-1, 3, 3) + torch.eye(3, dtype=x.dtype)
        h = F.relu(self.norm(self.enter(x @ t).mT).mT)
        t = self.t32(h).amax(1).view(-1, 32, 32) * 0.1 + torch.eye(32, dtype=x.dtype)
        h = h @ t
        penalty = (t @ t.mT - torch.eye(32, dtype=x.dtype)).flatten(1).norm(dim=1).mean()
        return self.out(h.amax(1)), penalty


@case(call(PICTURE), tp=BOTH)
class MasksOfQueries(nn.Module):
    """Mask2Former: queries attend where their own masks of the layer before say so."""

    def __init__(self):
        super().__init__()
        self.queries, self.pixel = nn.Parameter(floats(5, 16)), nn.Conv2d(16, 16, 1)
        self.q, self.k, self.v, self.o, self.mask = (nn.Linear(16, 16) for _ in range(5))
        self.mlp, self.classes = Mlp(), nn.Linear(16, 4)

    def forward(self, x):
        pixels = self.pixel(x)
        rows, y = x.flatten(2).mT, self.queries.expand(x.shape[0], -1, -1)
        k, v = parted(self.k(rows), 4), parted(self.v(rows), 4)
        for _ in range(2):
            masks = torch.einsum("bqc,bchw->bqhw", self.mask(y), pixels)
            off = (masks.flatten(2).sigmoid() < 0.5).detach()
            off = off & ~off.all(-1, keepdim=True)
            bias = torch.zeros(off.shape, dtype=x.dtype).masked_fill(off, float("-inf"))[:, None]
            y = self.mlp(y + self.o(joined(F.scaled_dot_product_attention(parted(self.q(y), 4), k, v, attn_mask=bias))))
        return self.classes(y), torch.einsum("bqc,bchw->bqhw", self.mask(y), pixels)


@case(call(PICTURE), call(floats(2, 16, 4, 4)), tp=BOTH)
class GridOfAnchors(nn.Module):
    """YOLO: outputs of three anchors, and a grid that is kept and made anew when the size changes."""

    def __init__(self):
        super().__init__()
        self.cv1, self.cv2, self.cv3 = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(32, 16, 1)
        self.inner, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 3 * 7, 1)
        self.register_buffer("anchors", floats(3, 2).abs())
        self.grid = torch.zeros(1)

    def forward(self, x):
        a = self.cv1(x)
        h = self.cv3(torch.cat((a + F.silu(self.inner(a)), self.cv2(x)), 1))
        z = self.head(F.silu(h))
        b, _, height, width = z.shape
        z = z.view(b, 3, 7, height, width).permute(0, 1, 3, 4, 2).contiguous()
        if self.grid.shape[:2] != (height, width):
            at = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            self.grid = torch.stack(at[::-1], -1).to(x.dtype)
        y = z.sigmoid()
        xy = (y[..., :2] * 2 - 0.5 + self.grid) * 8
        wh = (y[..., 2:4] * 2) ** 2 * self.anchors.view(1, 3, 1, 1, 2)
        return torch.cat((xy, wh, y[..., 4:]), -1).flatten(1, 3)


@case(call(X, floats(2, 4, 8)), tp=BOTH)
class LocationSensitive(nn.Module):
    """Tacotron 2: two cells, an attention that hears its own past through a convolution, a decoder step by step."""

    def __init__(self):
        super().__init__()
        self.pre, self.rnn, self.dec = nn.Linear(8, 16), nn.LSTMCell(16 + 16, 32), nn.LSTMCell(32 + 16, 32)
        self.query, self.memory, self.v = (
            nn.Linear(32, 32, bias=False),
            nn.Linear(16, 32, bias=False),
            nn.Linear(32, 1, bias=False),
        )
        self.where, self.place = nn.Conv1d(2, 4, 3, padding=1, bias=False), nn.Linear(4, 32, bias=False)
        self.mel, self.stop = nn.Linear(48, 8), nn.Linear(48, 1)

    def forward(self, x, frames):
        memory, context = self.memory(x), x.new_zeros(x.shape[0], 16)
        one = two = None
        past = total = x.new_zeros(x.shape[0], x.shape[1])
        mels, stops, maps = [], [], []
        for frame in F.relu(self.pre(frames)).unbind(1):
            one = self.rnn(torch.cat((frame, context), -1), one)
            places = self.place(self.where(torch.stack((past, total), 1)).mT)
            energy = self.v(torch.tanh(self.query(one[0])[:, None] + places + memory))[..., 0]
            past = energy.softmax(1)
            total = total + past
            context = torch.bmm(past[:, None], x)[:, 0]
            two = self.dec(torch.cat((one[0], context), -1), two)
            both = torch.cat((two[0], context), -1)
            mels.append(self.mel(both))
            stops.append(self.stop(both))
            maps.append(past)
        return torch.stack(mels, 1), torch.cat(stops, 1), torch.stack(maps, 1)


@case(call(ids(2, 6), ids(2, 1)), tp=BOTH)
class EvolvingInterest(nn.Module):
    """DIEN: a GRU whose update gate is scaled by the attention of the target, and an auxiliary loss of neighbours."""

    def __init__(self):
        super().__init__()
        self.table, self.gru = nn.Embedding(32, 16), nn.GRU(16, 32, batch_first=True)
        self.target, self.score = nn.Linear(16, 32), nn.Sequential(nn.Linear(128, 32), nn.Sigmoid(), nn.Linear(32, 1))
        self.i, self.h, self.out = nn.Linear(32, 96), nn.Linear(32, 96), nn.Linear(64, 1)

    def forward(self, items, target):
        e, t = self.table(items), self.target(self.table(target))
        h, _ = self.gru(e)
        u = t.expand_as(h)
        a = self.score(torch.cat([h, u, h - u, h * u], -1)).softmax(1)
        state = torch.zeros_like(h[:, 0])
        for n in range(h.shape[1]):
            (ir, iz, ic), (hr, hz, hc) = self.i(h[:, n]).chunk(3, -1), self.h(state).chunk(3, -1)
            z = a[:, n] * torch.sigmoid(iz + hz)
            state = (1 - z) * state + z * torch.tanh(ic + torch.sigmoid(ir + hr) * hc)
        auxiliary = -F.logsigmoid((h[:, :-1, :16] * e[:, 1:]).sum(-1)).mean()
        return torch.sigmoid(self.out(torch.cat([state, t[:, 0]], -1))), auxiliary


@case(call(PICTURE, torch.arange(128).view(2, 8, 8) % 5), tp=BOTH, vary=False)
class ModulatedByMap(nn.Module):
    """SPADE: a map of classes makes the scale and shift of a norm without weights."""

    def __init__(self):
        super().__init__()
        self.norm, self.shared = nn.InstanceNorm2d(32), nn.Conv2d(5, 16, 3, padding=1)
        self.gamma, self.beta = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.up, self.down = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 3, padding=1)

    def forward(self, x, classes):
        hot = F.one_hot(classes, 5).permute(0, 3, 1, 2).to(x.dtype)
        s = F.relu(self.shared(F.interpolate(hot, size=x.shape[2:], mode="nearest")))
        h = self.norm(self.up(x)) * (1 + self.gamma(s)) + self.beta(s)
        return x + self.down(F.leaky_relu(h, 0.2))


@case(call(floats(3, 24)), tp=BOTH)
class PooledAndInterpolated(nn.Module):
    """N-HiTS: blocks see the series at several rates; coefficients are interpolated, residuals go on."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24 // k, 32), nn.ReLU(), nn.Linear(32, 24 // k + 8 // k)) for k in (4, 2, 1)
        )

    def forward(self, x):
        total = x[:, -1:].repeat(1, 8)
        for k, block in zip((4, 2, 1), self.blocks, strict=True):
            theta = block(F.max_pool1d(x[:, None], k, k)[:, 0])
            back, ahead = theta[:, : 24 // k], theta[:, 24 // k :]
            x = x - F.interpolate(back[:, None], size=24, mode="linear")[:, 0]
            total = total + F.interpolate(ahead[:, None], size=8, mode="nearest")[:, 0]
        return total


@case(call(floats(2, 4, 4, 16)), tp=BOTH)
class DecomposedPositions(nn.Module):
    """SAM: biases of rows and columns are made from the query itself."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(16, 48), nn.Linear(16, 16)
        self.rows, self.columns = nn.Parameter(floats(7, 4) * 0.3), nn.Parameter(floats(7, 4, seed=1) * 0.3)

    def forward(self, x):
        b, h, w, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, h * w, 3, 4, -1).permute(2, 0, 3, 1, 4).reshape(3, b * 4, h * w, -1).unbind(0)
        at = torch.arange(h)[:, None] - torch.arange(h) + h - 1
        r = q.reshape(b * 4, h, w, -1)
        row = torch.einsum("bhwc,hkc->bhwk", r, self.rows[at])
        column = torch.einsum("bhwc,wkc->bhwk", r, self.columns[at])
        a = ((q * 0.5) @ k.mT).view(-1, h, w, h, w) + row[..., None] + column[:, :, :, None, :]
        y = a.view(-1, h * w, h * w).softmax(-1) @ v
        return x + self.o(y.view(b, 4, h, w, -1).permute(0, 2, 3, 1, 4).reshape(b, h, w, -1))


class ScaledTable(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * self.embedding_dim**0.5


class ScaledLinear(nn.Linear):
    """muP: inputs are divided by the width."""

    def forward(self, input):
        return super().forward(input / math.sqrt(self.in_features))


class ShiftedNorm(nn.LayerNorm):
    def forward(self, input):
        return F.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


@case(call(ids(2, 6)), tp=BOTH)
class OwnKindsOfLayers(nn.Module):
    """Layers of torch, with a forward of one's own on top, which asks for its own widths."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = ScaledTable(32, 16, padding_idx=0), ShiftedNorm(16)
        self.up, self.down, self.head = ScaledLinear(16, 64), ScaledLinear(64, 16, bias=False), ScaledLinear(16, 32)

    def forward(self, input_ids):
        x = self.table(input_ids)
        x = x + self.down(F.relu(self.up(self.norm(x))).square())
        return self.head(x)


@case(call(X, Y), tp=BOTH)
class ChainedTasks(nn.Module):
    """ESMM and AITM: a task hears the one before by a small attention; probabilities are multiplied."""

    def __init__(self):
        super().__init__()
        self.bottom, self.towers = (
            nn.Linear(32, 32),
            nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)),
        )
        self.info, self.q, self.k, self.v = (
            nn.ModuleList(nn.Linear(32, 32) for _ in range(2)),
            nn.Linear(32, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 32),
        )
        self.heads = nn.ModuleList(nn.Linear(32, 1) for _ in range(3))

    def forward(self, x, y):
        h = F.relu(self.bottom(torch.cat([x, y], -1)))
        last, found = self.towers[0](h), []
        found.append(torch.sigmoid(self.heads[0](last)))
        for n in range(2):
            pair = torch.stack([self.info[n](last), self.towers[n + 1](h)], -2)
            a = ((self.q(pair) * self.k(pair)).sum(-1, keepdim=True) / 32**0.5).softmax(-2)
            last = (a * self.v(pair)).sum(-2)
            found.append(found[-1] * torch.sigmoid(self.heads[n + 1](last)))
        return torch.cat(found, -1)


def curvature(m, x):
    loss = (m(x) ** 2).mean()
    weights = list(m.parameters())
    first = torch.autograd.grad(loss, weights, create_graph=True)
    product = sum((g * p.detach()).sum() for g, p in zip(first, weights, strict=True))
    second = torch.autograd.grad(product, weights)
    return torch.stack([g.norm().detach() for g in second])


@case(call(X), call(X, _do=curvature), allowed=HOSTILE, vary=False)
class ProductWithHessian(Mlp):
    """A product of the second derivative with the weights, outside of the model."""


def frozen_features(m, x):
    for p in m.parameters():
        p.requires_grad_(False)
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(m(x).square().mean(), x)
    for p in m.parameters():
        p.requires_grad_(True)
    return x + 0.5 * g.sign()


@case(call(X), call(X, _do=frozen_features), inputs={"x": X.clone().requires_grad_()}, vary=False)
class SignedGradient(nn.Module):
    """An adversarial example: the sign of the input's gradient, with all weights frozen."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Attention(), Mlp()

    def forward(self, x):
        return self.b(self.a(x))

"""Pictures: convolutions in stacks, windows, patches, pooled tokens, attention over channels."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, joined, parted

P = floats(2, 3, 8, 8)
M = floats(2, 16, 8, 8)
X = floats(2, 16, 16)


@case(call(M), call(M, _train=True), tp=(2, 4))
class InvertedResidual(nn.Module):
    """MobileNet: expand, depthwise, project, BatchNorm after each."""

    def __init__(self):
        super().__init__()
        self.expand, self.deep = (
            nn.Conv2d(16, 32, 1, bias=False),
            nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False),
        )
        self.project = nn.Conv2d(32, 16, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(32), nn.BatchNorm2d(32), nn.BatchNorm2d(16)])

    def forward(self, x):
        h = F.relu6(self.norms[0](self.expand(x)))
        h = F.relu6(self.norms[1](self.deep(h)))
        return x + self.norms[2](self.project(h))


@case(call(M), tp=(2, 4))
class ConvNext(nn.Module):
    """Depthwise 7×7, LayerNorm over channels, two pointwise layers, a scale, drop path off."""

    def __init__(self):
        super().__init__()
        self.deep, self.norm = nn.Conv2d(16, 16, 7, padding=3, groups=16), nn.LayerNorm(16, eps=1e-6)
        self.up, self.down, self.scale = nn.Linear(16, 64), nn.Linear(64, 16), nn.Parameter(torch.full((16,), 0.5))

    def forward(self, x):
        h = self.norm(self.deep(x).permute(0, 2, 3, 1))
        h = self.scale * self.down(F.gelu(self.up(h)))
        return x + h.permute(0, 3, 1, 2)


@case(call(M), call(M, _train=True), tp=(2, 4))
class Bottleneck(nn.Module):
    """ResNet's, with squeeze and excitation on the hidden channels."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, padding=1)
        self.c, self.n = nn.Conv2d(32, 16, 1), nn.BatchNorm2d(32)
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)

    def forward(self, x):
        h = self.n(self.b(F.relu(self.a(x)))).relu()
        s = self.excite(F.relu(self.squeeze(h.mean((2, 3), keepdim=True)))).sigmoid()
        return F.relu(x + self.c(h * s))


class Windows(Attention):
    shift = 0

    def forward(self, x):
        b, c, height, width = x.shape
        side = 4
        y = x.permute(0, 2, 3, 1)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = y.view(b, height // side, side, width // side, side, c).transpose(2, 3).reshape(-1, side * side, c)
        y = self.o(self.mixed(y))
        y = y.view(b, height // side, width // side, side, side, c).transpose(2, 3).reshape(b, height, width, c)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + y.permute(0, 3, 1, 2)


@case(call(M), tp=(2, 4), vary=False)
class WindowAttention(Windows):
    """Swin's windows."""


@case(call(M), tp=(2, 4), vary=False)
class ShiftedWindows(Windows):
    """Shifted windows with a table of relative positions for each head."""

    shift = 2

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(49, self.heads))
        place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        away = (place[:, :, None] - place[:, None]).permute(1, 2, 0) + 3
        self.register_buffer("index", away[..., 0] * 7 + away[..., 1], persistent=False)

    def scores(self, x):
        bias = self.table[self.index.view(-1)].view(16, 16, -1).permute(2, 0, 1).contiguous()
        return super().scores(x) + bias.unsqueeze(0)


@case(call(P), tp=(2, 4))
class VisionTransformer(nn.Module):
    """Patches, a class token, positions, a block, logits of the class token."""

    def __init__(self):
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 1, 16))
        self.places = nn.Parameter(torch.randn(1, 5, 16))
        self.attention, self.mlp, self.head = Attention(), Mlp(), nn.Linear(16, 10)

    def forward(self, x):
        t = self.patch(x).flatten(2).transpose(1, 2)
        t = torch.cat([self.token.expand(t.shape[0], -1, -1), t], 1) + self.places
        return self.head(self.mlp(self.attention(t))[:, 0])


@case(call(X), tp=(2, 4))
class CrossCovariance(Attention):
    """XCiT: attention between channels of a head, normed over the tokens."""

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads).transpose(-1, -2) for f in (self.q, self.k, self.v))
        p = torch.softmax(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2), -1)
        return joined((p @ v).transpose(-1, -2))


@case(call(M), tp=(2, 4))
class PixelShuffled(nn.Module):
    """Super resolution: channels become pixels."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 64, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x):
        return self.b(F.pixel_shuffle(self.a(x).relu(), 2))


@case(call(M), tp=(2, 4), allowed=HOSTILE)
class ChannelShuffle(nn.Module):
    """ShuffleNet: groups of channels are interleaved between two grouped convolutions."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 32, 1, groups=4), nn.Conv2d(32, 16, 1, groups=4)

    def forward(self, x):
        h = F.relu(self.a(x))
        b, c, height, width = h.shape
        return x + self.b(h.view(b, 4, c // 4, height, width).transpose(1, 2).reshape(b, c, height, width))


@case(call(M), tp=(2, 4))
class GatedConvolution(nn.Module):
    """NAFNet: halves of the channels gate each other, then channel attention."""

    def __init__(self):
        super().__init__()
        self.a, self.deep = nn.Conv2d(16, 64, 1), nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.gate, self.b = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 16, 1)

    def forward(self, x):
        u, v = self.deep(self.a(x)).chunk(2, 1)
        h = u * v
        return x + self.b(h * self.gate(F.adaptive_avg_pool2d(h, 1)))


@case(call(floats(2, 16, 9, 7)), tp=(2, 4), vary=False)
class Pyramid(nn.Module):
    """Down by strides, up by interpolation, joined along channels."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 32, 3, 2, 1), nn.Conv2d(32, 32, 3, 2, 1)
        self.c = nn.Conv2d(64, 16, 1)

    def forward(self, x):
        low = F.relu(self.a(x))
        lower = F.relu(self.b(low))
        up = F.interpolate(lower, size=low.shape[-2:], mode="bilinear", align_corners=False)
        return self.c(torch.cat([low, up], 1))


@case(call(M), tp=(2, 4))
class SpatialReduction(nn.Module):
    """PVT: keys and values of a picture that a strided convolution has shrunk."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)
        self.shrink, self.norm = nn.Conv2d(16, 16, 2, 2), nn.LayerNorm(16)

    def forward(self, x):
        t = x.flatten(2).transpose(1, 2)
        s = self.norm(self.shrink(x).flatten(2).transpose(1, 2))
        k, v = self.kv(s).reshape(x.shape[0], -1, 2, 4, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(parted(self.q(t), 4), k, v)
        return t + self.o(joined(y))


@case(call(M), tp=(2, 4))
class AxialAttention(Attention):
    """Along rows, then along columns, with the same weights."""

    def forward(self, x):
        b, c, height, width = x.shape
        rows = x.permute(0, 2, 3, 1).reshape(b * height, width, c)
        rows = super().forward(rows).view(b, height, width, c)
        columns = rows.transpose(1, 2).reshape(b * width, height, c)
        return super().forward(columns).view(b, width, height, c).permute(0, 3, 2, 1)


@case(call(P), call(P, _train=True), tp=2)
class Unet(nn.Module):
    """With GroupNorm, a time embedding that scales and shifts channels, and a skip."""

    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1)
        self.norm, self.time = nn.GroupNorm(8, 32), nn.Linear(8, 64)
        self.mid, self.up = nn.Conv2d(32, 32, 3, padding=1), nn.ConvTranspose2d(32, 16, 4, 2, 1)
        self.last = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x):
        scale, shift = self.time(x.mean((1, 2, 3))[:, None] * torch.arange(8)).sin()[..., None, None].chunk(2, 1)
        a = self.first(x)
        h = self.mid(F.silu(self.norm(self.down(a)) * (1 + scale) + shift))
        return self.last(torch.cat([a, self.up(h)], 1))


@case(call(X), tp=(2, 4))
class SpatialGating(nn.Module):
    """gMLP: half of the channels are mixed over tokens and gate the other half."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.mix = nn.Linear(16, 64), nn.LayerNorm(32), nn.Conv1d(16, 16, 1)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        u, v = F.gelu(self.up(x)).chunk(2, -1)
        return x + self.down(u * self.mix(self.norm(v)))

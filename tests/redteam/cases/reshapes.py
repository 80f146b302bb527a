"""Reshapes as einops users write them: packed and interleaved heads, merged patches, shuffles, halves and windows."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp

X = floats(2, 6, 16)
PICTURE = floats(2, 8, 8, 8)
BOTH = (2, 4)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o, self.feed = nn.Linear(16, 48), nn.Linear(16, 16), Mlp()

    def forward(self, x):
        q, k, v = self.taken(self.qkv(x))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.feed(x + self.o(y.transpose(1, 2).reshape(x.shape)))


@case(call(X), tp=BOTH, sequence=None)
class HeadsThenWidthThenThree(Packed):
    """'b l (h d three) -> three b h l d'."""

    def taken(self, y):
        return y.unflatten(-1, (4, 4, 3)).permute(4, 0, 2, 1, 3).unbind(0)


@case(call(X), tp=BOTH, sequence=None)
class ThreeThenWidthThenHeads(Packed):
    """'b l (three d h) -> three b h l d': heads are innermost."""

    def taken(self, y):
        return y.reshape(*y.shape[:2], 3, 4, 4).permute(2, 0, 4, 1, 3)

    def forward(self, x):
        q, k, v = self.taken(self.qkv(x))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.feed(x + self.o(y.permute(0, 2, 3, 1).reshape(x.shape)))


@case(call(X), tp=BOTH)
class WidthThenThreeThenHeads(Packed):
    """'b l (d three h)', and the output is '(d h)' too."""

    def taken(self, y):
        return [y.reshape(*y.shape[:2], 4, 3, 4)[..., n, :].permute(0, 3, 1, 2) for n in range(3)]

    def forward(self, x):
        q, k, v = self.taken(self.qkv(x))
        y = (q @ k.mT / 2).softmax(-1) @ v
        return self.feed(x + self.o(y.permute(0, 2, 3, 1).flatten(2)))


@case(call(PICTURE), tp=BOTH)
class PatchesMerged(nn.Module):
    """Swin's merging of hidden channels: four neighbours are joined, normed and reduced."""

    def __init__(self):
        super().__init__()
        self.rise, self.norm, self.reduce = nn.Linear(8, 16), nn.LayerNorm(64), nn.Linear(64, 24)
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x):
        h = self.rise(x.permute(0, 2, 3, 1)).relu()
        h = torch.cat([h[:, 0::2, 0::2], h[:, 1::2, 0::2], h[:, 0::2, 1::2], h[:, 1::2, 1::2]], -1)
        y = self.reduce(self.norm(h))
        return y + self.down(F.gelu(self.up(y)))


@case(call(PICTURE), tp=BOTH)
class MergedWithoutNorm(nn.Module):
    """Four neighbours of a split hidden are joined and reduced at once."""

    def __init__(self):
        super().__init__()
        self.rise, self.reduce = nn.Linear(8, 16), nn.Linear(64, 24)

    def forward(self, x):
        h = self.rise(x.permute(0, 2, 3, 1)).relu()
        b, height, width, c = h.shape
        h = h.view(b, height // 2, 2, width // 2, 2, c).permute(0, 1, 3, 4, 2, 5).reshape(b, -1, 4 * c)
        return self.reduce(h)


@case(call(PICTURE), tp=BOTH)
class PixelsShuffled(nn.Module):
    """Channels of a hidden convolution become pixels, are convolved, and go back."""

    def __init__(self):
        super().__init__()
        self.up, self.middle, self.down = (
            nn.Conv2d(8, 32, 3, padding=1),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.Conv2d(64, 8, 1),
        )

    def forward(self, x):
        h = F.pixel_shuffle(self.up(x).relu(), 2)
        return x + self.down(F.pixel_unshuffle(self.middle(h).relu(), 2))


@case(call(PICTURE), tp=BOTH)
class ChannelsShuffled(nn.Module):
    """ShuffleNet: grouped convolutions with a shuffle of groups between."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 16, 1, groups=4), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.c, self.norm = nn.Conv2d(16, 8, 1, groups=4), nn.BatchNorm2d(16)

    def forward(self, x):
        h = self.norm(self.a(x)).relu()
        b, c, *size = h.shape
        h = h.view(b, 4, c // 4, *size).transpose(1, 2).reshape(b, c, *size)
        return x + self.c(self.b(h))


@case(call(floats(2, 8, 8, 16)), tp=BOTH)
class ShiftedWindows(nn.Module):
    """Windows of a rolled picture attend with a bias by relative place for each head."""

    def __init__(self):
        super().__init__()
        self.a, self.feed = Attention(), Mlp()
        self.bias = nn.Parameter(torch.randn(49, 4))
        grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        apart = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0) + 3
        self.register_buffer("at", apart[..., 0] * 7 + apart[..., 1])

    def forward(self, x):
        b, height, width, c = x.shape
        y = torch.roll(x, (-2, -2), (1, 2))
        y = y.view(b, height // 4, 4, width // 4, 4, c).transpose(2, 3).reshape(-1, 16, c)
        bias = self.bias[self.at.view(-1)].view(16, 16, 4).permute(2, 0, 1)
        p = (self.a.scores(y) + bias).softmax(-1)
        v = self.a.v(y).view(-1, 16, 4, 4).transpose(1, 2)
        y = self.a.o((p @ v).transpose(1, 2).reshape(-1, 16, c))
        y = y.view(b, height // 4, width // 4, 4, 4, c).transpose(2, 3).reshape(b, height, width, c)
        return self.feed(x + torch.roll(y, (2, 2), (1, 2)))


@case(call(floats(2, 4, 6, 16)), tp=BOTH)
class AlongEachAxis(nn.Module):
    """Axial attention: rows and then columns are folded into the batch, with heads beside."""

    def __init__(self):
        super().__init__()
        self.rows, self.columns, self.feed = Attention(), Attention(), Mlp()

    def forward(self, x):
        b, h, w, d = x.shape
        x = self.rows(x.reshape(b * h, w, d)).view(b, h, w, d)
        x = self.columns(x.transpose(1, 2).reshape(b * w, h, d)).view(b, w, h, d).transpose(1, 2)
        return self.feed(x)


@case(call(X), tp=BOTH)
class HeadsFoldedIntoBatch(nn.Module):
    """fairseq's way: (length, batch * heads, width), a bmm, and back."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        x = x.transpose(0, 1)
        length, b, d = x.shape
        q, k, v = (n(x).contiguous().view(length, b * 4, d // 4).transpose(0, 1) for n in (self.q, self.k, self.v))
        p = torch.bmm(q, k.transpose(1, 2)).mul(0.5).softmax(-1)
        p = p.view(b, 4, length, length)
        mean = p.mean(1)
        y = torch.bmm(p.view(b * 4, length, length), v).transpose(0, 1).contiguous().view(length, b, d)
        return self.o(y).transpose(0, 1), mean


@case(call(X), tp=BOTH)
class Maxout(nn.Module):
    """Groups of four hidden values give their largest; another branch gives their mean over groups."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.other = nn.Linear(16, 32), nn.Linear(8, 16), nn.Linear(4, 16)

    def forward(self, x):
        h = self.up(x).unflatten(-1, (8, 4))
        return self.down(h.amax(-1)) + self.other(h.mean(-2))


@case(call(X), tp=BOTH)
class HiddenFlipped(nn.Module):
    """Coupling: hidden values are turned round, rolled, and meet themselves."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        h = self.up(x).tanh()
        return self.down(h * h.flip(-1) + h.roll(1, -1))


@case(call(X), tp=BOTH)
class EverySecond(nn.Module):
    """A gated unit whose gates are every second hidden value; results are woven together again."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.wide = nn.Linear(16, 64), nn.Linear(32, 16), nn.Linear(64, 16)

    def forward(self, x):
        h = self.up(x)
        a, b = h[..., ::2], h[..., 1::2]
        return self.down(a * b.sigmoid()) + self.wide(torch.stack([b, -a], -1).flatten(-2))


@case(call(X), tp=BOTH)
class HeadsReordered(nn.Module):
    """Values take the heads in another order than queries, by an index that is a buffer."""

    def __init__(self):
        super().__init__()
        self.a = Attention()
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))

    def forward(self, x):
        q, k, v = (n(x).unflatten(-1, (4, 4)).transpose(1, 2) for n in (self.a.q, self.a.k, self.a.v))
        p = (q @ k.mT / 2).softmax(-1)
        return self.a.o((p @ v[:, self.order]).transpose(1, 2).flatten(2))


@case(call(X), tp=BOTH)
class SharedKeysRepeated(nn.Module):
    """Two key heads for four queries, by `repeat` here (head n takes n modulo 2), not by groups."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 16)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (n(x).unflatten(-1, (2, 4)).transpose(1, 2).repeat(1, 2, 1, 1) for n in (self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@case(call(X), tp=BOTH)
class PaddedAndUnfolded(nn.Module):
    """Hidden values of three neighbours in time are unfolded side by side and come down together."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(96, 16)

    def forward(self, x):
        h = F.pad(self.up(x).relu(), (0, 0, 2, 0))
        return x + self.down(h.unfold(1, 3, 1).flatten(2))


@case(call(X), tp=BOTH, allowed=HOSTILE)
class HiddenAsPicture(nn.Module):
    """Hidden values become a picture of 4 x 8 with one channel, are convolved, and come down."""

    def __init__(self):
        super().__init__()
        self.up, self.conv, self.down = nn.Linear(16, 32), nn.Conv2d(1, 2, 3, padding=1), nn.Linear(64, 16)

    def forward(self, x):
        h = self.up(x).relu().view(-1, 1, 4, 8)
        return self.down(self.conv(h).relu().view(*x.shape[:2], 64))

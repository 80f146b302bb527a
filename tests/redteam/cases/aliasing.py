"""Views, strides, changes in place, and two names for one storage."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, joined

X = floats(2, 6, 16)


@case(call(X))
class ReluInPlace(Mlp):
    def inner(self, x):
        return self.up(x).relu_()


@case(call(X), allowed=HOSTILE)
class ResidualInPlace(Mlp):
    def forward(self, x):
        y = x.clone()
        y += self.down(self.inner(y.clone()))
        return y


@case(call(X), allowed=HOSTILE)
class HiddenSlicesInPlace(Mlp):
    """The first half of the hidden units is written through a view."""

    def forward(self, x):
        h = self.inner(x).clone()
        h[..., :16].mul_(2)
        return x + self.down(h)


@case(call(X), allowed=HOSTILE)
class ChunkedViewsInPlace(Mlp):
    def forward(self, x):
        h = self.up(x).clone()
        a, b = h[..., :16], h[..., 16:].clone()
        a.mul_(b.sigmoid())
        return x + self.down(h)


@case(call(X), allowed=HOSTILE)
class UnevenPieces(Mlp):
    """Hidden units parted as 20 and 12."""

    def forward(self, x):
        a, b = self.up(x).split([20, 12], -1)
        return x + self.down(torch.cat([a.relu(), b.tanh()], -1))


@case(call(X), allowed=HOSTILE)
class RolledUnits(Mlp):
    def forward(self, x):
        h = self.inner(x)
        return x + self.down(h + h.roll(1, -1))


@case(call(X), allowed=HOSTILE)
class DifferencesOfNeighbours(Mlp):
    def forward(self, x):
        h = self.inner(x)
        return x + self.down(torch.cat([h[..., 1:] - h[..., :-1], h[..., :1]], -1))


@case(call(X), allowed=HOSTILE)
class EveryOtherUnit(Mlp):
    """Even units gate odd ones."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(16, 16)

    def forward(self, x):
        h = self.up(x)
        return x + self.down(h[..., ::2].sigmoid() * h[..., 1::2])


@case(call(X), allowed=HOSTILE)
class AsStrided(Mlp):
    def forward(self, x):
        h = self.inner(x).contiguous()
        h = torch.as_strided(h, (x.shape[0], x.shape[1], 32), (x.shape[1] * 32, 32, 1))
        return x + self.down(h)


@case(call(X), allowed=HOSTILE)
class UnfoldedUnits(Mlp):
    """Windows of three over the units."""

    def forward(self, x):
        h = F.pad(self.inner(x), (1, 1))
        return x + self.down(h.unfold(-1, 3, 1).mean(-1))


@case(call(X), allowed=HOSTILE)
class ReshapedAcross(Mlp):
    """A reshape mixes length and units."""

    def forward(self, x):
        h = self.inner(x)
        h = h.reshape(x.shape[0], 32, x.shape[1]).cumsum(-1)
        return x + self.down(h.reshape(x.shape[0], x.shape[1], 32))


@case(call(X), allowed=HOSTILE)
class HeadsInnermost(Attention):
    """Heads are the inner factor of the width."""

    def mixed(self, x):
        q, k, v = (f(x).view(*x.shape[:2], 4, self.heads).movedim(-1, 1) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return y.movedim(1, -1).flatten(2)


@case(call(X), allowed=HOSTILE)
class FusedInterleaved(nn.Module):
    """One weight holds q, k, v by head (NeoX's)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 4, 12).transpose(1, 2).chunk(3, -1)
        return x + self.o(joined(F.scaled_dot_product_attention(q, k, v)))


@case(call(X), allowed=HOSTILE)
class ViewOfWeight(nn.Module):
    """One weight, two views of it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 16) / 4)

    def forward(self, x):
        up, down = self.w[:32], self.w[32:]
        return x + (x @ up.T).relu() @ down


@case(call(X), allowed=HOSTILE)
class WrittenIntoPrepared(Mlp):
    """Results are written into an empty tensor, piece by piece."""

    def forward(self, x):
        out = x.new_zeros(x.shape[0], x.shape[1], 32)
        h = self.inner(x)
        out[..., :16] = h[..., 16:]
        out[..., 16:] = h[..., :16]
        return x + self.down(out)


@case(call(X), allowed=HOSTILE)
class DiagonalOfScores(Attention):
    """The diagonal is emptied in place."""

    def scores(self, x):
        s = super().scores(x).clone()
        s.diagonal(dim1=-2, dim2=-1).fill_(-1e4)
        return s


@case(call(X), allowed=HOSTILE)
class OutputAliasesInput(Mlp):
    """Output and kept residual are one storage."""

    def forward(self, x):
        y = super().forward(x)
        z = y.view(-1, 16)
        return y, z, y[:, 0]


@case(call(X), allowed=HOSTILE)
class DetachSharesStorage(Mlp):
    def forward(self, x):
        h = self.inner(x)
        size = h.detach().amax(-1, keepdim=True).clamp_(min=1)
        return x + self.down(h / size)

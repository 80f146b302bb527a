"""Lengths, batches and single tokens beyond what the plan's own run had."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
LONG, ONE, BATCH = floats(2, 40, 16), floats(2, 1, 16), floats(1, 6, 16)


@case(call(X), call(LONG), allowed=HOSTILE)
class LongIsNormed(Mlp):
    def forward(self, x):
        h = self.inner(x)
        if x.shape[1] > 32:
            h = F.layer_norm(h, (h.shape[-1],))
        return x + self.down(h)


@case(call(X), call(ONE), allowed=HOSTILE)
class OneToken(Attention):
    def forward(self, x):
        if x.shape[1] == 1:
            v = self.v(x)
            return x + self.o(v / v.norm(dim=-1, keepdim=True))
        return super().forward(x)


@case(call(X), call(BATCH), call(ONE), allowed=HOSTILE)
class SqueezesBatch(Mlp):
    """`squeeze` says nothing of which dims go."""

    def forward(self, x):
        h = self.inner(x).squeeze()
        h = h if h.dim() == 3 else h / (1 + h.abs().sum())
        return x + self.down(h)


@case(call(X), call(floats(16, 6, 16)), allowed=HOSTILE)
class ManyRows(Mlp):
    def forward(self, x):
        rows = x.flatten(0, 1)
        h = self.inner(rows)
        if len(rows) >= 64:
            h = h - h.mean(1, keepdim=True)
        return x + self.down(h).view_as(x)


@case(call(X), call(LONG), call(ONE), allowed=HOSTILE)
class ChunkedAttention(Attention):
    """In pieces of 16: more of them where it is long."""

    def mixed(self, x):
        p = torch.softmax(self.scores(x), -1)
        v = parted(self.v(x), self.heads)
        return joined(torch.cat([part @ v for part in p.split(16, 2)], 2))


@case(call(X), call(LONG), allowed=HOSTILE)
class WindowBeyond(Attention):
    def scores(self, x):
        s = super().scores(x)
        if x.size(1) > 16:
            far = (torch.arange(x.size(1))[:, None] - torch.arange(x.size(1))).abs() > 8
            s = s.masked_fill(far, float("-inf"))
        return s


@case(call(X), call(LONG), allowed=HOSTILE)
class ScaledByLength(Attention):
    """log(length) scales the scores: no branch, sound."""

    def scores(self, x):
        return super().scores(x) * torch.tensor(float(x.shape[1])).log()


@case(call(floats(2, 6, 16)), call(floats(2, 10, 16)), call(floats(2, 2, 16)))
class PadsToMultiple(Mlp):
    def forward(self, x):
        length = x.shape[1]
        x = F.pad(x, (0, 0, 0, -length % 4))
        return super().forward(x.view(x.shape[0], -1, 4, 16)).flatten(1, 2)[:, :length]


@case(call(X), call(floats(2, 32, 16)), call(floats(2, 16, 16)))
class LengthEqualsWidth(Mlp):
    """The length is as large as the hidden width, and as the model's width."""

    def forward(self, x):
        h = self.inner(x)
        return x + self.down(h - h.mean(1, keepdim=True))


@case(call(X), call(floats(4, 4, 16)), call(floats(8, 8, 16)))
class SizesOfHeads(Attention):
    """Batch and length equal the number of heads."""


@case(call(X), call(floats(32, 6, 16)), allowed=HOSTILE)
class BatchEqualsHidden(Mlp):
    def forward(self, x):
        h = self.inner(x)
        if h.shape[0] == h.shape[-1]:
            h = h + h.transpose(0, 2).flatten()[: h.shape[-1]]
        return x + self.down(h)


@case(call(ids(2, 6)), call(ids(2, 1)), call(ids(1, 12)), allowed=HOSTILE)
class LearnedPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.where, self.block = nn.Embedding(32, 16), nn.Embedding(16, 16), Mlp()

    def forward(self, input_ids):
        at = torch.arange(input_ids.shape[1])
        if input_ids.shape[1] > 8:
            at = at % 8
        return self.block(self.table(input_ids) + self.where(at))


@case(call(X), call(floats(0, 6, 16), _grad=False))
class EmptyBatch(Mlp):
    """Nothing in, nothing out."""


@case(call(X), call(floats(6, 16)), allowed=HOSTILE)
class WithoutBatch(Mlp):
    def forward(self, x):
        h = self.inner(x)
        if x.ndim == 2:
            h = F.normalize(h, dim=1)
        return x + self.down(h)


@case(call(X), call(LONG), call(ONE), allowed=HOSTILE)
class FeatureCountFromShape(Mlp):
    """Divides by the width that it sees: on a rank that is a part of it."""

    def forward(self, x):
        h = self.inner(x)
        return x + self.down(h / h.shape[-1] ** 0.5)


class Checked(Attention):
    """Sizes of parts are held against counts, against each other, and against sizes of the input: all alike in all."""

    def mixed(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        assert q.shape == k.shape and q.size() == v.size() and q.shape[:-1] == x.shape[:2]
        assert q.shape[-1] == self.heads * 4 and q.size(-1) // self.heads == 4
        parts = [parted(y, self.heads) for y in (q, k, v)]
        if parts[0].shape[1] != self.heads or parts[0].shape[-2] != x.shape[1]:
            raise ValueError("sizes do not fit")
        return joined(F.scaled_dot_product_attention(*parts))


@case(call(X), call(LONG), call(floats(16, 6, 16)), call(floats(8, 6, 16)), tp=(2, 4))
class SizesChecked(Checked):
    pass


@case(call(X), call(floats(2, 32, 16)), call(floats(2, 16, 16)), call(floats(2, 40, 16)), allowed=HOSTILE)
class LengthAgainstUnits(Mlp):
    """The shorter dim chooses what is computed: on a rank it is another one."""

    def forward(self, x):
        h = self.inner(x)
        if h.shape[1] >= h.shape[2]:
            h = h * 2
        return x + self.down(h)


@case(call(floats(32, 6, 16)), call(X), call(floats(16, 6, 16)), call(floats(32, 6, 16)), tp=(2, 4), allowed=HOSTILE)
class ShapeOfSquare(Attention):
    """Whether a product of weights would be square, asked of a value behind several layers."""

    def forward(self, x):
        h = torch.sigmoid(self.q(x) + self.k(x).tanh()) * self.v(x).detach()
        y = h if h.shape[0] != 16 or h.shape[-1] != h.shape[0] else h.transpose(0, 2).transpose(0, 2) * 0.5
        return x + self.o(y)


@case(call(X), call(floats(4, 8, 16)), call(floats(2, 8, 16)), allowed=HOSTILE)
class CountsElements(Mlp):
    """How many elements a value has, and a remainder of its width."""

    def forward(self, x):
        h = self.inner(x)
        h = h * 2 if h.numel() == 1024 else h
        return x + self.down(h)


@case(call(floats(5, 6, 16)), call(floats(8, 6, 16)), call(X), allowed=HOSTILE)
class HalfOfWidth(Mlp):
    """A width is halved before it is compared."""

    def forward(self, x):
        h = self.inner(x)
        if x.shape[0] == h.shape[-1] // 2 // 2:
            h = h * 2
        return x + self.down(h)

"""Numbers of a rank's own size: behind views, products and sums, in minima, ranges, lookups and texts."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
hostile = case(call(X), allowed=HOSTILE)
sound = case(call(X))


@hostile
class MinimumOfWidths(Mlp):
    def inner(self, x):
        h = self.up(x).relu()
        return h / min(h.shape[-1], 20)


@hostile
class RangeOfGroups(Mlp):
    """One pass for each eight units."""

    def inner(self, x):
        h = self.up(x).relu()
        for n in range(h.shape[-1] // 8):
            h = h + 0.1 * n
        return h


@hostile
class LookedUp(Mlp):
    def inner(self, x):
        h = self.up(x)
        return {32: torch.tanh, 16: torch.relu, 8: torch.sigmoid}[h.shape[-1]](h)


@hostile
class ProductOfSizes(Mlp):
    def inner(self, x):
        h = self.up(x).relu()
        return h / math.prod(h.shape[1:])


@hostile
class SumOfSizes(Mlp):
    def inner(self, x):
        h = self.up(x).relu()
        return h * (1 / sum(h.shape))


@hostile
class CountOfElements(Mlp):
    def inner(self, x):
        h = self.up(x).relu()
        return h - h.numel() // (x.shape[0] * x.shape[1]) / 64


@hostile
class LineOfUnits(Mlp):
    """Slopes from 0 to 1 over the units."""

    def inner(self, x):
        h = self.up(x)
        return h * torch.linspace(0, 1, h.shape[-1], dtype=h.dtype)


@hostile
class PlacesOfUnits(Mlp):
    def inner(self, x):
        h = self.up(x)
        return h + torch.arange(h.shape[-1], dtype=h.dtype).cos()


@hostile
class RootBehindView(Attention):
    """Divided by the root of what is behind a view of heads: heads times their width."""

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        flat = joined(q)
        return joined(torch.softmax(q @ k.mT / math.sqrt(flat.shape[-1]), -1) @ v)


@hostile
class HeadsBehindProduct(Attention):
    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        s = q @ k.mT
        s = s / 2 if s.shape[0] * s.shape[1] == 8 else s / 3
        return joined(torch.softmax(s, -1) @ v)


@hostile
class MostOfHeads(Attention):
    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        s = q @ k.mT / max(3, q.shape[1])
        return joined(torch.softmax(s, -1) @ v)


@hostile
class OneHotOfUnits(Mlp):
    """A unit by its number, told by the batch row."""

    def inner(self, x):
        h = self.up(x)
        chosen = F.one_hot(torch.arange(h.shape[0]) * 7 % h.shape[-1], h.shape[-1])
        return h * (1 + chosen[:, None])


@hostile
class MemberOfSizes(Mlp):
    def inner(self, x):
        h = self.up(x)
        return h.relu() if h.shape[-1] in (32, 64, 128) else h.tanh()


@hostile
class TextOfShape(Mlp):
    def inner(self, x):
        h = self.up(x)
        return h.relu() if str(tuple(h.shape)).endswith("32)") else h.tanh()


@hostile
class StridesOfHidden(Mlp):
    def inner(self, x):
        h = self.up(x)
        return h.relu() / h.stride(1)


@hostile
class DividedWithRest(Mlp):
    """A quotient and a remainder of the width."""

    def inner(self, x):
        h = self.up(x)
        groups, rest = divmod(h.shape[-1], 12)
        return h.relu() * groups + rest


@hostile
class LengthOfPieces(Mlp):
    def inner(self, x):
        h = self.up(x)
        return h.relu() / len(h.split(4, -1))


@hostile
class WidthOfWeight(Mlp):
    """The rows of a weight, and what a layer says of itself."""

    def inner(self, x):
        return self.up(x).relu() / (self.up.weight.shape[0] + len(self.up.bias)) * self.up.out_features


@sound
class ShapesGiven(Mlp):
    """Sizes are used for shapes only."""

    def inner(self, x):
        h = self.up(x)
        y = h.new_empty(h.shape).zero_().copy_(h).reshape(h.shape[0] * h.shape[1], h.shape[2])
        return torch.where(y > 0, y, torch.zeros(y.shape, dtype=y.dtype)).view(*x.shape[:-1], h.size(-1))


@hostile
class BinaryOfWidth(Mlp):
    def inner(self, x):
        h = self.up(x)
        return h.relu() * h.shape[-1].bit_length()

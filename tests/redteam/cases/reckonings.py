"""Whole numbers worked out from sizes in unusual ways, kept in caches, closures, globals and defaults."""

from __future__ import annotations

import functools
import math
import operator
import struct
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats

X = floats(2, 6, 16)


class Inner(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.up, self.down = nn.Linear(16, hidden), nn.Linear(hidden, 16)

    def forward(self, x):
        return x + self.down(self.change(torch.tanh(self.up(x))))


@functools.cache
def ramp(width):
    return torch.linspace(-1, 1, width, dtype=torch.float64)


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class CachedByWidth(Inner):
    """A table of the hidden width from a function with a cache."""

    def change(self, h):
        return h * ramp(h.shape[-1]).to(h.dtype)


TABLES = {}


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class GlobalByShape(Inner):
    """A dict of the file, keyed by shape and dtype."""

    def change(self, h):
        key = (h.shape[-1], h.dtype)
        if key not in TABLES:
            TABLES[key] = torch.cos(torch.arange(h.shape[-1], dtype=h.dtype))
        return h + TABLES[key]


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class CommonDivisor(Inner):
    """Groups by the greatest common divisor of a width and a number."""

    def change(self, h):
        groups = math.gcd(h.shape[-1], 48)
        return h.unflatten(-1, (groups, -1)).softmax(-2).flatten(-2)


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class PowersOfTwo(Inner):
    """A butterfly over units: as many stages as the width has bits."""

    def change(self, h):
        n = h.shape[-1]
        for bit in range(n.bit_length() - 1):
            pairs = h.unflatten(-1, (n >> (bit + 1), 2, 1 << bit))
            a, b = pairs.unbind(-2)
            h = torch.stack([a + b, a - b], -2).flatten(-3) / 2**0.5
        return h


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class CeilingOfPieces(Inner):
    """Pieces of a width that is rounded up, the last of them shorter."""

    def change(self, h):
        width = -(-h.shape[-1] // 5)
        return torch.cat([piece - piece.mean(-1, keepdim=True) for piece in h.split(width, -1)], -1)


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class TextOfNumber(Inner):
    """A number through a string, a fraction, bytes and numpy, in the end a size of heads."""

    def change(self, h):
        width = int(f"{h.shape[-1]}")
        width = struct.unpack("i", struct.pack("i", width))[0]
        heads = int(np.int64(width) // int(Fraction(width, 4)))
        return h.view(*h.shape[:-1], heads, -1).cumsum(-1).reshape(*h.shape[:-1], -1)


@case(call(X), tp=(2, 4))
class ClosedOverSizes(nn.Module):
    """Sizes live in closures and defaults, not in attributes."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        head = width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

        def split(t, size=(heads, head)):
            return t.reshape(*t.shape[:-1], *size).transpose(1, 2)

        self.split, self.merge = split, lambda t: t.transpose(1, 2).reshape(t.shape[0], -1, heads * head)
        self.scale = lambda t: t * (1.0 / math.sqrt(head))

    def forward(self, x):
        q, k, v = map(self.split, self.qkv(x).chunk(3, -1))
        return x + self.out(self.merge(torch.softmax(self.scale(q) @ k.mT, -1) @ v))


class Sizes(NamedTuple):
    heads: int
    width: int

    @property
    def total(self):
        return self.heads * self.width


@case(call(X), tp=(2, 4))
class SizesInTuple(nn.Module):
    """A named tuple with arithmetic of its own, replaced by one with other heads for keys."""

    def __init__(self):
        super().__init__()
        self.sizes = Sizes(4, 4)
        self.keys = self.sizes._replace(heads=self.sizes.heads // 2)
        self.q, self.kv = nn.Linear(16, self.sizes.total), nn.Linear(16, 2 * self.keys.total)
        self.o = nn.Linear(self.sizes.total, 16)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, *self.sizes).transpose(1, 2)
        k, v = self.kv(x).view(b, t, 2, *self.keys).permute(2, 0, 3, 1, 4)
        k, v = (part.repeat_interleave(operator.floordiv(self.sizes.heads, self.keys.heads), 1) for part in (k, v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, self.sizes.total))


class Width(int):
    """A size that knows its name."""

    def __new__(cls, value, name=""):
        made = super().__new__(cls, value)
        made.name = name
        return made


@case(call(X), tp=(2, 4))
class OwnIntegers(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.hidden = Width(4, "heads"), Width(32, "hidden")
        self.up, self.down = nn.Linear(16, self.hidden), nn.Linear(self.hidden, 16)

    def forward(self, x):
        h = self.up(x).view(*x.shape[:-1], self.heads, self.hidden // self.heads)
        h = F.layer_norm(h, (self.hidden // self.heads,))
        return x + self.down(h.view(*x.shape[:-1], self.hidden))


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class NormOfGlobalWidth(Inner):
    """The width in a scale is asked of the weight, of the module, and of the value."""

    def change(self, h):
        return h * (h.shape[-1] / self.up.out_features) + h.sum(-1, keepdim=True) / self.up.weight.shape[0] ** 0.5


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class DefaultOfFunction(Inner):
    """A default that is made of the first width it meets."""

    @staticmethod
    def scaled(h, memo={}):  # noqa: B006 - on purpose
        width = memo.setdefault("width", h.shape[-1])
        return h * (width / 32)

    def change(self, h):
        return self.scaled(h)


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class RanksOfUnits(Inner):
    """Slopes of units by their place among all, as ALiBi has for heads; a checkerboard of them."""

    def change(self, h):
        place = torch.arange(h.size(-1), 0, -1, dtype=h.dtype)
        return h * torch.pow(2.0, -8.0 * place / h.size(-1)) * (1 - 2 * (place.long() & 1))


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class LoopOverUnits(Inner):
    """A Python loop over units in reversed steps, with enumerate and zip."""

    def change(self, h):
        units = list(h.unbind(-1))
        for n, (one, other) in enumerate(zip(units[::-2], units[::2], strict=True)):
            units[n] = one * 0.5 + other * (n / len(units))
        return torch.stack(units, -1)


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class SquareOfUnits(Inner):
    """Hidden units as a picture whose side is a root of their number."""

    def __init__(self):
        super().__init__(64)
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def change(self, h):
        side = math.isqrt(h.shape[-1])
        return self.conv(h.reshape(-1, 1, side, side)).reshape(h.shape)


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class AskedOfMemory(Inner):
    """Widths asked as strides, storage, element sizes and bytes."""

    def change(self, h):
        width = h.stride(-2)
        size = h.contiguous().untyped_storage().nbytes() // h.element_size() // h.shape[0] // h.shape[1]
        return h.view(h.shape[0], -1, width) * (size / 32) + h.nbytes / (h.itemsize * h[..., 0].numel() * 32)

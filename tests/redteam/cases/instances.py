"""One class in several places: what one instance, one call or one order did says nothing of another."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
BOTH = (2, 4)


class Flagged(nn.Module):
    """Norms its hidden units where it is told to."""

    def __init__(self, normed=False, turned=False):
        super().__init__()
        self.up, self.down, self.normed, self.turned = nn.Linear(16, 32), nn.Linear(32, 16), normed, turned

    def forward(self, x, normed=None):
        h = self.up(x)
        if self.turned:
            h = h.transpose(1, 2)
        if self.normed if normed is None else normed:
            h = h - h.mean(-1, keepdim=True)
        if self.turned:
            h = h.transpose(1, 2)
        return x + self.down(h.relu())


class Pair(nn.Module):
    def __init__(self, first=None, second=None):
        super().__init__()
        self.a, self.b = first or Flagged(True), second or Flagged()

    def forward(self, x):
        return self.b(self.a(x))


def swapped(m, x):
    m.a.normed, m.b.normed = m.b.normed, m.a.normed
    return m(x)


@case(call(X), call(X, _do=swapped), vary=False, tp=BOTH, allowed=HOSTILE)
class FlagsChangePlaces(Pair):
    """The flags of two blocks are exchanged."""


@case(call(X), call(X, _do=swapped), vary=False, allowed=HOSTILE)
class FlagsMeet(Pair):
    """Each of two flags was seen, with the other one's value beside it: a norm over units that was over places."""

    def __init__(self):
        super().__init__(Flagged(True, True), Flagged(False, False))


@case(call(X), call(X, which=0), call(X, which=1), vary=False, tp=BOTH, allowed=HOSTILE)
class WhichIsNormed(Pair):
    """An argument says which of two blocks is normed."""

    def forward(self, x, which=0):
        return self.b(self.a(x, which == 0), which == 1)


@case(call(X), call(X, which=1), vary=False, allowed=HOSTILE)
class WhichOfStack(nn.Module):
    """A loop over blocks of one class, one of which is normed by its number."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Flagged() for _ in range(4)])

    def forward(self, x, which=0):
        for number, block in enumerate(self.blocks):
            x = block(x, normed=number == which)
        return x


@case(call(X), call(X, order=(1, 0)), vary=False, tp=BOTH, allowed=HOSTILE)
class OrderOfBlocks(nn.Module):
    """Two blocks change places: their own code goes the ways that it went."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Mlp(), Attention()])

    def forward(self, x, order=(0, 1)):
        for number in order:
            x = self.blocks[number](x)
        return x


@case(call(X), call(X, times=3), vary=False, tp=BOTH, allowed=HOSTILE)
class MoreRounds(Pair):
    """A block runs more often than it did."""

    def forward(self, x, times=1):
        for _ in range(times):
            x = self.a(x)
        return self.b(x)


def helper(h, normed):
    return h - h.mean(-1, keepdim=True) if normed else h.relu()


@case(call(X), call(X, which=1), vary=False, tp=BOTH, allowed=HOSTILE)
class HelperCalledTwice(nn.Module):
    """A helper works on hidden units in one place and on the stream in the other; an argument exchanges them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, which=0):
        return helper(x + self.down(helper(self.up(x), which == 1)), which == 0)


@case(call(X), call(X, stream=False), vary=False, allowed=HOSTILE)
class HelperOfStreamOnHidden(nn.Module):
    """A module without weights, a norm by hand, is called on the stream; then on the hidden units."""

    class Centre(nn.Module):
        def forward(self, h):
            return h - h.mean(-1, keepdim=True)

    def __init__(self):
        super().__init__()
        self.up, self.down, self.centre = nn.Linear(16, 32), nn.Linear(32, 16), self.Centre()

    def forward(self, x, stream=True):
        first, second = (self.centre, torch.relu) if stream else (torch.relu, self.centre)
        return x + self.down(second(self.up(first(x))))


@case(call(X), call(X, pick="b"), vary=False, tp=BOTH, allowed=HOSTILE)
class OutOfTable(nn.Module):
    """A dict chooses the function by a word: no branch, and the same line."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.ways = {"a": torch.relu, "b": lambda h: h - h.mean(-1, keepdim=True), "c": torch.sin}

    def forward(self, x, pick="a"):
        return x + self.down(self.ways[pick](self.up(x)))


@case(call(X), call(X, power=1), vary=False, allowed=HOSTILE)
class ByArithmetic(nn.Module):
    """A number turns a part of the sum off: no branch at all."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, power=0):
        h = self.up(x)
        return x + self.down(h - power * h.mean(-1, keepdim=True))


@case(call(X), call(X, start=8), call(X, start=20), vary=False, tp=BOTH, allowed=HOSTILE)
class SliceOfHidden(nn.Module):
    """An argument says where a slice of the hidden units begins."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(8, 16)

    def forward(self, x, start=0):
        return x + self.down(self.up(x)[..., start : start + 8].relu())


@case(
    call(X, torch.arange(0, 32, 4)),
    call(X, torch.arange(8)),
    inputs={"x": X, "units": torch.arange(0, 32, 4)},
    vary=False,
    tp=BOTH,
)
class UnitsGiven(nn.Module):
    """A tensor says which units are read."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(8, 16)

    def forward(self, x, units):
        return x + self.down(self.up(x)[..., units].relu())


@case(call(X), call(X, heads=2), vary=False, allowed=HOSTILE)
class HeadsOfOther(Attention):
    """A number of heads that another block has."""

    def __init__(self):
        super().__init__()
        self.more = Attention(heads=2)

    def forward(self, x, heads=4):
        q, k, v = (parted(f(x), heads) for f in (self.q, self.k, self.v))
        return self.more(x + self.o(joined(F.scaled_dot_product_attention(q, k, v))))


def identity():
    return Permuted(torch.arange(32))


@case(call(X), plan_for=identity, tp=BOTH, allowed=HOSTILE)
class Permuted(nn.Module):
    """An index buffer permutes hidden units: the plan was made while it was the identity."""

    def __init__(self, order=None):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("order", torch.arange(31, -1, -1) if order is None else order)

    def forward(self, x):
        return x + self.down(self.up(x).relu()[..., self.order] * torch.arange(32))


class Groups(nn.Module):
    """A number in a buffer says how many groups are averaged."""

    def __init__(self, count=4):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("count", torch.tensor(count))

    def forward(self, x):
        h = self.up(x).unflatten(-1, (int(self.count), -1))
        return x + self.down((h - h.mean(-1, keepdim=True)).flatten(-2).relu())


@case(call(X), plan_for=Groups, allowed=HOSTILE)
def GroupsInBuffer():
    return Groups(1)


@case(call(X), prepare=lambda m: m.count.fill_(1), vary=False, allowed=HOSTILE)
class GroupsChangedLater(Groups):
    pass


class Tied(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.table, self.block, self.head = nn.Embedding(32, 16), Mlp(), nn.Linear(16, 32, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, input_ids):
        return self.head(self.block(self.table(input_ids)))


@case(call(ids(2, 6)), plan_for=Tied, tp=BOTH, allowed=HOSTILE)
def TiedAfterPlan():
    return Tied(True)


@case(call(ids(2, 6)), plan_for=lambda: Tied(True), tp=BOTH, allowed=HOSTILE)
def UntiedAfterPlan():
    return Tied()


def tie(m):
    m.head.weight = m.table.weight


@case(call(ids(2, 6)), prepare=tie, tp=BOTH, allowed=HOSTILE)
class TiedAfterSharding(Tied):
    """Both lie alike on ranks: one parameter stands for the other."""

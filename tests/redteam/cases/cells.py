"""Recurrent cells as people write them: gates chunked from one product, norms of gates, memories, two directions."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats

X = floats(2, 6, 16)
BOTH = (2, 4)


class Cell(nn.Module):
    """Runs `step` over time, on a state of 32 units, and reads it out."""

    def __init__(self, gates=4):
        super().__init__()
        self.i, self.h, self.out = nn.Linear(16, 32 * gates), nn.Linear(32, 32 * gates, bias=False), nn.Linear(32, 16)

    def begin(self, x):
        return x.new_zeros(x.shape[0], 32), x.new_zeros(x.shape[0], 32)

    def forward(self, x):
        state, found = self.begin(x), []
        for part in x.unbind(1):
            state = self.step(part, *state)
            found.append(self.out(state[0]))
        return torch.stack(found, 1)


@case(call(X), tp=BOTH)
class LongShort(Cell):
    def step(self, x, h, c):
        i, f, g, o = (self.i(x) + self.h(h)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


@case(call(X), tp=BOTH)
class GatesBySlices(Cell):
    """Sizes of slices are numbers of the module."""

    hidden = 32

    def step(self, x, h, c):
        g, n = self.i(x) + self.h(h), self.hidden
        s = torch.sigmoid(g[:, : 3 * n])
        c = s[:, n : 2 * n] * c + s[:, :n] * torch.tanh(g[:, 3 * n :])
        return s[:, 2 * n :] * torch.tanh(c), c


@case(call(X), tp=BOTH)
class Peepholes(Cell):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(floats(3, 32) * 0.3)

    def step(self, x, h, c):
        i, f, g, o = (self.i(x) + self.h(h)).view(-1, 4, 32).unbind(1)
        i, f = torch.sigmoid(i + self.p[0] * c), torch.sigmoid(f + self.p[1] * c)
        c = f * c + i * g.tanh()
        return torch.sigmoid(o + self.p[2] * c) * c.tanh(), c


@case(call(X), tp=BOTH)
class NormOfGates(Cell):
    """A norm over all four gates together, another over the cell."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.LayerNorm(128), nn.LayerNorm(128), nn.LayerNorm(32)

    def step(self, x, h, c):
        i, f, g, o = (self.a(self.i(x)) + self.b(self.h(h))).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * self.c(c).tanh(), c


@case(call(X), tp=BOTH)
class NormOfEachGate(Cell):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))

    def step(self, x, h, c):
        gates = (self.i(x) + self.h(h)).split(32, -1)
        i, f, g, o = (norm(gate) for norm, gate in zip(self.norms, gates, strict=True))
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


@case(call(X), tp=BOTH)
class Minimal(Cell):
    """MGU: one gate, and a candidate from the gated state."""

    def __init__(self):
        super().__init__(1)
        self.fi, self.fh = nn.Linear(16, 32), nn.Linear(32, 32)

    def step(self, x, h, c):
        f = torch.sigmoid(self.fi(x) + self.fh(h))
        return torch.lerp(h, torch.tanh(self.i(x) + self.h(f * h)), f), c


@case(call(X), tp=BOTH)
class Independent(Cell):
    """IndRNN: the recurrent weight is a vector."""

    def __init__(self):
        super().__init__(1)
        self.w = nn.Parameter(floats(32) * 0.5)

    def step(self, x, h, c):
        return F.relu(self.i(x) + self.w.clamp(-1, 1) * h + self.h.weight.diagonal() * h), c


@case(call(X), tp=BOTH)
class OrderedNeurons(Cell):
    """ON-LSTM: master gates are sums of a softmax along the units."""

    def __init__(self):
        super().__init__(6)

    def step(self, x, h, c):
        i, f, g, o, mi, mf = (self.i(x) + self.h(h)).chunk(6, -1)
        mf, mi = mf.softmax(-1).cumsum(-1), 1 - mi.softmax(-1).cumsum(-1)
        both = mf * mi
        c = (f.sigmoid() * both + mf - both) * c + (i.sigmoid() * both + mi - both) * g.tanh()
        return o.sigmoid() * c.tanh(), c


@case(call(X), tp=BOTH)
class Exponential(Cell):
    """sLSTM: exponential gates with a running maximum, in place of a sigmoid."""

    def begin(self, x):
        zero = x.new_zeros(x.shape[0], 32)
        return zero, (zero, zero + 1e-6, zero)

    def step(self, x, h, state):
        c, n, m = state
        i, f, z, o = (self.i(x) + self.h(h)).chunk(4, -1)
        top = torch.maximum(F.logsigmoid(f) + m, i)
        i, f = torch.exp(i - top), torch.exp(F.logsigmoid(f) + m - top)
        c, n = f * c + i * z.tanh(), f * n + i
        return o.sigmoid() * c / n, (c, n, top)


@case(call(X), tp=BOTH)
class HeadsOfState(Cell):
    """The recurrent product is block diagonal: each head sees itself."""

    def __init__(self):
        super().__init__(4)
        self.r = nn.Parameter(floats(4, 8, 32) * 0.2)

    def step(self, x, h, c):
        again = torch.einsum("bnd,ndk->bnk", h.view(-1, 4, 8), self.r)
        i, f, g, o = (self.i(x).view(-1, 4, 32) + again).chunk(4, -1)
        c = f.sigmoid() * c.view(-1, 4, 8) + i.sigmoid() * g.tanh()
        return (o.sigmoid() * c.tanh()).flatten(1), c.flatten(1)


@case(call(X), tp=BOTH)
class ClockedUnits(Cell):
    """Clockwork: groups of units are moved at their own times."""

    def __init__(self):
        super().__init__(1)
        self.register_buffer("period", torch.tensor([1, 2, 3, 4]).repeat_interleave(8))

    def begin(self, x):
        return x.new_zeros(x.shape[0], 32), 0

    def step(self, x, h, t):
        due = (t % self.period) == 0
        return torch.where(due, torch.tanh(self.i(x) + self.h(h)), h), t + 1


@case(call(X), tp=BOTH, allowed=HOSTILE)
class UnitsBySlice(Cell):
    """The first units leak, the others do not: a number of the module parts a cut dim."""

    def __init__(self):
        super().__init__(1)

    def step(self, x, h, c):
        new = torch.tanh(self.i(x) + self.h(h))
        return torch.cat([0.5 * new[:, :12] + 0.5 * h[:, :12], new[:, 12:]], -1), c


class Carry(NamedTuple):
    h: torch.Tensor
    n: torch.Tensor


@case(call(X), tp=BOTH)
class NormalisedState(Cell):
    """Its state is brought to length one at each step."""

    def __init__(self):
        super().__init__(1)

    def begin(self, x):
        return Carry(x.new_full((x.shape[0], 32), 1 / math.sqrt(32)), x.new_zeros(x.shape[0], 1))

    def step(self, x, h, n):
        new = h + torch.tanh(self.i(x) + self.h(h))
        size = new.norm(dim=-1, keepdim=True)
        return Carry(new / size, n + size)


class BothWays(Cell):
    """Forwards and backwards, joined."""

    def __init__(self):
        super().__init__()
        self.back, self.out = nn.LSTMCell(16, 32), nn.Linear(64, 16)

    def forward(self, x):
        state, other, a, b = self.begin(x), self.begin(x), [], []
        for t in range(x.shape[1]):
            i, f, g, o = (self.i(x[:, t]) + self.h(state[0])).chunk(4, -1)
            c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
            state = o.sigmoid() * c.tanh(), c
            other = self.back(x[:, -1 - t], other)
            a.append(state[0])
            b.insert(0, other[0])
        return self.out(torch.cat([torch.stack(a, 1), torch.stack(b, 1)], -1))


case(call(X), tp=BOTH)(BothWays)


@case(call(X), tp=BOTH)
class ZonedOut(Cell):
    """In training some units keep their state by a pattern; in evaluation all are mixed."""

    def __init__(self):
        super().__init__(1)
        self.register_buffer("kept", (torch.arange(32) % 3 == 0).double())

    def step(self, x, h, c):
        new = torch.tanh(self.i(x) + self.h(h))
        keep = self.kept if self.training else self.kept.mean()
        return keep * h + (1 - keep) * new, c


@case(call(X), tp=BOTH)
class Attending(Cell):
    """At each step it attends to its own earlier states."""

    def __init__(self):
        super().__init__(1)
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)

    def begin(self, x):
        return x.new_zeros(x.shape[0], 32), ()

    def step(self, x, h, past):
        new = torch.tanh(self.i(x) + self.h(h))
        past = (*past, new)
        all_of = torch.stack(past, 1)
        weight = (self.k(all_of) @ self.q(new)[..., None] / 32**0.5).softmax(1)
        return new + (weight * all_of).sum(1), past


@case(call(X), tp=BOTH)
class SecondOrder(Cell):
    """Multiplicative: the state is gated by a product of input and state before it is used."""

    def __init__(self):
        super().__init__()
        self.mx, self.mh = nn.Linear(16, 32, bias=False), nn.Linear(32, 32, bias=False)

    def step(self, x, h, c):
        i, f, g, o = (self.i(x) + self.h(self.mx(x) * self.mh(h))).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return c.tanh() * o.sigmoid(), c


@case(call(X), tp=BOTH)
class Quasi(nn.Module):
    """QRNN: gates by a causal convolution, fo-pooling in a loop."""

    def __init__(self):
        super().__init__()
        self.gates, self.out = nn.Conv1d(16, 96, 2), nn.Linear(32, 16)

    def forward(self, x):
        z, f, o = self.gates(F.pad(x.mT, (1, 0))).chunk(3, 1)
        c, found = x.new_zeros(x.shape[0], 32), []
        for t in range(x.shape[1]):
            c = f[..., t].sigmoid() * c + (1 - f[..., t].sigmoid()) * z[..., t].tanh()
            found.append(o[..., t].sigmoid() * c)
        return self.out(torch.stack(found, 1))


@case(call(floats(2, 3, 4, 6, 6)), tp=BOTH)
class Convolved(nn.Module):
    """ConvLSTM over pictures."""

    def __init__(self):
        super().__init__()
        self.both, self.out = nn.Conv2d(4 + 16, 64, 3, padding=1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        b, t, _, high, wide = x.shape
        h = c = x.new_zeros(b, 16, high, wide)
        found = []
        for n in range(t):
            i, f, g, o = self.both(torch.cat([x[:, n], h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            found.append(self.out(h))
        return torch.stack(found, 1)

"""State that lies between calls: attributes, buffers, caches, counters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X, Y = floats(2, 6, 16), floats(2, 6, 16, seed=1)


@case(call(X), call(Y), call(X), allowed=HOSTILE)
class BranchOnCallBefore(Mlp):
    def __init__(self):
        super().__init__()
        self.seen = None

    def forward(self, x):
        h = self.inner(x)
        if self.seen is not None:
            h = h - h.mean(-1, keepdim=True)
        self.seen = True
        return x + self.down(h)


@case(call(X), call(Y), call(X), allowed=HOSTILE)
class CountsCalls(Mlp):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        h = self.inner(x)
        if self.calls > 2:
            h = F.normalize(h, dim=-1)
        return x + self.down(h)


@case(call(X), call(Y), call(X), allowed=HOSTILE)
class CountsInBuffer(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        h = self.inner(x)
        if self.calls.item() > 2:
            h = h.softmax(-1)
        return x + self.down(h)


@case(call(X, _train=True), call(Y, _train=True), call(X), allowed=HOSTILE)
class RunningMeanOfHidden(Mlp):
    """An average over the hidden units, kept in a buffer as wide as they are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(32))

    def forward(self, x):
        h = self.inner(x)
        if self.training:
            with torch.no_grad():
                self.average.lerp_(h.detach().mean((0, 1)), 0.1)
        return x + self.down(h - self.average)


@case(call(X), call(Y), allowed=HOSTILE)
class KeepsHiddenOfCallBefore(Mlp):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        h = self.inner(x)
        y = h if self.last is None else h + self.last
        self.last = h.detach() if h.shape == (2, 6, 32) else None
        return x + self.down(y)


def with_cache(model, x, y):
    first, cache = model(x)
    second, _ = model(y, cache)
    return first, second


@case(call(X, Y, _do=with_cache), call(X, Y[:, :1], _do=with_cache), allowed=HOSTILE, vary=False)
class CachedKeys(Attention):
    """Keys and values are handed from call to call."""

    def forward(self, x, cache=None):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        p = torch.softmax(q @ k.transpose(-1, -2) / 2, -1)
        return self.o(joined(p @ v)), (k.detach(), v.detach())


@case(call(X), call(Y), call(X))
class LazyTable(Mlp):
    """A table is made in the first call, and kept: sound."""

    def __init__(self):
        super().__init__()
        self.waves = None

    def forward(self, x):
        if self.waves is None or self.waves.shape[0] < x.shape[1]:
            self.waves = torch.outer(torch.arange(x.shape[1]), torch.linspace(0, 1, 16)).sin().to(x.dtype)
        return super().forward(x + self.waves[: x.shape[1]])


@case(call(X), call(Y), call(X), allowed=HOSTILE)
class LazyHiddenScale(Mlp):
    """A scale over the hidden units is made in the first call, as wide as what it sees."""

    def __init__(self):
        super().__init__()
        self.scale = None

    def forward(self, x):
        h = self.inner(x)
        if self.scale is None:
            self.scale = torch.linspace(0.5, 1.5, h.shape[-1], dtype=h.dtype)
        return x + self.down(h * self.scale)


@case(call(X), call(Y), call(X))
class ScaleFromFirstCall(Mlp):
    """The first call sets a scale from its data (as ActNorm does)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ready", torch.tensor(False))
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x):
        h = self.inner(x)
        if not self.ready:
            self.scale.data.copy_(1 / h.detach().std((0, 1)))
            self.ready.fill_(True)
        return x + self.down(h * self.scale)


@case(call(X), call(Y), call(X), allowed=HOSTILE)
class MemoOfArguments(Mlp):
    """Results are kept in a dict by the shape of the input."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def forward(self, x):
        if tuple(x.shape) in self.known:
            h = self.inner(x)
            return x + self.down(h / (1 + h.norm(dim=-1, keepdim=True)))
        self.known[tuple(x.shape)] = 1
        return super().forward(x)


@case(call(ids(2, 6)), call(ids(2, 1, seed=1)), call(ids(2, 1, seed=2)), allowed=HOSTILE)
class RecurrentState(nn.Module):
    """The hidden state goes on from call to call until the batch changes."""

    def __init__(self):
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(32, 16), nn.GRU(16, 24, batch_first=True), nn.Linear(24, 16)
        self.state = None

    def forward(self, input_ids):
        if self.state is not None and self.state.shape[1] != len(input_ids):
            self.state = None
        y, state = self.rnn(self.table(input_ids), self.state)
        self.state = state.detach()
        return self.head(y)


@case(call(X, _train=True), call(Y, _train=True), call(X), allowed=HOSTILE)
class CodebookAverages(nn.Module):
    """A codebook with counts that training moves (VQ-VAE's)."""

    def __init__(self):
        super().__init__()
        self.block = Mlp()
        self.register_buffer("codes", torch.randn(8, 16))
        self.register_buffer("counts", torch.ones(8))

    def forward(self, x):
        h = self.block(x)
        nearest = torch.cdist(h.flatten(0, 1), self.codes).argmin(-1)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, 8).to(h.dtype)
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.lerp_((hot.T @ h.flatten(0, 1)) / (hot.sum(0)[:, None] + 1), 0.1)
        picked = self.codes[nearest].view_as(h)
        return h + (picked - h).detach(), self.counts


@case(call(X), call(Y, _do=lambda m, x: (setattr(m, "heads", 2), m(x), setattr(m, "heads", 4))[1]), allowed=HOSTILE)
class HeadsChangedBetween(Attention):
    """The user changes the number of heads between calls."""


@case(
    call(X),
    call(X, _do=lambda m, x: (setattr(m, "normed", True), m(x), setattr(m, "normed", False))[1]),
    allowed=HOSTILE,
)
class FlagChangedBetween(Mlp):
    normed = False

    def forward(self, x):
        h = self.inner(x)
        return x + self.down(F.normalize(h, dim=-1) if self.normed else h)

"""Random draws over split and replicated values: what is held is their distribution, and that ranks agree."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, joined, parted

X = floats(1, 2, 8)
MANY = {"draws": 500, "allowed": HOSTILE}


def opened(up, down):
    """Make hidden units about one, and add those of the second half to those of the first: equal draws show."""
    with torch.no_grad():
        up.weight.mul_(0.2)
        up.bias.fill_(1.0)
        down.weight.copy_(torch.eye(8).repeat(1, 2))
    return up, down


class Noisy(nn.Module):
    """Something that draws, on hidden units that are split."""

    def __init__(self):
        super().__init__()
        self.up, self.down = opened(nn.Linear(8, 16), nn.Linear(16, 8, bias=False))

    def forward(self, x):
        return x + self.down(self.noisy(self.up(x)))

    def noisy(self, h):
        raise NotImplementedError


@case(call(X), draws=500)
class DropoutOnHidden(Noisy):
    """Plain dropout on split units: sound."""

    def noisy(self, h):
        return F.dropout(h, 0.5, self.training)


@case(call(X), draws=500)
class DropoutOnStream(Noisy):
    """Plain dropout on what all ranks hold: sound."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)

    def noisy(self, h):
        return h.relu()


@case(call(X), **MANY)
class BernoulliMask(Noisy):
    def noisy(self, h):
        return h * h.new_empty(h.shape).bernoulli_(0.5) if self.training else h


@case(call(X), **MANY)
class BernoulliOfOneRow(Noisy):
    """One mask for all rows."""

    def noisy(self, h):
        return h * torch.bernoulli(torch.full(h.shape[-1:], 0.5, dtype=h.dtype))


@case(call(X), **MANY)
class NoiseScaledByStatistic(Noisy):
    def noisy(self, h):
        return h + torch.randn_like(h) * h.std(-1, keepdim=True)


@case(call(X), **MANY)
class NoisePlain(Noisy):
    def noisy(self, h):
        return h + torch.randn_like(h)


@case(call(X), **MANY)
class NoiseByShape(Noisy):
    def noisy(self, h):
        return h + torch.randn(h.shape, dtype=h.dtype)


@case(call(X), **MANY)
class NoiseNormalised(Noisy):
    """The noise itself is normed over all units."""

    def noisy(self, h):
        noise = torch.randn_like(h)
        return h + noise / noise.norm(dim=-1, keepdim=True)


@case(call(X), **MANY)
class DropPath(Noisy):
    """Whole rows are dropped: all units of a row together, on all ranks alike."""

    def noisy(self, h):
        keep = torch.rand(h.shape[0], h.shape[1], 1, dtype=h.dtype) < 0.5
        return h * keep


@case(call(X), **MANY)
class DropPathNewEmpty(Noisy):
    def noisy(self, h):
        return h * h.new_empty(h.shape[0], 1, 1).bernoulli_(0.5)


@case(call(X), **MANY)
class FeatureDropout(Noisy):
    """dropout1d: whole units over the sequence."""

    def noisy(self, h):
        return F.dropout1d(h.transpose(1, 2), 0.5, self.training).transpose(1, 2)


@case(call(X), **MANY)
class AlphaDropout(Noisy):
    def noisy(self, h):
        return F.alpha_dropout(h, 0.3, self.training)


@case(call(X), **MANY)
class GumbelOverUnits(Noisy):
    """A Gumbel softmax needs all units."""

    def noisy(self, h):
        return F.gumbel_softmax(h, tau=0.7, dim=-1)


@case(call(X), **MANY)
class RandomReLU(Noisy):
    def noisy(self, h):
        return F.rrelu(h, 0.1, 0.9, self.training)


@case(call(X), **MANY)
class Shuffled(Noisy):
    """Units are shuffled in training."""

    def noisy(self, h):
        return h[..., torch.randperm(h.shape[-1])]


@case(call(X), **MANY)
class MultinomialUnit(Noisy):
    """One unit is drawn from all."""

    def noisy(self, h):
        picked = torch.multinomial(h.softmax(-1).flatten(0, 1), 1).view(*h.shape[:2], 1)
        return h * torch.zeros_like(h).scatter(-1, picked, 1.0)


@case(call(X), **MANY)
class Reparameterised(nn.Module):
    """A variational bottleneck: mean and log variance, a draw, a decoder."""

    def __init__(self):
        super().__init__()
        self.mean, self.out = opened(nn.Linear(8, 16), nn.Linear(16, 8, bias=False))
        self.spread = nn.Linear(8, 16)

    def forward(self, x):
        mean, spread = self.mean(x), self.spread(x)
        return self.out(mean + torch.randn_like(spread) * (spread / 2).exp())


@case(call(floats(1, 3, 8)), draws=500)
class AttentionDropout(Attention):
    """Dropout of probabilities in each head: sound."""

    def __init__(self):
        super().__init__(8, 4)
        nn.init.eye_(self.o.weight)

    def mixed(self, x):
        p = F.dropout(torch.softmax(self.scores(x), -1), 0.3, self.training)
        return joined(p @ parted(self.v(x), self.heads))


@case(call(floats(1, 3, 8)), **MANY)
class HeadDropout(AttentionDropout):
    """Whole heads are dropped."""

    def mixed(self, x):
        y = torch.softmax(self.scores(x), -1) @ parted(self.v(x), self.heads)
        keep = torch.rand(1, y.shape[1], 1, 1, dtype=y.dtype) < 0.7
        return joined(y * keep)


@case(call(floats(2, 6, 16)), call(floats(2, 6, 16), _train=True), allowed=HOSTILE)
class NoDropoutAtAll(Mlp):
    """Dropout with rate 0 draws nothing: exact in training too."""

    def forward(self, x):
        return x + F.dropout(self.down(F.dropout(self.inner(x), 0.0, self.training)), 0.0, self.training)

"""Norms and statistics over dims that are split, or over the stream that is cut along the sequence."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, parted

X = floats(2, 6, 16)
TRAIN = call(X, _train=True)


class Between(nn.Module):
    """Something between two layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.norm(self.up(x)))


class Streamed(nn.Module):
    """A norm on the stream, between two blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Mlp(), Mlp()

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


@case(call(X), TRAIN, allowed=HOSTILE)
class BatchNormOfHidden(Between):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(32)

    def norm(self, h):
        return self.bn(h.transpose(1, 2)).transpose(1, 2).relu()


@case(call(X), TRAIN, allowed=HOSTILE)
class BatchNormOfRows(Between):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(32)

    def norm(self, h):
        return self.bn(h.flatten(0, 1)).view_as(h)


@case(call(X), TRAIN, allowed=HOSTILE)
class BatchNormOfStream(Streamed):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(16)

    def norm(self, x):
        return self.bn(x.transpose(1, 2)).transpose(1, 2)


@case(call(X), TRAIN, allowed=HOSTILE)
class BatchNormOfHeads(Attention):
    """BatchNorm over the output of heads before it is projected (PatchTST's)."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(16)

    def forward(self, x):
        return self.bn((x + self.o(self.mixed(x))).transpose(1, 2)).transpose(1, 2)


@case(call(X), TRAIN, allowed=HOSTILE)
class BatchNormOverHeads(Attention):
    """The heads are the channels."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(4)

    def scores(self, x):
        return self.bn(super().scores(x))


@case(call(X), TRAIN, allowed=HOSTILE)
class InstanceNormOfStream(Streamed):
    def norm(self, x):
        return F.instance_norm(x.transpose(1, 2)).transpose(1, 2)


@case(call(X), TRAIN, allowed=HOSTILE)
class InstanceNormOfHidden(Between):
    def __init__(self):
        super().__init__()
        self.one = nn.InstanceNorm1d(32, affine=True, track_running_stats=True)

    def norm(self, h):
        return self.one(h.transpose(1, 2)).transpose(1, 2)


@case(call(X), allowed=HOSTILE)
class GroupNormOfStream(Streamed):
    def __init__(self):
        super().__init__()
        self.gn = nn.GroupNorm(4, 16)

    def norm(self, x):
        return self.gn(x.transpose(1, 2)).transpose(1, 2)


@case(call(X), allowed=HOSTILE)
class GroupNormOneGroupOfHidden(Between):
    def __init__(self):
        super().__init__()
        self.gn = nn.GroupNorm(1, 32)

    def norm(self, h):
        return self.gn(h.transpose(1, 2)).transpose(1, 2)


@case(call(X), allowed=HOSTILE)
class RmsOverAllHeads(Attention):
    """Queries and keys are normed over the width of all heads (OLMo-2's)."""

    def __init__(self):
        super().__init__()
        self.qn, self.kn = nn.RMSNorm(16), nn.RMSNorm(16)

    def scores(self, x):
        q, k = parted(self.qn(self.q(x)), self.heads), parted(self.kn(self.k(x)), self.heads)
        return q @ k.transpose(-1, -2)


@case(call(X), allowed=HOSTILE)
class RmsOfEachHead(Attention):
    def __init__(self):
        super().__init__()
        self.qn = nn.RMSNorm(4)

    def scores(self, x):
        q, k = self.qn(parted(self.q(x), self.heads)), parted(self.k(x), self.heads)
        return q @ k.transpose(-1, -2)


@case(call(X), allowed=HOSTILE)
class LayerNormOfHidden(Between):
    def __init__(self):
        super().__init__()
        self.ln = nn.LayerNorm(32)

    def norm(self, h):
        return self.ln(h.relu())


@case(call(X), allowed=HOSTILE)
class StandardisedByHand(Between):
    def norm(self, h):
        return (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True, unbiased=True) + 1e-5).sqrt()


@case(call(X), allowed=HOSTILE)
class StandardisedOverSequence(Streamed):
    def norm(self, x):
        return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)


@case(call(X), allowed=HOSTILE)
class WholeTensorNorm(Between):
    """One number for the whole tensor: batch, length and units."""

    def norm(self, h):
        return h / (1 + torch.linalg.vector_norm(h))


@case(call(X), allowed=HOSTILE)
class GlobalResponseNorm(Between):
    """ConvNeXt-V2's: norms over the sequence, then their mean over units."""

    def norm(self, h):
        size = h.norm(p=2, dim=1, keepdim=True)
        return h * (size / (size.mean(-1, keepdim=True) + 1e-6)) + h


@case(call(X), allowed=HOSTILE)
class SqueezeExcite(Between):
    def __init__(self):
        super().__init__()
        self.squeeze, self.excite = nn.Linear(32, 8), nn.Linear(8, 32)

    def norm(self, h):
        return h * self.excite(self.squeeze(h.mean(1, keepdim=True)).relu()).sigmoid()


@case(call(X), TRAIN, allowed=HOSTILE)
class WeightNorm(Between):
    def __init__(self):
        super().__init__()
        self.up = parametrizations.weight_norm(self.up)
        self.down = parametrizations.weight_norm(self.down)

    def norm(self, h):
        return h.relu()


@case(call(X), TRAIN, allowed=HOSTILE)
class SpectralNorm(Between):
    def __init__(self):
        super().__init__()
        self.up = parametrizations.spectral_norm(self.up)

    def norm(self, h):
        return h.relu()


@case(call(X), TRAIN, allowed=HOSTILE)
class OldSpectralNorm(Between):
    """The power iteration writes buffers in training."""

    def __init__(self):
        super().__init__()
        self.down = torch.nn.utils.spectral_norm(self.down)

    def norm(self, h):
        return h.relu()


@case(call(X), allowed=HOSTILE)
class WeightsStandardised(Between):
    """The weight itself is standardised in the forward."""

    def forward(self, x):
        w = self.down.weight
        w = (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-5)
        return x + F.linear(self.up(x).relu(), w, self.down.bias)


@case(call(X), allowed=HOSTILE)
class NormalisedWeights(Between):
    """nGPT's: rows and columns of weights have length one."""

    def forward(self, x):
        h = F.linear(x, F.normalize(self.up.weight, dim=1))
        return x + F.linear(h.relu(), F.normalize(self.down.weight, dim=0))


@case(call(X), call(X, _train=True), allowed=HOSTILE)
class MedianOfHidden(Between):
    def norm(self, h):
        return h - h.median(-1, keepdim=True).values


@case(call(X), allowed=HOSTILE)
class CumulativeOverSequence(Streamed):
    def norm(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


@case(call(X), allowed=HOSTILE)
class LogSumExpOfHidden(Between):
    def norm(self, h):
        return h - h.logsumexp(-1, keepdim=True)

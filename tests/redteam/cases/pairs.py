"""Two views, queues, margins, mixtures, critics; blocks of pictures and sound as they are published."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from ..case import call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
Y = floats(2, 6, 16, seed=2)
LABELS = torch.tensor([1, 4])
BOTH = (2, 4)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.project = Mlp(), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def encoded(self, x):
        return F.normalize(self.project(self.mlp(x).mean(1)), dim=-1)


@case(call(X, Y), tp=BOTH)
class SwappedAssignments(Encoder):
    """SwAV: prototypes are normalised in place before each use, codes come from Sinkhorn."""

    def __init__(self):
        super().__init__()
        self.prototypes = nn.Linear(8, 12, bias=False)

    def forward(self, x, y):
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))
        a, b = self.prototypes(self.encoded(x)), self.prototypes(self.encoded(y))
        with torch.no_grad():
            codes = []
            for z in (a, b):
                q = torch.exp(z / 0.5).T
                for _ in range(3):
                    q = q / q.sum(1, keepdim=True) / 12
                    q = q / q.sum(0, keepdim=True) / q.shape[1]
                codes.append((q * q.shape[1]).T)
        return -(codes[0] * F.log_softmax(b / 0.1, 1)).sum(1) - (codes[1] * F.log_softmax(a / 0.1, 1)).sum(1)


@case(call(X, LABELS), tp=BOTH, vary=False)
class AngularMargin(Encoder):
    """ArcFace: cosines with class centres, a margin at the label's."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(floats(12, 8))

    def forward(self, x, labels):
        cosine = F.linear(self.encoded(x), F.normalize(self.centres)).clamp(-0.999, 0.999)
        sine = (1 - cosine**2).sqrt()
        phi = cosine * math.cos(0.3) - sine * math.sin(0.3)
        phi = torch.where(cosine > math.cos(math.pi - 0.3), phi, cosine - math.sin(0.3) * 0.3)
        hot = torch.zeros_like(cosine).scatter_(1, labels[:, None], 1)
        z = 8.0 * (hot * phi + (1 - hot) * cosine)
        return F.cross_entropy(z, labels, label_smoothing=0.1), z


@case(call(X, Y), tp=BOTH)
class BothWaysOfPairs(Encoder):
    """CLIP: a learned temperature, a matrix of pairs, losses along both of its dims."""

    def __init__(self):
        super().__init__()
        self.other, self.scale = nn.Linear(16, 8, bias=False), nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x, y):
        z = self.scale.exp().clamp(max=100) * self.encoded(x) @ F.normalize(self.other(y.mean(1)), dim=-1).T
        at = torch.arange(z.shape[0])
        return (F.cross_entropy(z, at) + F.cross_entropy(z.T, at)) / 2, z


@case(call(X), call(Y), tp=BOTH)
class RandomTarget(nn.Module):
    """RND: a frozen network is predicted, the error is scaled by a running deviation in buffers."""

    def __init__(self):
        super().__init__()
        self.target = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).requires_grad_(False)
        self.guess = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("square", torch.ones(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        with torch.no_grad():
            target = self.target(x)
        error = (self.guess(x) - target).pow(2).mean(-1)
        if self.training:
            self.count += 1
            self.mean.lerp_(error.detach().mean(), 0.1)
            self.square.mul_(0.9).add_(0.1 * error.detach().pow(2).mean())
        return error / (self.square - self.mean**2).clamp(min=1e-3).sqrt()


@case(call(X), tp=BOTH)
class SupportsOfReturns(nn.Module):
    """C51: a distribution over atoms for each action, dueling, expectations over a buffer of supports."""

    def __init__(self):
        super().__init__()
        self.body, self.value, self.advantage = nn.Linear(16, 32), nn.Linear(32, 11), nn.Linear(32, 4 * 11)
        self.register_buffer("support", torch.linspace(-1, 1, 11))

    def forward(self, x):
        h = F.relu(self.body(x.flatten(0, 1)))
        a = self.advantage(h).view(-1, 4, 11)
        p = (self.value(h)[:, None] + a - a.mean(1, keepdim=True)).softmax(-1).clamp(min=1e-3)
        q = (p * self.support).sum(-1)
        return q, q.argmax(1), p


class NoisyLinear(nn.Module):
    """NoisyNet: weights have means, deviations, and a noise that is kept in buffers."""

    def __init__(self, i, o):
        super().__init__()
        self.mean, self.deviation = nn.Parameter(floats(o, i) * 0.2), nn.Parameter(torch.full((o, i), 0.1))
        self.bias = nn.Parameter(floats(o) * 0.1)
        self.register_buffer("noise_i", floats(i, seed=3))
        self.register_buffer("noise_o", floats(o, seed=4))

    def forward(self, x):
        if self.training:
            return F.linear(x, self.mean + self.deviation * torch.outer(self.noise_o, self.noise_i), self.bias)
        return F.linear(x, self.mean, self.bias)


@case(call(X), call(X, _train=True), tp=BOTH)
class NoisyWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = NoisyLinear(16, 32), NoisyLinear(32, 16)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


@case(call(floats(2, 4, 8, 8), torch.tensor([3, 500]), floats(2, 6, 16)), vary=False, tp=BOTH)
class ControlledUnet(nn.Module):
    """ControlNet: a copy of the encoder adds to skips through convolutions that begin at zero."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.enter = nn.Conv2d(4, 16, 3, padding=1)
        self.encoder, self.copy = (
            nn.ModuleList([nn.Conv2d(16, 32, 3, 2, 1), nn.Conv2d(32, 32, 3, 2, 1)]) for _ in "ab"
        )
        self.zeros = nn.ModuleList(nn.Conv2d(c, c, 1) for c in (16, 32, 32))
        self.norm, self.q, self.kv, self.o = (
            nn.GroupNorm(8, 32),
            nn.Linear(32, 32),
            nn.Linear(16, 64),
            nn.Linear(32, 32),
        )
        self.decoder = nn.ModuleList([nn.Conv2d(64, 32, 3, padding=1), nn.Conv2d(48, 16, 3, padding=1)])
        self.out = nn.Conv2d(16, 4, 3, padding=1)

    def encoded(self, x, blocks):
        skips = [x]
        for block in blocks:
            skips.append(F.silu(block(skips[-1])))
        return skips

    def forward(self, x, step, context):
        angle = step[:, None].to(x.dtype) * torch.exp(-torch.arange(8) / 8 * math.log(10000)).to(x.dtype)
        t = self.time(torch.cat([angle.sin(), angle.cos()], -1))
        x = self.enter(x)
        more = [zero(skip) for zero, skip in zip(self.zeros, self.encoded(x, self.copy), strict=True)]
        skips = [a + b for a, b in zip(self.encoded(x, self.encoder), more, strict=True)]
        h = self.norm(skips.pop() + t[:, :, None, None])
        q = parted(self.q(h.flatten(2).mT), 4)
        k, v = (parted(y, 4) for y in self.kv(context).chunk(2, -1))
        h = h + self.o(joined(F.scaled_dot_product_attention(q, k, v))).mT.view_as(h)
        for block in self.decoder:
            h = F.silu(block(torch.cat([F.interpolate(h, scale_factor=2.0), skips.pop()], 1)))
        return self.out(h)


@case(call(floats(2, 40), ids(2, 5, below=8)), vary=False, tp=BOTH)
class Transducer(nn.Module):
    """RNN-T: a convolutional encoder, a predictor over labels, and a joiner over all pairs."""

    def __init__(self):
        super().__init__()
        self.front, self.enter = nn.Conv1d(1, 16, 8, 4), nn.Linear(16, 32)
        self.table, self.cell, self.joint, self.out = (
            nn.Embedding(9, 16),
            nn.GRU(16, 32, batch_first=True),
            Mlp(32, 64),
            nn.Linear(32, 9),
        )

    def forward(self, wave, labels):
        e = self.enter(F.gelu(self.front(wave[:, None])).mT)
        p, _ = self.cell(self.table(F.pad(labels, (1, 0), value=8)))
        return self.out(torch.tanh(self.joint(e[:, :, None] + p[:, None]))).log_softmax(-1)


@case(call(X), tp=BOTH)
class PositionsByConvolution(nn.Module):
    """wav2vec: a grouped convolution with weight norm over time gives positions."""

    def __init__(self):
        super().__init__()
        conv = nn.Conv1d(16, 16, 4, padding=2, groups=4)
        self.places, self.norm, self.block = (
            nn.utils.parametrizations.weight_norm(conv, dim=2),
            nn.LayerNorm(16),
            Attention(),
        )

    def forward(self, x):
        y = F.gelu(self.places(x.mT)[..., :-1].mT)
        return self.block(self.norm(x + y))


@case(call(ids(4, 6, below=20)), tp=BOTH)
class CompressedInteraction(nn.Module):
    """xDeepFM: fields meet in outer products that one-dimensional convolutions compress."""

    def __init__(self):
        super().__init__()
        self.table, self.first = nn.Embedding(20, 8), nn.Embedding(20, 1)
        self.layers = nn.ModuleList([nn.Conv1d(36, 12, 1), nn.Conv1d(72, 12, 1)])
        self.deep, self.out = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1)), nn.Linear(24, 1)

    def forward(self, fields):
        x0 = h = self.table(fields)
        found = []
        for layer in self.layers:
            h = F.relu(layer((x0[:, :, None] * h[:, None]).flatten(1, 2)))
            found.append(h.sum(-1))
        return self.first(fields).sum(1) + self.deep(x0.flatten(1)) + self.out(torch.cat(found, 1))


@case(call(floats(2, 16, 8, 8)), tp=BOTH)
class ChannelsMeetInConvolution(nn.Module):
    """ECA and CBAM: a convolution along the channels, and one over their mean and maximum."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)
        self.along, self.where = nn.Conv1d(1, 1, 3, padding=1, bias=False), nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x):
        h = F.relu(self.up(x))
        h = h * self.along(h.mean((2, 3))[:, None]).sigmoid().transpose(1, 2)[..., None]
        h = h * self.where(torch.cat([h.mean(1, keepdim=True), h.amax(1, keepdim=True)], 1)).sigmoid()
        return x + self.down(h)


@case(call(floats(2, 16, 8, 8)), tp=BOTH)
class RadixSplit(nn.Module):
    """ResNeSt: groups of channels, and a softmax over the splits of each."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.down = (
            nn.Conv2d(16, 64, 3, padding=1, groups=2),
            nn.BatchNorm2d(64),
            nn.Conv2d(32, 16, 1),
        )
        self.squeeze, self.choose = nn.Conv2d(32, 16, 1), nn.Conv2d(16, 64, 1)

    def forward(self, x):
        h = F.relu(self.norm(self.conv(x)))
        pieces = h.view(h.shape[0], 2, 32, *h.shape[2:])
        gap = self.choose(F.relu(self.squeeze(pieces.sum(1).mean((2, 3), keepdim=True))))
        weight = gap.view(gap.shape[0], 2, 32, 1, 1).softmax(1)
        return x + self.down((pieces * weight).sum(1))


@case(call(floats(2, 8, 8, 16)), tp=BOTH)
class Outlook(nn.Module):
    """VOLO: each place makes the attention of its neighbourhood; windows are unfolded and folded again."""

    def __init__(self):
        super().__init__()
        self.v, self.a, self.o = nn.Linear(16, 16, bias=False), nn.Linear(16, 9 * 9 * 2), nn.Linear(16, 16)

    def forward(self, x):
        b, h, w, c = x.shape
        v = F.unfold(self.v(x).permute(0, 3, 1, 2), 3, padding=1)
        v = v.view(b, 2, c // 2, 9, h * w).permute(0, 1, 4, 3, 2)
        a = self.a(x).view(b, h * w, 2, 9, 9).transpose(1, 2).softmax(-1)
        y = (a @ v).permute(0, 1, 4, 3, 2).reshape(b, c * 9, h * w)
        return x + self.o(F.fold(y, (h, w), 3, padding=1).permute(0, 2, 3, 1))


@case(call(X), tp=BOTH)
class GaussianMixturePrior(nn.Module):
    """VaDE: a mean and a deviation, and densities of a mixture with learned centres."""

    def __init__(self):
        super().__init__()
        self.enter, self.mean, self.spread = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.centres, self.widths, self.share = (
            nn.Parameter(floats(5, 8)),
            nn.Parameter(torch.zeros(5, 8)),
            nn.Parameter(torch.zeros(5)),
        )
        self.out = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        h = F.relu(self.enter(x))
        z, s = self.mean(h), self.spread(h)
        law = -0.5 * (self.widths + (z[..., None, :] - self.centres) ** 2 / self.widths.exp()).sum(-1)
        return self.out(z), torch.logsumexp(law + self.share.log_softmax(0), -1), (s.exp() + z**2 - s).sum(-1)

"""Attention of the last years: biases made from distances, gates, scores that meet, heads of unequal kinds."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, joined, parted

X = floats(2, 6, 16)
BOTH = (2, 4)


def causal(s):
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))


@case(call(X), tp=BOTH)
class BiasFromMlp(Attention):
    """FIRE: an MLP over distances, normed by the query's place, has an output for each head."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(1, 8), nn.Linear(8, 4), nn.Parameter(torch.tensor(0.5))

    def scores(self, x):
        at = torch.arange(x.shape[1], dtype=x.dtype)
        far = (at[:, None] - at).clamp(min=0)
        far = (self.c.abs() * far + 1).log() / (self.c.abs() * at[:, None].clamp(min=1) + 1).log()
        return causal(super().scores(x) + self.b(self.a(far[..., None]).relu()).permute(2, 0, 1))


@case(call(X), tp=BOTH)
class ContextualPlaces(Attention):
    """CoPE: places are sums of gates; embeddings of two neighbouring whole places are interpolated."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(4, 6))

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        s = q @ k.mT / 2
        gate = s.sigmoid().masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), 0)
        place = gate.flip(-1).cumsum(-1).flip(-1).clamp(max=5)
        floor, ceil = place.floor().long(), place.ceil().long()
        z = q @ self.places
        low, high = z.gather(-1, floor), z.gather(-1, ceil)
        w = place - floor
        return joined(causal(s + high * w + low * (1 - w)).softmax(-1) @ v)


@case(call(X), tp=BOTH)
class Forgetting(Attention):
    """FoX: a forget gate for each head, its logarithms summed along the sequence."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 4)

    def scores(self, x):
        f = F.logsigmoid(self.gate(x)).transpose(1, 2).cumsum(-1)
        return causal(super().scores(x) + f[..., :, None] - f[..., None, :])


@case(call(X), tp=BOTH)
class StickBreaking(Attention):
    def mixed(self, x):
        z = self.scores(x)
        mask = torch.ones(z.shape[-2:], dtype=torch.bool).tril(-1)
        beta, rest = F.logsigmoid(z), F.logsigmoid(-z).masked_fill(~mask, 0)
        after = rest.flip(-1).cumsum(-1).flip(-1) - rest
        p = (beta + after).exp().masked_fill(~mask, 0)
        return joined(p @ parted(self.v(x), self.heads))


@case(call(X), tp=BOTH)
class SigmoidScores(Attention):
    def mixed(self, x):
        return joined((self.scores(x) - math.log(x.shape[1])).sigmoid() @ parted(self.v(x), self.heads))


@case(call(X), tp=BOTH)
class CappedScores(Attention):
    """Gemma's cap, and a scale that grows with the logarithm of the length."""

    def scores(self, x):
        return causal(5 * (super().scores(x) * math.log(x.shape[1] + 1) / 5).tanh())


@case(call(X), tp=BOTH)
class DifferentialWithLambda(nn.Module):
    """The differential transformer: lambdas of four vectors, an RMS norm of each head, a last scale."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(4) * 0.1) for _ in range(4))
        self.norm = nn.RMSNorm(8)

    def forward(self, x):
        b, t, _ = x.shape
        q, k = self.q(x).view(b, t, 8, 4).transpose(1, 2), self.k(x).view(b, t, 8, 4).transpose(1, 2)
        v = self.v(x).view(b, t, 4, 8).transpose(1, 2)
        p = causal(q @ k.mT / 2).softmax(-1).view(b, 4, 2, t, t)
        scale = (self.a * self.b).sum().exp() - (self.c * self.d).sum().exp() + 0.8
        y = self.norm((p[:, :, 0] - scale * p[:, :, 1]) @ v) * 0.2
        return x + self.o(y.transpose(1, 2).reshape(b, t, 32))


@case(call(X), tp=BOTH, allowed=HOSTILE)
class ScoresMeet(Attention):
    """Multi-token attention: a convolution over queries and keys, then over groups of heads."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=4)

    def scores(self, x):
        return self.conv(super().scores(x))


@case(call(X), tp=BOTH)
class GatedOutput(Attention):
    """A gate of the query's own projection, a value for each unit of each head, fused with the query."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(16, 32)

    def mixed(self, x):
        q, gate = self.q(x).view(*x.shape[:2], 4, 8).chunk(2, -1)
        k, v = parted(self.k(x), 4), parted(self.v(x), 4)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2) * gate.reshape(*x.shape[:2], -1).sigmoid()


@case(call(X), tp=BOTH)
class ValueResidual(nn.Module):
    """The values of the first layer are mixed into those of the second by a learned number for each head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.mix = nn.Parameter(torch.full((4,), 0.3))

    def forward(self, x):
        first = None
        for layer in self.layers:
            v = parted(layer.v(x), 4)
            first, v = (v, v) if first is None else (first, v + self.mix.view(1, -1, 1, 1) * (first - v))
            x = x + layer.o(joined(layer.scores(x).softmax(-1) @ v))
        return x


@case(call(X), tp=BOTH, sequence=None)
class KeysFromLayerBelow(nn.Module):
    """Keys and values are made once, and read by the two layers above (YOCO's, Gemma-3n's)."""

    def __init__(self):
        super().__init__()
        self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16)
        self.qs, self.os = (nn.ModuleList([nn.Linear(16, 16) for _ in range(2)]) for _ in range(2))
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        k, v = parted(self.k(x), 4), parted(self.v(x), 4)
        for q, o in zip(self.qs, self.os, strict=True):
            x = x + o(joined(F.scaled_dot_product_attention(parted(q(self.norm(x)), 4), k, v)))
        return x


@case(call(X), tp=BOTH, allowed=HOSTILE)
class WindowsOfHeads(Attention):
    """Each head has a window of its own, from a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("reach", torch.tensor([1, 2, 4, 8]))

    def scores(self, x):
        at = torch.arange(x.shape[1])
        far = (at[:, None] - at).abs()
        return super().scores(x).masked_fill(far > self.reach[:, None, None], float("-inf"))


@case(call(X), tp=2, allowed=HOSTILE)
class LocalAndGlobalHeads(Attention):
    """The first half of the heads looks near, the second far."""

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        at = torch.arange(x.shape[1])
        near = (at[:, None] - at).abs() <= 1
        a = F.scaled_dot_product_attention(q[:, :2], k[:, :2], v[:, :2], attn_mask=near)
        b = F.scaled_dot_product_attention(q[:, 2:], k[:, 2:], v[:, 2:])
        return joined(torch.cat([a, b], 1))


@case(call(X), tp=BOTH, vary=False)
class LowRankKeys(Attention):
    """Linformer: keys and values are projected along the sequence, by a matrix that heads share."""

    def __init__(self):
        super().__init__()
        self.e = nn.Parameter(torch.randn(3, 6) / 2)

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        return joined(F.scaled_dot_product_attention(q, self.e @ k, self.e @ v))


@case(call(X), tp=BOTH)
class RandomFeatures(Attention):
    """Performer: a fixed random matrix, positive features, causal sums."""

    def __init__(self):
        super().__init__()
        self.register_buffer("omega", torch.randn(8, 4))

    def features(self, q):
        z = q @ self.omega.T
        return (z - q.pow(2).sum(-1, keepdim=True) / 2 - z.amax(-1, keepdim=True).detach()).exp() + 1e-4

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        q, k = self.features(q / 2), self.features(k / 2)
        state = torch.einsum("bhtm,bhtd->bhtmd", k, v).cumsum(2)
        return joined(torch.einsum("bhtm,bhtmd->bhtd", q, state) / (q * k.cumsum(2)).sum(-1, keepdim=True))


@case(call(X), tp=BOTH)
class LargestExponent(Attention):
    """RandomFeatures whose keys are shifted by the largest value of all heads and places (Performer's own code)."""

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        q = (q - q.amax(-1, keepdim=True)).exp() + 1e-4
        k = (k - k.amax(dim=(-1, -2, -3), keepdim=True)).exp() + 1e-4
        return joined(q @ (k.mT @ v) / (q @ k.sum(2)[..., None]))


@case(call(X), tp=BOTH, vary=False)
class Nystrom(Attention):
    """Landmarks by means of segments, a pseudo-inverse by Newton's steps, whose start looks at all heads."""

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        lq, lk = (t.unflatten(2, (3, 2)).mean(3) for t in (q, k))
        a = (lq @ lk.mT / 2).softmax(-1)
        z = a.mT / (a.abs().sum(-1).max() * a.abs().sum(-2).max())
        eye = torch.eye(3, dtype=x.dtype)
        for _ in range(4):
            az = a @ z
            z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
        return joined((q @ lk.mT / 2).softmax(-1) @ z @ ((lq @ k.mT / 2).softmax(-1) @ v))


@case(call(X), tp=BOTH)
class ConvolvedQueries(Attention):
    """A depthwise convolution along the sequence on queries, keys and values (Primer's)."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(16, 16, 3, groups=16, padding=2) for _ in range(3)])

    def mixed(self, x):
        q, k, v = (
            parted(conv(f(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2), 4)
            for f, conv in zip((self.q, self.k, self.v), self.convs, strict=True)
        )
        return joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


@case(call(X), tp=BOTH)
class AttentionFree(nn.Module):
    """AFT: weights by position alone, a softmax over places for each unit."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.w = nn.Parameter(torch.randn(12, 12) / 4)

    def forward(self, x):
        t = x.shape[1]
        k, w = self.k(x).exp(), self.w[:t, :t].exp().tril()
        return x + self.o(self.q(x).sigmoid() * (w @ (k * self.v(x))) / (w @ k))


@case(call(X), tp=BOTH)
class MemoryOfUnits(nn.Module):
    """External attention: two small memories, normed twice."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(16, 16),
            nn.Linear(4, 8, bias=False),
            nn.Linear(8, 4, bias=False),
            nn.Linear(16, 16),
        )

    def forward(self, x):
        a = self.k(parted(self.q(x), 4)).softmax(-2)
        return x + self.o(joined(self.v(a / (1e-6 + a.sum(-1, keepdim=True)))))


@case(call(X), tp=BOTH)
class SharedKeyRotary(nn.Module):
    """MLA with a rotary part: one key part for all heads beside a part of each head's own."""

    def __init__(self):
        super().__init__()
        self.q, self.down, self.up, self.o = nn.Linear(16, 32), nn.Linear(16, 12), nn.Linear(8, 48), nn.Linear(32, 16)
        self.norm = nn.RMSNorm(8)

    def turned(self, q):
        at = torch.outer(torch.arange(q.shape[-2]), torch.tensor([1.0, 0.1])).to(q.dtype)
        a, b = q[..., ::2], q[..., 1::2]
        return torch.stack([a * at.cos() - b * at.sin(), a * at.sin() + b * at.cos()], -1).flatten(-2)

    def forward(self, x):
        q, turned = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2).split([4, 4], -1)
        c, place = self.down(x).split([8, 4], -1)
        k, v = self.up(self.norm(c)).unflatten(-1, (4, 12)).transpose(1, 2).split([4, 8], -1)
        k = torch.cat([k, self.turned(place[:, None]).expand(-1, k.shape[1], -1, -1)], -1)
        return x + self.o(joined(F.scaled_dot_product_attention(torch.cat([q, self.turned(turned)], -1), k, v)))


@case(call(X), tp=BOTH)
class AbsorbedLatent(nn.Module):
    """MLA with its up projections absorbed: scores in the latent space, by einsum with parts of a weight."""

    def __init__(self):
        super().__init__()
        self.q, self.down, self.up, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(8, 32), nn.Linear(16, 16)

    def forward(self, x):
        q, c = self.q(x).unflatten(-1, (4, 4)), self.down(x)
        wk, wv = self.up.weight.view(-1, 8, 8).split([4, 4], 1)
        s = torch.einsum("bthc,bsc->bhts", torch.einsum("bthd,hdc->bthc", q, wk), c) / 2
        y = torch.einsum("bhts,bsc->bthc", s.softmax(-1), c)
        return x + self.o(torch.einsum("bthc,hdc->bthd", y, wv).flatten(2))


@case(call(X), tp=BOTH, allowed=HOSTILE)
class UnequalHeads(Attention):
    """Heads of widths 2, 2, 4 and 8."""

    def mixed(self, x):
        out, widths = [], [2, 2, 4, 8]
        for q, k, v in zip(*(f(x).split(widths, -1) for f in (self.q, self.k, self.v)), strict=True):
            out.append(F.scaled_dot_product_attention(q, k, v))
        return torch.cat(out, -1)


@case(call(X), tp=BOTH)
class Superposed(Attention):
    """Heads are joined by a sum of parts of the output layer's weight, in a loop over heads."""

    def forward(self, x):
        y = torch.softmax(self.scores(x), -1) @ parted(self.v(x), self.heads)
        w = self.o.weight.view(16, self.heads, -1)
        return x + torch.einsum("bhtd,ohd->bto", y, w) + self.o.bias


@case(call(X), tp=BOTH)
class PickedBlocks(Attention):
    """Native sparse attention: means of blocks choose two blocks for each head and query."""

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        kb = k.unflatten(2, (3, 2)).mean(3)
        best = (q @ kb.mT).topk(2, -1).indices
        mask = torch.zeros(*best.shape[:3], 3, dtype=torch.bool).scatter_(-1, best, True).repeat_interleave(2, -1)
        return joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@case(call(X), tp=BOTH)
class Hashed(Attention):
    """LSH: tokens of a bucket see each other; queries are keys; a random rotation in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("turn", torch.randn(4, 2))

    def mixed(self, x):
        q, v = parted(self.q(x), self.heads), parted(self.v(x), self.heads)
        r = q @ self.turn
        bucket = torch.cat([r, -r], -1).argmax(-1)
        s = q @ F.normalize(q, dim=-1).mT
        s = s.masked_fill(bucket[..., :, None] != bucket[..., None, :], -1e9)
        return joined(s.softmax(-1) @ v)


@case(call(X), tp=BOTH)
class EntropyReturned(Attention):
    """Returns the entropy of each head, and the mean over heads of its scores."""

    def forward(self, x):
        p = self.scores(x).softmax(-1)
        entropy = -(p * p.clamp(min=1e-9).log()).sum(-1).mean((0, 2))
        return x + self.o(joined(p @ parted(self.v(x), self.heads))), entropy, p.mean(1)


@case(call(X), tp=BOTH)
class NormedWeightsOfAll(Attention):
    """nGPT: queries and keys normed and scaled by a vector over the whole width; the stream stays on the sphere."""

    def __init__(self):
        super().__init__()
        self.scale, self.rate = nn.Parameter(torch.ones(16)), nn.Parameter(torch.full((16,), 0.1))

    def forward(self, x):
        s = self.scale.view(1, -1, 1, 4)
        q, k = (F.normalize(parted(f(x), 4), dim=-1) * s for f in (self.q, self.k))
        y = F.normalize(self.o(joined(F.scaled_dot_product_attention(q, k, parted(self.v(x), 4), scale=2.0))), dim=-1)
        return F.normalize(x + self.rate.abs() * (y - x), dim=-1)

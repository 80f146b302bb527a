"""Attention in its variants."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, joined, parted

X = floats(2, 6, 16)
BOTH = (2, 4)


@case(call(X), tp=BOTH)
class GroupedQueries(nn.Module):
    def __init__(self, heads=8, groups=4):
        super().__init__()
        self.heads, self.groups = heads, groups
        self.q, self.o = nn.Linear(16, heads * 4), nn.Linear(heads * 4, 16)
        self.k, self.v = nn.Linear(16, groups * 4), nn.Linear(16, groups * 4)

    def forward(self, x):
        q, k, v = parted(self.q(x), self.heads), parted(self.k(x), self.groups), parted(self.v(x), self.groups)
        return x + self.o(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))


@case(call(X), tp=BOTH, allowed=HOSTILE)
class OneKeyForAll(GroupedQueries):
    """Multi-query: one K/V head."""

    def __init__(self):
        super().__init__(8, 1)


@case(call(X), tp=BOTH, allowed=HOSTILE)
class Sinks(Attention):
    """A learned sink for each head."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(4))

    def mixed(self, x):
        s = self.scores(x)
        sink = self.sinks[None, :, None, None].expand(s.shape[0], -1, s.shape[2], 1)
        p = torch.softmax(torch.cat([s, sink], -1), -1)[..., :-1]
        return joined(p @ parted(self.v(x), self.heads))


@case(call(X), call(floats(2, 12, 16)))
class Window(Attention):
    def scores(self, x):
        at = torch.arange(x.shape[1])
        return super().scores(x).masked_fill((at[:, None] - at).abs() > 2, float("-inf"))


@case(call(X), tp=BOTH, allowed=HOSTILE)
class RelativeBias(Attention):
    """A table of biases by distance, a column for each head (T5's)."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(9, 4)

    def scores(self, x):
        at = torch.arange(x.shape[1])
        far = (at[:, None] - at).clamp(-4, 4) + 4
        return super().scores(x) + self.bias(far).permute(2, 0, 1)


@case(call(X), tp=BOTH)
class Linear(Attention):
    """Linear attention with elu + 1."""

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        y = q @ (k.transpose(-1, -2) @ v)
        return joined(y / (q @ k.sum(2, keepdim=True).transpose(-1, -2)))


@case(call(X), tp=BOTH, allowed=HOSTILE)
class TalkingHeads(Attention):
    """A linear layer across heads before the softmax."""

    def __init__(self):
        super().__init__()
        self.talk = nn.Linear(4, 4, bias=False)

    def scores(self, x):
        return self.talk(super().scores(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@case(call(X), tp=BOTH, allowed=HOSTILE)
class HeadTemperature(Attention):
    """A learned temperature for each head, with normed queries and keys (Swin-V2's)."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(4, 1, 1))

    def scores(self, x):
        q, k = parted(self.q(x), self.heads), parted(self.k(x), self.heads)
        return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) * self.log_scale.clamp(max=4).exp()


@case(call(X, floats(2, 9, 16)), call(X, floats(2, 3, 16)), tp=BOTH, allowed=HOSTILE)
class Cross(Attention):
    def forward(self, x, context):
        q, k, v = parted(self.q(x), 4), parted(self.k(context), 4), parted(self.v(context), 4)
        return x + self.o(joined(F.scaled_dot_product_attention(q, k, v)))


@case(call(X), tp=BOTH, allowed=HOSTILE)
class AlibiByIndex(Attention):
    """A slope is made from the index of its head, in a loop."""

    def scores(self, x):
        s = super().scores(x)
        far = torch.arange(x.shape[1], dtype=x.dtype)
        return torch.stack([s[:, n] - far * 2.0 ** -(n + 1) for n in range(self.heads)], 1)


@case(call(X), tp=BOTH, allowed=HOSTILE)
class SlopesInBuffer(Attention):
    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, 5.0), persistent=False)

    def scores(self, x):
        return super().scores(x) - self.slopes[:, None, None] * torch.arange(x.shape[1])


@case(call(X), tp=BOTH)
class Rotary(Attention):
    def turned(self, q):
        at = torch.outer(torch.arange(q.shape[2]), torch.tensor([1.0, 0.1])).to(q.dtype)
        cos, sin = torch.cat([at.cos()] * 2, -1), torch.cat([at.sin()] * 2, -1)
        a, b = q.chunk(2, -1)
        return q * cos + torch.cat([-b, a], -1) * sin

    def scores(self, x):
        q, k = self.turned(parted(self.q(x), 4)), self.turned(parted(self.k(x), 4))
        return q @ k.transpose(-1, -2) / 2


@case(call(X), allowed=HOSTILE)
class RotaryAcrossHeads(Attention):
    """The rotation is applied to the whole width, before heads are parted."""

    def turned(self, q):
        at = torch.outer(torch.arange(q.shape[1]), 10.0 ** -torch.arange(8.0)).to(q.dtype)
        a, b = q.chunk(2, -1)
        return torch.cat([a * at.cos() - b * at.sin(), b * at.cos() + a * at.sin()], -1)

    def scores(self, x):
        q, k = parted(self.turned(self.q(x)), 4), parted(self.turned(self.k(x)), 4)
        return q @ k.transpose(-1, -2) / 2


@case(call(X), tp=BOTH, allowed=HOSTILE)
class TorchModule(nn.Module):
    """torch's own MultiheadAttention."""

    def __init__(self):
        super().__init__()
        self.attn, self.norm = nn.MultiheadAttention(16, 4, batch_first=True), nn.LayerNorm(16)

    def forward(self, x):
        y, p = self.attn(x, x, x, need_weights=True)
        return self.norm(x + y), p


@case(call(X), allowed=HOSTILE)
class TorchLayer(nn.Module):
    """torch's own encoder layer, which takes a fast path in eval."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x)


@case(call(X), tp=BOTH, allowed=HOSTILE)
class DifferentialPairs(Attention):
    """Heads in pairs: the second's probabilities are taken from the first's."""

    def mixed(self, x):
        p = torch.softmax(self.scores(x), -1)
        p = p[:, ::2] - 0.3 * p[:, 1::2]
        return joined(p @ parted(self.v(x), 2))


@case(call(X), tp=BOTH, allowed=HOSTILE)
class GatedHeads(Attention):
    """A gate for each head from the stream."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 4)

    def mixed(self, x):
        y = torch.softmax(self.scores(x), -1) @ parted(self.v(x), self.heads)
        return joined(y * self.gate(x).sigmoid().transpose(1, 2)[..., None])


@case(call(X), tp=BOTH, allowed=HOSTILE)
class SoftmaxOverHeads(Attention):
    def mixed(self, x):
        return joined(torch.softmax(self.scores(x), 1) @ parted(self.v(x), self.heads))


@case(call(X), tp=BOTH, allowed=HOSTILE)
class HeadsAveraged(Attention):
    """Heads are averaged instead of joined."""

    def __init__(self):
        super().__init__()
        self.o = nn.Linear(4, 16)

    def forward(self, x):
        y = torch.softmax(self.scores(x), -1) @ parted(self.v(x), self.heads)
        return x + self.o(y.mean(1))


@case(call(X), allowed=HOSTILE)
class Latent(nn.Module):
    """Keys and values from a latent (MLA's), normed."""

    def __init__(self):
        super().__init__()
        self.q, self.down, self.norm = nn.Linear(16, 16), nn.Linear(16, 8), nn.RMSNorm(8)
        self.up, self.o = nn.Linear(8, 32), nn.Linear(16, 16)

    def forward(self, x):
        q = parted(self.q(x), 4)
        k, v = parted(self.up(self.norm(self.down(x))), 4).split([4, 4], -1)
        return x + self.o(joined(F.scaled_dot_product_attention(q, k, v)))


@case(call(X), allowed=HOSTILE)
class ScaledByAllHeads(Attention):
    """Scores are divided by the square root of the whole width."""

    def scores(self, x):
        q, k = parted(self.q(x), 4), parted(self.k(x), 4)
        return q @ k.transpose(-1, -2) / math.sqrt(q.shape[1] * q.shape[3])


@case(call(X), sequence=None, cp=2, options={"sequence_padding": "pad"})
class LearnedKeyBehind(nn.Module):
    """Attention in the model's own code, between blocks, with a learned key and value behind those of the sequence."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.key, self.value = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 1, 16))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        k = torch.cat([self.k(x), self.key.expand(x.shape[0], 1, 16)], 1)
        v = torch.cat([self.v(x), self.value.expand(x.shape[0], 1, 16)], 1)
        return x + self.o((self.q(x) @ k.transpose(1, 2) / 4).softmax(-1) @ v)

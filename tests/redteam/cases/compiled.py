"""Parts that the model's own code compiles: functions, methods, children, blocks and losses."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids

compiled = partial(torch.compile, backend="eager")
whole_graph = partial(torch.compile, backend="eager", fullgraph=True)


@whole_graph
def gated(a, b):
    return F.silu(a) * b


@partial(compiled, dynamic=True)
def rms_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


@whole_graph
def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@compiled
def in_heads(x, heads):
    batch, length, width = x.shape
    return x.view(batch, length, heads, width // heads).transpose(1, 2)


@whole_graph
def mean_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Mlp(nn.Module):
    def __init__(self, d=16, hidden=32):
        super().__init__()
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, d=16, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (in_heads(part, self.heads) for part in self.qkv(x).split(width, -1))
        angles = torch.arange(length, dtype=x.dtype)[:, None] / torch.arange(1, width // self.heads // 2 + 1)
        q, k = (rotated(part, angles.cos(), angles.sin()) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention, self.mlp = Attention(d), Mlp(d)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@case(call(floats(3, 16)))
class GatedByFunction(nn.Module):
    def __init__(self, d=16, hidden=32):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(d, hidden), nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x):
        return self.down(gated(self.gate(x), self.up(x)))


@case(call(floats(3, 5, 16)), tp=(2, 4))
class NormOfFunction(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.weight, self.mlp = nn.Parameter(torch.ones(d)), Mlp(d)

    def forward(self, x):
        return x + self.mlp(rms_norm(x, self.weight))


@case(call(floats(3, 16)))
class NormOfHidden(nn.Module):
    """The statistic of a compiled function runs over what ranks hold."""

    def __init__(self, d=16, hidden=32):
        super().__init__()
        self.up, self.weight, self.down = nn.Linear(d, hidden), nn.Parameter(torch.ones(hidden)), nn.Linear(hidden, d)

    def forward(self, x):
        return self.down(rms_norm(self.up(x), self.weight))


@case(call(floats(2, 6, 16)), tp=(2, 4))
class HeadsByFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return x + self.attention(x)


@case(call(floats(3, 16)))
class ForwardCompiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.head = Mlp(), nn.Linear(16, 4)

    @compiled
    def forward(self, x):
        return self.head(x + self.mlp(x))


@case(call(floats(3, 16)))
class ChildCompiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.head = compiled(Mlp()), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(x + self.mlp(x))


@case(call(floats(3, 16)))
class ChildCompiledInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.head = Mlp(), nn.Linear(16, 4)
        self.mlp.compile(backend="eager")

    def forward(self, x):
        return self.head(x + self.mlp(x))


@case(call(floats(3, 16)))
class MethodCompiled(nn.Module):
    def __init__(self, d=16, hidden=32):
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(d, hidden), nn.Linear(hidden, d), nn.Parameter(torch.ones(hidden))
        self.scaled = whole_graph(self._scaled)

    def _scaled(self, h):
        return F.relu(h).square() * self.scale

    def forward(self, x):
        return self.down(self.scaled(self.up(x)))


@case(call(ids(2, 6, below=40), labels=ids(2, 6, below=40)))
class LossCompiled(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.table, self.mlp, self.head = nn.Embedding(40, d), Mlp(d), nn.Linear(d, 40)

    def forward(self, tokens, labels=None):
        x = self.table(tokens)
        logits = self.head(x + self.mlp(x))
        return logits if labels is None else (mean_loss(logits, labels), logits)


@case(call(ids(2, 6, below=40)), tp=(2, 4), cp=2, also="tp2+sp", options={"sequence_padding": "pad"})
class FunctionsInBlocks(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.table, self.blocks = nn.Embedding(40, d), nn.ModuleList(Block(d) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 40)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@case(call(ids(2, 6, below=40)), allowed=HOSTILE, sequence=None, options={"sequence_padding": "pad"})
class BlocksCompiled(FunctionsInBlocks):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(map(compiled, self.blocks))


@case(call(floats(3, 16)), allowed=HOSTILE)
class BranchInFunction(nn.Module):
    """A compiled function asks for the size of what a rank has a part of."""

    def __init__(self, d=16, hidden=32):
        super().__init__()
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)
        self.bent = compiled(lambda h: F.relu(h) if h.shape[-1] == 32 else F.gelu(h))

    def forward(self, x):
        return self.down(self.bent(self.up(x)))


@case(call(floats(3, 16)), call(floats(3, 16), normed=True), allowed=HOSTILE)
class FlagInFunction(nn.Module):
    def __init__(self, d=16, hidden=32):
        super().__init__()
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)
        self.bent = compiled(lambda h, normed: F.softmax(h, -1) if normed else F.gelu(h))

    def forward(self, x, normed=False):
        return self.down(self.bent(self.up(x), normed))

"""Blocks in a stack between a table and a head, with the stream cut along the sequence too."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted
from . import attention, constrained, counted, habits, mixers, norms


class Stack(nn.Module):
    """Two blocks between a table and a head, so that there is a stream to cut."""

    def __init__(self, block):
        super().__init__()
        self.table, self.blocks = nn.Embedding(32, 16), nn.ModuleList([block(), block()])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)

    def forward(self, input_ids):
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Pooled(Stack):
    """Takes features, ends in a mean over the sequence, and asks for statistics over it."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1), x.std(1)


def stacked(block):
    """Return a builder that carries the name of the block."""

    def build():
        return Stack(block)

    build.__name__, build.__doc__ = f"Stacked{block.__name__}", block.__doc__
    return build


_SOUND = (attention.GroupedQueries, attention.Rotary, mixers.DepthwiseCausal, norms.RmsOfEachHead)
_KEEP = (habits.MomentsInBuffers, norms.BatchNormOfHidden)  # write to buffers, once where blocks are checkpointed
_BLOCKS = (
    *_SOUND,
    attention.RelativeBias,
    attention.Sinks,
    attention.TorchLayer,
    habits.MomentsInBuffers,
    mixers.DiagonalScan,
    mixers.FourierMixing,
    mixers.FullConvolution,
    mixers.Lstm,
    mixers.TokenShift,
    mixers.TokenMixing,
    norms.BatchNormOfHeads,
    norms.BatchNormOfHidden,
    norms.BatchNormOfRows,
    norms.BatchNormOfStream,
    norms.BatchNormOverHeads,
    norms.CumulativeOverSequence,
    norms.GlobalResponseNorm,
    norms.GroupNormOfStream,
    norms.InstanceNormOfHidden,
    norms.InstanceNormOfStream,
    norms.LayerNormOfHidden,
    norms.LogSumExpOfHidden,
    norms.RmsOverAllHeads,
    norms.SqueezeExcite,
    norms.StandardisedByHand,
    norms.StandardisedOverSequence,
    norms.WholeTensorNorm,
)

for _block in _BLOCKS:
    case(
        call(ids(2, 6)),
        call(ids(2, 6), _train=True),
        call(ids(4, 8)) if _block is not mixers.TokenMixing else call(ids(4, 6)),
        sequence=True,
        also="tp2+sp+ac" if _block in _KEEP else "",
        allowed=("exact",) if _block in _SOUND else HOSTILE,
        options={"sequence_padding": "pad"},
    )(stacked(_block))


class ResidualInAttention(nn.Module):
    """The attention adds what it was given, and mixes positions in its own code; then an MLP."""

    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x):
        return self.mlp(self.attention(x))


case(call(ids(2, 6)), call(ids(2, 6), _train=True), tp=(), cp=2, also="cp2+tp2", options={"sequence_padding": "pad"})(
    stacked(ResidualInAttention)
)

case(call(ids(2, 12)), call(ids(2, 12), _train=True), call(ids(4, 8)), tp=(), cp=2, allowed=HOSTILE)(
    stacked(constrained.RowsRenormed)
)

# "shorter" has positions that two ranks do not share evenly
case(call(ids(2, 6)), sequence=True, allowed=HOSTILE, options={"sequence_padding": "pad"})(
    stacked(counted.CountOfElements)
)


class Fours(Attention):
    def forward(self, x):
        length = x.shape[1]
        x = F.pad(x, (0, 0, 0, -length % 4))
        q, k, v = (parted(net(x), self.heads).unflatten(2, (-1, 4)) for net in (self.q, self.k, self.v))
        return self.o(joined(((q @ k.mT).softmax(-1) @ v).flatten(2, 3)))[:, :length]


class InFours(nn.Module):
    """Positions attend in fours; what is planned is a multiple of four, which is padded by nothing."""

    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.norm2, self.feed = nn.LayerNorm(16), Fours(), nn.LayerNorm(16), Mlp()

    def forward(self, x):
        x = x + self.mix(self.norm(x))
        return x + self.feed(self.norm2(x))


case(
    *(call(ids(2, 16)), call(ids(3, 21)), call(ids(1, 12))),
    sequence=True,
    cp=2,
    inputs={"input_ids": ids(2, 16)},
    allowed=HOSTILE,
    options={"sequence_padding": "pad"},
)(stacked(InFours))


class KeepsKeys(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.feed = nn.LayerNorm(16), Attention(), Mlp()

    def forward(self, x):
        y = self.norm(x)
        keys = parted(self.mix.k(y), 4)
        y = (parted(self.mix.q(y), 4) @ keys.mT).softmax(-1) @ parted(self.mix.v(y), 4)
        return self.feed(x + self.mix.o(joined(y))), keys


@case(
    *(call(ids(2, 6)), call(ids(2, 6), more=True)),
    tp=(),
    cp=2,
    inputs={"usual": {"input_ids": ids(2, 6)}, "more": {"input_ids": ids(2, 6), "more": True}},
    options={"sequence_padding": "pad"},
)
class KeysIfAsked(Stack):
    """Returns scores, or a tuple with them."""

    def __init__(self):
        super().__init__(KeepsKeys)

    def forward(self, input_ids, more=False):
        x, kept = self.table(input_ids), []
        for block in self.blocks:
            x, keys = block(x)
            kept.append(keys)
        scores = self.head(self.norm(x))
        return (scores, kept) if more else scores


@case(call(ids(2, 6)), allowed=HOSTILE)
class TiedInForward(Stack):
    def __init__(self):
        super().__init__(Mlp)

    def forward(self, input_ids):
        self.head.weight = self.table.weight
        return super().forward(input_ids)


@case(call(floats(2, 6, 16)), call(floats(2, 8, 16)), sequence=True, allowed=HOSTILE)
def PooledOverSequence():
    return Pooled(norms.RmsOfEachHead)


IDS, ODD, LONG = ids(2, 12), ids(2, 7, seed=2), ids(1, 40, seed=3)
OVER_CP = {"tp": (), "cp": 2, "also": "tp2+cp2"}


def next_tokens(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@case(call(IDS, IDS, _train=True), call(ODD), call(ODD, ODD), call(LONG, LONG), **OVER_CP)
class TiedByProduct(Stack):
    """The head is a product with the table in the model's own code, and so is the loss."""

    def __init__(self):
        super().__init__(attention.GroupedQueries)

    def forward(self, input_ids, labels=None):
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.table.weight.t()
        return {"logits": logits} | ({} if labels is None else {"loss": next_tokens(logits, labels)})


class TakenTokens(nn.Module):
    """Half of the tokens, those that a router likes, go through what is inside."""

    def __init__(self):
        super().__init__()
        self.router, self.inside = nn.Linear(16, 1), ResidualInAttention()

    def forward(self, x):
        weight, taken = self.router(x).squeeze(-1).topk(x.shape[1] // 2, 1)
        taken, order = taken.sort(1)
        at = taken.unsqueeze(-1).expand(-1, -1, x.shape[2])
        weight = weight.gather(1, order).sigmoid().unsqueeze(-1)
        return torch.zeros_like(x).scatter_add(1, at, self.inside(x.gather(1, at)) * weight)


@case(call(IDS), call(ODD), call(LONG, _train=True), **OVER_CP)
class ResidualsOutside(Stack):
    """The model adds what blocks return, every other of which needs the whole sequence."""

    def __init__(self):
        super().__init__(ResidualInAttention)
        self.blocks = nn.ModuleList(kind() for kind in (ResidualInAttention, TakenTokens) * 2)

    def forward(self, input_ids):
        x = self.table(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class FirstValues(nn.Module):
    """Values of the first block, and the first stream, go to all blocks beside the stream."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.mlp = nn.Linear(16, 48), nn.Linear(16, 16), Mlp()
        self.shares = nn.Parameter(torch.rand(4))

    def forward(self, x, values, first):
        x = self.shares[0] * x + self.shares[1] * first
        q, k, v = (parted(part, 4) for part in self.qkv(x).chunk(3, -1))
        values = v if values is None else values
        v = self.shares[2] * v + self.shares[3] * values.view_as(v)
        return self.mlp(x + self.out(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))), values


@case(call(IDS), call(ODD), call(LONG, _train=True), **OVER_CP)
class ValueResiduals(Stack):
    def __init__(self):
        super().__init__(FirstValues)

    def forward(self, input_ids):
        x, values = F.layer_norm(self.table(input_ids), (16,)), None
        first = x
        for block in self.blocks:
            x, values = block(x, values, first)
        return self.head(self.norm(x))


@case(call(floats(2, 6, 16)), sequence=True, shards=True, vary=False)
class FeaturesIntoNorm(nn.Module):
    """What the first block takes in needs no gradient, and its norm's weights do."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(NormFirst() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class NormFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.mix, self.feed = nn.LayerNorm(16), nn.LayerNorm(16), Attention(), Mlp()

    def forward(self, x):
        x = x + self.mix.o(self.mix.mixed(self.a(x)))
        return x + self.feed.down(self.feed.inner(self.b(x)))


class SumsOfAll(nn.Module):
    """The block's own code gates by a mean over all positions, takes a weighted one away, and divides by one of all."""

    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.gate, self.mlp = nn.LayerNorm(16), Attention(), nn.Linear(16, 16), Mlp()

    def forward(self, x):
        x = x + self.mix.o(joined(F.scaled_dot_product_attention(*self.heads(self.norm(x)))))
        x = x * self.gate(x.mean(1, keepdim=True)).sigmoid()
        share = x.sum(-1, keepdim=True).sigmoid()
        x = x - ((share * x).sum(1) / share.sum(1)).unsqueeze(1).expand(-1, x.shape[1], -1)
        return self.mlp(x / (1 + x.flatten(0, 1).square().mean()))

    def heads(self, x):
        return [parted(net(x), 4) for net in (self.mix.q, self.mix.k, self.mix.v)]


case(call(IDS, _train=True), call(ODD), call(LONG), call(ids(1, 3)), **OVER_CP)(stacked(SumsOfAll))

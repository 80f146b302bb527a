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


# Mixers of the literature, over two ranks and four, at lengths that these divide and at others.

LENGTHS = (call(ids(2, 12)), call(ids(2, 13, seed=2), _train=True), call(ids(1, 40, seed=3)), call(ids(2, 22, seed=4)))
WIDER = {"tp": (), "cp": 2, "also": "cp4"}


class Mixing(nn.Module):
    """A norm before what mixes, and an MLP behind it."""

    def __init__(self):
        super().__init__()
        self.norm, self.mixer, self.mlp = nn.LayerNorm(16), self.kind(), Mlp()

    def forward(self, x, *more):
        return self.mlp(x + self.mixer(self.norm(x), *more))


def around(cls):
    return type(cls.__name__, (Mixing,), {"kind": cls, "__doc__": cls.__doc__})


def mixer(*calls, **options):
    def register(cls):
        case(*(calls or LENGTHS), **WIDER, **options)(stacked(around(cls)))
        return cls

    return register


class Heads(Attention):
    def heads_of(self, x):
        return [parted(net(x), self.heads) for net in (self.q, self.k, self.v)]

    def attend(self, x, mask):
        q, k, v = self.heads_of(x)
        return self.o(joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


@mixer()
class BlockMask(Heads):
    """Blocks of five see each other and those before."""

    def forward(self, x):
        block = torch.arange(x.shape[1], device=x.device) // 5
        return self.attend(x, block[:, None] >= block[None])


@mixer()
class ChunkedByView(Heads):
    """As chunked linear attention is written with a view and a cumulative sum of states."""

    def forward(self, x):
        length = x.shape[1]
        q, k, v = (t.unflatten(2, (-1, 8)) for t in self.heads_of(F.pad(x, (0, 0, 0, -length % 8))))
        q, k = q.sigmoid(), k.sigmoid()
        states = (k.mT @ v).cumsum(2)
        before = torch.cat([torch.zeros_like(states[:, :, :1]), states[:, :, :-1]], 2)
        return self.o(joined((q @ before + (q @ k.mT).tril() @ v).flatten(2, 3)[:, :, :length]))


@mixer()
class DilatedBothWays(nn.Module):
    """A stack of centred convolutions, whose dilations grow."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(16, 16, 3, dilation=2**n, padding=2**n, groups=4) for n in range(3))

    def forward(self, x):
        x = x.mT
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x.mT


@mixer()
class RunningExtremes(nn.Module):
    def forward(self, x):
        return x.cummax(1).values - x.flip(1).cummin(1).values.flip(1) + x.logcumsumexp(1)


@mixer()
class ScansBothWays(nn.Module):
    """Gated scans in time and against it, in log space."""

    def __init__(self):
        super().__init__()
        self.gates, self.values, self.out = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(64, 16)

    def scanned(self, x):
        gate = F.logsigmoid(self.gates(x)).cumsum(1)
        return (gate.exp() * (self.values(x) * (-gate).exp()).cumsum(1)) * 0.01

    def forward(self, x):
        return self.out(torch.cat([self.scanned(x), self.scanned(x.flip(1)).flip(1)], -1))


@mixer()
class FilterOfFrequencies(nn.Module):
    """A filter of eight frequencies is stretched to the length's."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(16, 8))

    def forward(self, x):
        spectrum = torch.fft.rfft(x, dim=1)
        wanted = F.interpolate(self.filter[None], spectrum.shape[1], mode="linear")[0].T
        return torch.fft.irfft(spectrum * wanted, n=x.shape[1], dim=1)


@mixer()
class DownAndUp(nn.Module):
    """A convolution of stride two, and its transposed."""

    def __init__(self):
        super().__init__()
        self.down, self.up = (
            nn.Conv1d(16, 24, 4, stride=2, padding=1),
            nn.ConvTranspose1d(24, 16, 4, stride=2, padding=1),
        )

    def forward(self, x):
        made = self.up(F.gelu(self.down(F.pad(x.mT, (0, x.shape[1] % 2))))).mT
        return made[:, : x.shape[1]]


@mixer()
class MergedByLikeness(nn.Module):
    """Each odd position is merged into the even one most like it (ToMe), all of them; then all are spread again."""

    def __init__(self):
        super().__init__()
        self.work = nn.Linear(16, 16)

    def forward(self, x):
        even, odd = x[:, ::2], x[:, 1::2]
        best = (odd @ even.mT).argmax(-1, keepdim=True).expand(-1, -1, 16)
        merged = self.work(even.scatter_reduce(1, best, odd, "mean"))
        out = torch.zeros_like(x)
        out[:, ::2], out[:, 1::2] = merged, merged.gather(1, best)
        return out


@mixer()
class DepthsMixed(nn.Module):
    """Only the half of the positions that a router scores highest is worked on (mixture of depths)."""

    def __init__(self):
        super().__init__()
        self.router, self.mix = nn.Linear(16, 1), Heads()

    def forward(self, x):
        scores = self.router(x).squeeze(-1) + torch.arange(x.shape[1]) * 1e-3  # no two are equal
        weight, chosen = scores.topk(x.shape[1] // 2, dim=1)
        chosen, order = chosen.sort(1)
        index = chosen[..., None].expand(-1, -1, 16)
        made = self.mix.attend(x.gather(1, index), None) * weight.gather(1, order).sigmoid()[..., None]
        return torch.zeros_like(x).scatter_add(1, index, made)


@mixer()
class BucketsOfDistance(Heads):
    """A learned bias of buckets of distances, reckoned from the end of the sequence."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(9, 4)

    def forward(self, x):
        place = torch.arange(x.shape[1] - 1, -1, -1)
        bucket = (place[None] - place[:, None]).clamp(-4, 4) + 4
        return self.attend(x, self.bias(bucket).permute(2, 0, 1))


@mixer()
class DilatedWindow(Heads):
    """Each query sees the keys 0, 2, 4 and 6 positions before it, taken by unfolding."""

    def forward(self, x):
        q, k, v = self.heads_of(x)
        k, v = (F.pad(t, (0, 0, 6, 0)).unfold(2, 7, 1)[..., ::2] for t in (k, v))
        weights = torch.einsum("bhtd,bhtdw->bhtw", q, k).softmax(-1)
        return self.o(joined(torch.einsum("bhtw,bhtdw->bhtd", weights, v)))


@mixer()
class MemoryOfSegments(Heads):
    """Segments of eight one after the other, each with what the one before left (recurrent memory)."""

    def __init__(self):
        super().__init__()
        self.memory = nn.Parameter(torch.randn(2, 16))

    def forward(self, x):
        memory, out = self.memory.expand(x.shape[0], -1, -1), []
        for segment in x.split(8, 1):
            made = self.attend(torch.cat([memory, segment], 1), None)
            memory = made[:, :2]
            out.append(made[:, 2:])
        return torch.cat(out, 1)


@mixer()
class Rolled(nn.Module):
    """Features of the position before and of the one after, in a circle."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(48, 16)

    def forward(self, x):
        return self.out(torch.cat([x, x.roll(1, 1), x.roll(-1, 1)], -1))


@mixer(LENGTHS[0], call(ids(2, 12, seed=2), _train=True), call(ids(2, 13, seed=3), _train=True), allowed=HOSTILE)
class DroppedInTraining(Heads):
    """In training every third position is left out of the block."""

    def forward(self, x):
        if not self.training:
            return self.attend(x, None)
        kept = torch.arange(x.shape[1]) % 3 != 0
        out = torch.zeros_like(x)
        out[:, kept] = self.attend(x[:, kept], None)
        return out


@mixer(call(ids(2, 12)), call(ids(2, 22, seed=4)), allowed=HOSTILE)
class ScaledIfLong(nn.Module):
    """Nothing mixes positions, and the code asks how many there are."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(16, 16)

    def forward(self, x):
        return self.net(x) * (2 if x.shape[1] > 16 else 1)


class Decoder(Stack):
    def __init__(self, block=None):
        super().__init__(block or around(BlockMask))

    def run(self, x, *more):
        for block in self.blocks:
            x = block(x, *more)
        return self.head(self.norm(x))


class OverMemory(Heads):
    def forward(self, x, memory):
        q = parted(self.q(x), 4)
        k, v = (parted(net(memory), 4) for net in (self.k, self.v))
        return self.o(joined(F.scaled_dot_product_attention(q, k, v)))


class SelfThenCross(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.cross = around(BlockMask)(), around(OverMemory)()

    def forward(self, x, memory):
        return self.cross(self.own(x), memory)


@case(call(ids(2, 12), floats(2, 7, 16)), call(ids(2, 13, seed=1), floats(2, 12, 16, seed=2), _train=True), **WIDER)
class SecondSequence(Decoder):
    def __init__(self):
        super().__init__(SelfThenCross)
        self.enter = nn.Linear(16, 16)

    def forward(self, input_ids, memory):
        return self.run(self.table(input_ids), self.enter(memory))


@case(*LENGTHS, **WIDER)
class Registers(Decoder):
    """Registers stand in front of the stream in all blocks."""

    def __init__(self):
        super().__init__()
        self.registers = nn.Parameter(torch.randn(3, 16))

    def forward(self, input_ids):
        x = self.table(input_ids)
        x = torch.cat([self.registers.expand(x.shape[0], -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 3:]))


@case(
    call(ids(2, 12), ids(2, 12, seed=9), _train=True), call(ids(2, 13), ids(2, 13, seed=8)), call(ids(2, 12)), **WIDER
)
class SmoothedLossWithMore(Decoder):
    """Label smoothing, a z-loss, and the balance of a router that all blocks keep."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)

    def forward(self, input_ids, labels=None):
        x, shares = self.table(input_ids), []
        for block in self.blocks:
            x = block(x)
            shares.append(self.router(x).softmax(-1))
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)
        loss = loss + 1e-2 * logits[:, :-1].logsumexp(-1).square().mean()
        for share in shares:
            top = F.one_hot(share.argmax(-1), 4).to(share.dtype)
            loss = loss + 0.1 * 4 * (share.mean((0, 1)) * top.mean((0, 1))).sum()
        return loss


@case(call(ids(2, 12)), call(ids(2, 13, seed=1), _train=True), **WIDER)
class MeanOfReal(Decoder):
    """A mean over positions that are no padding, and the hidden states of all blocks."""

    def forward(self, input_ids):
        x, kept = self.table(input_ids), []
        real = (input_ids % 4 != 0)[..., None]
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return (x * real).sum(1) / real.sum(1), torch.stack(kept)

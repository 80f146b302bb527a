"""Blocks in a stack between a table and a head, with the stream cut along the sequence too."""

from __future__ import annotations

from torch import nn

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp
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

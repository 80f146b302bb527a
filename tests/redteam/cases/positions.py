"""What blocks do along the sequence, in a stack whose stream is cut along it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, ids
from ..parts import Attention, Mlp, joined, parted
from .streams import Stack


class Around(nn.Module):
    """A block does something to the stream, then an MLP."""

    def __init__(self):
        super().__init__()
        self.mlp = Mlp()
        self.made()

    def made(self):
        pass

    def forward(self, x):
        return self.mlp(x + 0.5 * self.mix(x))


class RunningMean(Around):
    def mix(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class Rolled(Around):
    def mix(self, x):
        return x.roll(1, 1)


class Flipped(Around):
    def mix(self, x):
        return x.flip(1)


class FirstIsSpecial(Around):
    def mix(self, x):
        y = x.clone()
        y[:, 0] = y[:, 0] * 3
        return y


class LastIsBroadcast(Around):
    def mix(self, x):
        return x[:, -1:].expand_as(x)


class EvenAndOdd(Around):
    """Pairs of tokens change places."""

    def mix(self, x):
        return torch.stack([x[:, 1::2], x[:, ::2]], 2).flatten(1, 2)


class Halves(Around):
    """The first half of the sequence meets the second."""

    def mix(self, x):
        a, b = x.chunk(2, 1)
        return torch.cat([a * b, b.tanh()], 1)


class Pooled(Around):
    """Down by two, up by two."""

    def mix(self, x):
        return F.avg_pool1d(x.transpose(1, 2), 2).repeat_interleave(2, -1).transpose(1, 2)


class Unfolded(Around):
    """The mean over a window of three, by unfold."""

    def mix(self, x):
        return F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)


class ScaledByAll(Around):
    def mix(self, x):
        return x / x.norm()


class ScaledByLargest(Around):
    def mix(self, x):
        return x / x.abs().amax((1, 2), keepdim=True)


class StandardisedByStd(Around):
    def mix(self, x):
        return (x - x.mean()) / x.std()


class NormOverLengthAndWidth(Around):
    def mix(self, x):
        return F.layer_norm(x, x.shape[1:])


class Sorted(Around):
    def mix(self, x):
        return x.sort(1).values


class BestTokens(Around):
    """A router picks tokens, works on them, and puts them back."""

    def made(self):
        self.score = nn.Linear(16, 1)

    def mix(self, x):
        best, place = self.score(x).squeeze(-1).topk(2, 1)
        spread = place[..., None].expand(-1, -1, 16)
        return torch.zeros_like(x).scatter(1, spread, x.gather(1, spread) * best.sigmoid()[..., None])


class Selected(Around):
    """Boolean indexing: tokens whose first value is positive."""

    def mix(self, x):
        mask = x[..., 0] > 0
        y = torch.zeros_like(x)
        y[mask] = x[mask] * 2
        return y


class CountsSelected(Around):
    """The share of chosen tokens scales all."""

    def mix(self, x):
        return x * (x[..., 0] > 0).to(x.dtype).mean(1)[:, None, None]


class PositionTable(Around):
    def made(self):
        self.places = nn.Parameter(torch.randn(16, 16))

    def mix(self, x):
        return x * self.places[: x.shape[1]]


class PositionsFromLength(Around):
    """A ramp by the length, made in the block."""

    def mix(self, x):
        return x * torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None]


class TimeFirst(Around):
    """Works on (time, batch, width)."""

    def made(self):
        self.attention = nn.MultiheadAttention(16, 4)

    def mix(self, x):
        t = x.transpose(0, 1)
        return self.attention(t, t, t, need_weights=False)[0].transpose(0, 1)


class FlattenedRows(Around):
    """Works on rows of all tokens, with a statistic over them."""

    def mix(self, x):
        rows = x.reshape(-1, 16)
        return ((rows - rows.mean(0)) / (rows.var(0, unbiased=False) + 1e-5).sqrt()).view_as(x)


class MemoryTokens(Around):
    """Two learned tokens stand before the stream within the block."""

    def made(self):
        self.memory, self.attention = nn.Parameter(torch.randn(2, 16)), Attention()

    def mix(self, x):
        return self.attention(torch.cat([self.memory.expand(x.shape[0], -1, -1), x], 1))[:, 2:]


class MixedByWeight(Around):
    """A lower-triangular weight over positions."""

    def made(self):
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def mix(self, x):
        n = x.shape[1]
        return torch.einsum("st,btd->bsd", self.weight[:n, :n].tril(), x)


class TwoStreams(Around):
    """Attention from the stream to a strided part of it."""

    def made(self):
        self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)

    def mix(self, x):
        k, v = self.kv(x[:, ::2]).chunk(2, -1)
        return self.o(joined(F.scaled_dot_product_attention(*(parted(t, 4) for t in (self.q(x), k, v)))))


class SwitchedByMean(Around):
    """A branch on a number of the whole stream."""

    def mix(self, x):
        return x * 2 if x.mean() > 0 else x.tanh()


class GatedByNeighbour(Around):
    """A convolution along the sequence, and a gate of the token after."""

    def made(self):
        self.conv = nn.Conv1d(16, 16, 3, padding=1, groups=16)

    def mix(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2) * F.pad(x[:, 1:], (0, 0, 0, 1)).sigmoid()


class NoGradStatistics(Around):
    """A buffer follows the mean of the stream in training."""

    def made(self):
        self.register_buffer("mean", torch.zeros(16))

    def mix(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x - self.mean


class Interpolated(Around):
    def mix(self, x):
        t = F.interpolate(x.transpose(1, 2), scale_factor=0.5, mode="linear")
        return F.interpolate(t, size=x.shape[1], mode="linear").transpose(1, 2)


class Autocorrelation(Around):
    """Autoformer: delays by FFT along the sequence."""

    def mix(self, x):
        f = torch.fft.rfft(x, dim=1)
        return torch.fft.irfft(f * f.conj(), n=x.shape[1], dim=1)


class DistanceOfTokens(Around):
    """Every token asks for its nearest other one."""

    def mix(self, x):
        d = torch.cdist(x, x) + 1e3 * torch.eye(x.shape[1], dtype=x.dtype)
        return x.gather(1, d.argmin(-1)[..., None].expand_as(x))


_BLOCKS = [
    one for one in list(globals().values()) if isinstance(one, type) and issubclass(one, Around) and one is not Around
]


def _stacked(block):
    def build():
        return Stack(block)

    build.__name__, build.__doc__, build.__module__ = block.__name__, block.__doc__, __name__
    return build


for _block in _BLOCKS:
    case(call(ids(2, 6)), call(ids(2, 6), _train=True), call(ids(2, 8)), sequence=True, allowed=HOSTILE)(
        _stacked(_block)
    )


class Shaped(Stack):
    """Two blocks, and what is done to the stream before, between and after them."""

    def __init__(self):
        super().__init__(Attention)
        self.mlp = Mlp()

    def forward(self, input_ids):
        x = self.blocks[0](self.table(input_ids))
        return self.head(self.norm(self.after(self.mlp(self.between(self.blocks[1](x))))))

    def between(self, x):
        return x

    def after(self, x):
        return x


def _shaped(cls):
    return case(call(ids(2, 6)), call(ids(2, 6), _train=True), sequence=True, allowed=HOSTILE)(cls)


@_shaped
class LastToken(Shaped):
    def after(self, x):
        return x[:, -1]


@_shaped
class MeanPooled(Shaped):
    def after(self, x):
        return x.mean(1)


@_shaped
class ClassToken(Shaped):
    """A learned token is put before the sequence between blocks."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 16))

    def between(self, x):
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)


@_shaped
class PromptCutOff(Shaped):
    def after(self, x):
        return x[:, 2:]


@_shaped
class ShiftedPairs(Shaped):
    """Returns products of neighbours."""

    def after(self, x):
        return x[:, 1:] * x[:, :-1]


@_shaped
class Merged(Shaped):
    """Pairs of tokens become one between blocks."""

    def __init__(self):
        super().__init__()
        self.merge = nn.Linear(32, 16)

    def between(self, x):
        return self.merge(x.reshape(x.shape[0], -1, 32))


@_shaped
class AttentionPooled(Shaped):
    """One query pools the tokens."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(16))

    def after(self, x):
        return ((x @ self.query).softmax(1)[..., None] * x).sum(1)


@_shaped
class ResidualOfEmbedding(Shaped):
    """The last block adds the difference of neighbours of the embedding."""

    def forward(self, input_ids):
        e = self.table(input_ids)
        x = self.mlp(self.blocks[1](self.blocks[0](e)))
        return self.head(self.norm(x + F.pad(e.diff(dim=1), (0, 0, 0, 1))))


@case(call(ids(2, 6)), call(torch.tensor([[1, 2, 3, 4, 0, 0], [5, 6, 0, 0, 0, 0]])), sequence=True, allowed=HOSTILE)
class MaskedMean(Shaped):
    """The mean over tokens that are not padding, which the ids say."""

    def forward(self, input_ids):
        mask = (input_ids != 0).to(self.head.weight.dtype)[..., None]
        x = self.mlp(self.blocks[1](self.blocks[0](self.table(input_ids))))
        return self.head(self.norm((x * mask).sum(1) / mask.sum(1)))

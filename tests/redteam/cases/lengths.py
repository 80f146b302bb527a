"""Lengths and masks that data makes: padded, packed and empty samples, windows, alignments, batches of one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
BOTH = (2, 4)
ALIGNED = {
    "x": floats(2, 11, 16),
    "goal": ids(2, 3, below=7, seed=1),
    "lengths": torch.tensor([11, 9]),
    "goals": torch.tensor([3, 2]),
}
PACKED = {"x": floats(7, 16), "offsets": torch.tensor([0, 3, 7])}


class Masked(Attention):
    def forward(self, x, allowed):
        scores = self.scores(x).masked_fill(~allowed, torch.finfo(x.dtype).min)
        return x + self.o(joined(scores.softmax(-1) @ parted(self.v(x), self.heads)))


@case(call(X, torch.tensor([6, 3])), call(X, torch.tensor([1, 5])), tp=BOTH, sequence=None)
class ByLengths(nn.Module):
    """Lengths become masks of keys, and the mean counts what is there."""

    def __init__(self):
        super().__init__()
        self.mix, self.feed = Masked(), Mlp()

    def forward(self, x, lengths):
        there = torch.arange(x.shape[1])[None] < lengths[:, None]
        y = self.feed(self.mix(x, there[:, None, None]))
        return (y * there[..., None]).sum(1) / lengths[:, None].clamp(min=1)


@case(call(X, torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]])), tp=BOTH)
class BySegments(nn.Module):
    """Packed samples see themselves alone; positions start anew in each."""

    def __init__(self):
        super().__init__()
        self.mix, self.feed, self.place = Masked(), Mlp(), nn.Embedding(8, 16)

    def forward(self, x, segment):
        same = segment[:, :, None] == segment[:, None, :]
        place = (same.tril(-1)).sum(-1)
        causal = same & torch.ones_like(same[0]).tril()
        return self.feed(self.mix(x + self.place(place), causal[:, None]))


@case(call(X, torch.tensor([6, 0])), call(X, torch.tensor([0, 0])), tp=BOTH)
class NothingToSee(nn.Module):
    """A sample without keys: its softmax is NaN, and is set to zero."""

    def __init__(self):
        super().__init__()
        self.a, self.feed = Attention(), Mlp()

    def forward(self, x, lengths):
        there = torch.arange(x.shape[1])[None] < lengths[:, None]
        scores = self.a.scores(x).masked_fill(~there[:, None, None], float("-inf"))
        p = scores.softmax(-1).nan_to_num(0.0)
        return self.feed(x + self.a.o(joined(p @ parted(self.a.v(x), 4))))


@case(call(floats(1, 6, 16)), call(floats(3, 6, 16)), tp=BOTH, allowed=HOSTILE)
class Squeezed(nn.Module):
    """All dims of one are squeezed away before the hidden layer, whatever they are."""

    def __init__(self):
        super().__init__()
        self.feed, self.gate = Mlp(), nn.Linear(16, 1)

    def forward(self, x):
        y = self.feed(x).squeeze()
        return y * self.gate(x).sigmoid().squeeze(-1).squeeze()[..., None]


@case(call(X), call(floats(0, 6, 16)), call(floats(1, 6, 16)), call(floats(2, 1, 16)), tp=BOTH, sequence=None)
class EmptyBatches(nn.Module):
    """A batch may have no sample, or one, or samples of one token."""

    def __init__(self):
        super().__init__()
        self.a, self.feed, self.norm = Attention(), Mlp(), nn.LayerNorm(16)

    def forward(self, x):
        q, k, v = (net(x).unflatten(-1, (4, 4)).transpose(1, 2) for net in (self.a.q, self.a.k, self.a.v))
        y = (q @ k.mT / 2).softmax(-1) @ v
        return self.norm(self.feed(x + self.a.o(y.transpose(1, 2).flatten(2))))


@case(call(X, torch.tensor([[1, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 1]]).bool()), tp=BOTH)
class OnlyWhatIsThere(nn.Module):
    """Tokens that are padded are taken out, the rest is computed flat, and put back."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x, there):
        flat = x[there]
        y = torch.zeros_like(x)
        y[there] = self.down(F.gelu(self.norm(self.up(flat))))
        return x + y


@case(call(X, ids(2, 6, below=4)), tp=BOTH)
class PooledByNumber(nn.Module):
    """Hidden values are added up by a number that each token has, and come down pooled."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x, number):
        h = self.up(x).relu().flatten(0, 1)
        at = number.flatten()
        total = h.new_zeros(4, 32).index_add(0, at, h)
        count = h.new_zeros(4).scatter_add(0, at, torch.ones_like(at, dtype=h.dtype))
        return self.down(total / count.clamp(min=1)[:, None])


@case(
    call(floats(2, 12, 16), ids(2, 4, below=7), torch.tensor([12, 10]), torch.tensor([4, 2])), tp=BOTH, inputs=ALIGNED
)
class Alignment(nn.Module):
    """CTC over a split vocabulary; the blank is the last class."""

    def __init__(self):
        super().__init__()
        self.feed, self.head = Mlp(), nn.Linear(16, 8)

    def forward(self, x, goal, lengths, goals):
        logs = self.head(self.feed(x)).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logs, goal, lengths, goals, blank=7, reduction="none", zero_infinity=True)


@case(call(X), tp=BOTH)
class MaskOfHidden(nn.Module):
    """Tokens whose hidden values are small on average are dropped; the threshold is the mean over all."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        h = self.up(x).relu()
        size = h.mean(-1, keepdim=True)
        keep = (size >= size.mean()).to(h.dtype)
        return self.down(h * keep) + x * (1 - keep)


@case(call(X), call(floats(2, 9, 16)), call(floats(2, 4, 16)), tp=BOTH, allowed=HOSTILE)
class StretchedPositions(nn.Module):
    """Learned positions are interpolated to the length; none are where the length is theirs."""

    def __init__(self):
        super().__init__()
        self.places, self.mix, self.feed = nn.Parameter(torch.randn(1, 6, 16)), Attention(), Mlp()

    def forward(self, x):
        place = self.places
        if x.shape[1] != place.shape[1]:
            place = F.interpolate(place.mT, size=x.shape[1], mode="linear", align_corners=False).mT
        return self.feed(self.mix(x + place))


@case(
    call(floats(9, 16), torch.tensor([0, 2, 5, 9])),
    call(floats(9, 16), torch.tensor([0, 4, 4, 9])),
    tp=BOTH,
    inputs=PACKED,
)
class PackedByOffsets(nn.Module):
    """Samples lie one behind the other; a loop over offsets attends in each."""

    def __init__(self):
        super().__init__()
        self.a, self.feed = Attention(), Mlp()

    def forward(self, x, offsets):
        q, k, v = (net(x).view(x.shape[0], 4, -1).transpose(0, 1) for net in (self.a.q, self.a.k, self.a.v))
        parts = []
        for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            if start == end:
                continue
            parts.append(F.scaled_dot_product_attention(q[:, start:end], k[:, start:end], v[:, start:end]))
        return self.feed(x + self.a.o(torch.cat(parts, 1).transpose(0, 1).reshape(x.shape)))


@case(call(X), call(floats(2, 8, 16)), call(floats(2, 7, 16)), tp=BOTH)
class InChunks(nn.Module):
    """The sequence is padded to a multiple of four, attends in chunks of four, and is cut back."""

    def __init__(self):
        super().__init__()
        self.a, self.feed = Masked(), Mlp()

    def forward(self, x):
        b, length, d = x.shape
        padded = F.pad(x, (0, 0, 0, -length % 4))
        there = torch.arange(padded.shape[1]) < length
        y = self.a(padded.reshape(-1, 4, d), there.view(-1, 1, 1, 4).repeat(b, 1, 1, 1))
        return self.feed(y.view(b, -1, d)[:, :length])


@case(call(X, torch.tensor([2, 5])), tp=BOTH)
class LastOfEach(nn.Module):
    """The hidden values of the last token of each sample, taken by index, and a sorted batch."""

    def __init__(self):
        super().__init__()
        self.cell, self.up, self.down = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x, last):
        packed = nn.utils.rnn.pack_padded_sequence(x, last + 1, batch_first=True, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0], batch_first=True, total_length=x.shape[1])
        h = self.up(y).relu()
        return self.down(h.gather(1, last[:, None, None].expand(-1, 1, h.shape[-1])).squeeze(1))


@case(call(X, torch.tensor([0.5, 0.25])), tp=BOTH, allowed=HOSTILE)
class ShareOfTokens(nn.Module):
    """The share of tokens that stay is data: they are those of the largest scores from a hidden layer."""

    def __init__(self):
        super().__init__()
        self.score, self.feed = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)), Mlp()

    def forward(self, x, share):
        scores = self.score(x).squeeze(-1)
        rank = scores.argsort(-1, descending=True).argsort(-1)
        keep = rank < (share[:, None] * x.shape[1]).ceil()
        return torch.where(keep[..., None], self.feed(x) * scores.sigmoid()[..., None], x)

"""Sorting, ranks, hashing, top-k and transport: what depends on all values of a dim at once."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
BOTH = (2, 4)


class Between(Mlp):
    def forward(self, x):
        return x + self.down(self.between(self.up(x)))


def between(do, tp=BOTH, **options):
    """Register an MLP with a function between its layers."""
    build = type(do.__name__, (Between,), {"__module__": __name__, "__doc__": do.__doc__, "between": staticmethod(do)})
    case(call(X), tp=tp, **options)(build)
    return do


@between
def LargestKept(h):
    """k winners: all but the largest units are zero."""
    return h * (h >= h.kthvalue(25, -1, keepdim=True).values)


@between
def WinnerOfGroup(h):
    """In each group of four units the largest alone is kept."""
    g = h.unflatten(-1, (8, 4))
    return (g * F.one_hot(g.argmax(-1), 4).to(h.dtype)).flatten(-2)


@between
def GroupSorted(h):
    """GroupSort: units are sorted in groups of two."""
    return h.unflatten(-1, (16, 2)).sort(-1).values.flatten(-2)


@between
def AllSorted(h):
    return h.sort(-1, descending=True).values


@between
def SortedBack(h):
    order = h.argsort(-1)
    return h.gather(-1, order).cumsum(-1).gather(-1, order.argsort(-1))


@between
def RanksAsValues(h):
    return h * h.argsort(-1).argsort(-1).to(h.dtype) / h.shape[-1]


@between
def SoftRank(h):
    return (h[..., None] - h[..., None, :]).sigmoid().sum(-1)


@between
def SparseMax(h):
    z, _ = h.sort(-1, descending=True)
    k = torch.arange(1, h.shape[-1] + 1, dtype=h.dtype)
    c = z.cumsum(-1) - 1
    size = (k * z > c).sum(-1, keepdim=True)
    return (h - c.gather(-1, size - 1) / size).clamp(min=0)


@between
def Transported(h):
    """Sinkhorn: tokens against units."""
    p = h / 0.5
    for _ in range(5):
        p = p - p.logsumexp(-1, keepdim=True)
        p = p - p.logsumexp(-2, keepdim=True)
    return p.exp()


@between
def AboveMedian(h):
    return torch.where(h > h.median(-1, keepdim=True).values, h, 0.1 * h)


@between
def ByQuantiles(h):
    low, high = torch.quantile(h, 0.1, -1, keepdim=True), torch.quantile(h, 0.9, -1, keepdim=True)
    return h.clamp(low, high)


@between
def RunningMaximum(h):
    return h.cummax(-1).values - h.cummin(-1).values.flip(-1)


@between
def Histograms(h):
    """Soft counts in bins over all units."""
    centre = torch.linspace(-1, 1, 8, dtype=h.dtype)
    count = (-(h[..., None] - centre).pow(2) / 0.1).exp().sum(-2)
    return h * count.mean(-1, keepdim=True)


@between
def Bucketed(h):
    edge = torch.tensor([-0.5, 0.0, 0.5], dtype=h.dtype)
    return h * torch.bucketize(h.detach(), edge).to(h.dtype)


@between
def PlaceInSorted(h):
    found = torch.searchsorted(h.detach().sort(-1).values.contiguous(), h.detach().contiguous())
    return h + found.to(h.dtype) / 32


@between
def FarthestUnit(h):
    """The unit that is farthest from the mean is turned."""
    far = (h - h.mean(-1, keepdim=True)).abs().argmax(-1, keepdim=True)
    return h.scatter(-1, far, -h.gather(-1, far))


@between
def TakenDown(h):
    """Take along flat places, by a number of the whole."""
    return h + torch.take(h, torch.arange(h.numel() - 1, -1, -1).view_as(h))


@between
def Threshold(h):
    """As many as exceed the mean of all, a data-dependent count."""
    return h * (h > h.mean()).sum().to(h.dtype) / h.numel()


@case(call(X), tp=BOTH, sequence=None)
class Hashed(Attention):
    """LSH: tokens of one bucket attend to each other, buckets by random directions for each head."""

    def __init__(self):
        super().__init__()
        self.register_buffer("directions", floats(4, 4, 2))

    def mixed(self, x):
        q, v = parted(self.q(x), 4), parted(self.v(x), 4)
        turned = torch.einsum("bhtd,hdr->bhtr", q, self.directions)
        bucket = torch.cat([turned, -turned], -1).argmax(-1)
        score = F.normalize(q, dim=-1) @ q.mT
        score = score.masked_fill(bucket[..., None] != bucket[..., None, :], -1e4)
        return joined(score.softmax(-1) @ v)


@case(call(X), tp=BOTH, sequence=None)
class SortedTokens(Attention):
    """Each head sorts tokens by a score of its own, and mixes neighbours."""

    def mixed(self, x):
        v = parted(self.v(x), 4)
        order = parted(self.q(x), 4)[..., 0].argsort(-1)[..., None].expand_as(v)
        mixed = v.gather(2, order)
        return joined(v.scatter_add(2, order, mixed.roll(1, 2)))


@case(call(X), tp=BOTH)
class TopOfScores(Attention):
    """Each query attends to its three best keys."""

    def mixed(self, x):
        s = self.scores(x)
        s = s.masked_fill(s < s.topk(3, -1).values[..., -1:], float("-inf"))
        return joined(s.softmax(-1) @ parted(self.v(x), self.heads))


@case(call(X), tp=BOTH, allowed=HOSTILE)
class HeadsBySize(Attention):
    """The two heads with the largest outputs are kept."""

    def mixed(self, x):
        y = self.scores(x).softmax(-1) @ parted(self.v(x), self.heads)
        size = y.norm(dim=(-1, -2))
        return joined(y * (size >= size.topk(2, -1).values[..., -1:])[..., None, None])


@case(call(X), tp=BOTH)
class ProbSparse(Attention):
    """Informer: queries that stand out attend, others get the mean."""

    def mixed(self, x):
        s, v = self.scores(x), parted(self.v(x), self.heads)
        top = (s.amax(-1) - s.mean(-1)).topk(2, -1).indices
        at = top[..., None].expand(-1, -1, -1, v.shape[-1])
        rows = s.gather(2, top[..., None].expand(-1, -1, -1, s.shape[-1])).softmax(-1) @ v
        return joined(v.mean(2, keepdim=True).expand_as(v).scatter(2, at, rows))

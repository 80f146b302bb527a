"""One unit on a rank: as many ranks as heads, K/V heads, groups or experts, where code asks how many there are."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
BOTH = (2, 4)


@case(call(X), tp=4, allowed=HOSTILE)
class MoreThanOneHead(Attention):
    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        p = torch.softmax(q @ k.transpose(-1, -2) / 2, -1)
        if p.shape[1] > 1:
            p = p * 1.5
        return joined(p @ v)


@case(call(X), tp=4, allowed=HOSTILE)
class SqueezesHeads(Attention):
    def mixed(self, x):
        p = torch.softmax(self.scores(x).squeeze(), -1)
        v = parted(self.v(x), self.heads).squeeze()
        return joined((p @ v).view(x.shape[0], -1, x.shape[1], 4))


@case(call(X), tp=BOTH)
class PlainHeads(Attention):
    """Plain attention at one head a rank: sound."""


class Grouped(nn.Module):
    """Four heads of queries, two of keys."""

    def __init__(self, heads=8, groups=4):
        super().__init__()
        self.heads, self.groups = heads, groups
        self.q, self.o = nn.Linear(16, heads * 4), nn.Linear(heads * 4, 16)
        self.k, self.v = nn.Linear(16, groups * 4), nn.Linear(16, groups * 4)

    def spread(self, k):
        return k.repeat_interleave(self.heads // self.groups, 1)

    def forward(self, x):
        q, k, v = parted(self.q(x), self.heads), parted(self.k(x), self.groups), parted(self.v(x), self.groups)
        return x + self.o(joined(F.scaled_dot_product_attention(q, self.spread(k), self.spread(v))))


@case(call(X), tp=BOTH)
class OneKeyHead(Grouped):
    """One K/V head a rank: sound."""


@case(call(X), tp=4, allowed=HOSTILE)
class RepeatsOnlyMany(Grouped):
    def spread(self, k):
        if k.shape[1] == 1:
            return k.expand(-1, self.heads // self.groups, -1, -1) * 0.5
        return super().spread(k)


@case(call(X), tp=4, allowed=HOSTILE)
class BroadcastsOneKeyHead(Grouped):
    """With one K/V head it broadcasts over all queries, otherwise it repeats."""

    def forward(self, x):
        q, k, v = parted(self.q(x), self.heads), parted(self.k(x), self.groups), parted(self.v(x), self.groups)
        if k.size(1) != 1:
            k, v = self.spread(k), self.spread(v)
        p = torch.softmax(q @ k.transpose(-1, -2), -1)
        return x + self.o(joined(p @ v))


@case(call(X), tp=4, allowed=HOSTILE)
class NormOfHeadsIfMany(Attention):
    """Instance statistics over the heads, unless there is one."""

    def scores(self, x):
        s = super().scores(x)
        return s if s.shape[1] == 1 else s - s.mean(1, keepdim=True)


@case(call(X), tp=BOTH)
class GroupNormOneGroup(nn.Module):
    """GroupNorm over four groups of the hidden channels."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.GroupNorm(4, 32), nn.Linear(32, 16)

    def forward(self, x):
        h = self.norm(self.up(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(h.relu())


@case(call(X), tp=BOTH)
class GroupedConvolution(nn.Module):
    """A convolution in four groups."""

    def __init__(self):
        super().__init__()
        self.up, self.conv, self.down = nn.Linear(16, 32), nn.Conv1d(32, 32, 3, padding=1, groups=4), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.conv(self.up(x).transpose(1, 2)).transpose(1, 2).relu())


@case(call(X), tp=BOTH)
class FourExperts(nn.Module):
    """Four experts in one tensor, all weighted: sound."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 8) / 4), nn.Parameter(torch.randn(4, 8, 16) / 3)

    def forward(self, x):
        h = torch.einsum("btd,edf->btef", x, self.up).relu()
        y = torch.einsum("btef,efd->bted", h, self.down)
        return x + (y * self.router(x).softmax(-1)[..., None]).sum(2)


@case(call(X), tp=BOTH, allowed=HOSTILE)
class AlibiFromHeadCount(Attention):
    """Slopes made from the number of heads that the module knows."""

    def scores(self, x):
        s = super().scores(x)
        slopes = 2.0 ** -torch.arange(1, self.heads + 1, dtype=x.dtype)
        far = (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).abs()
        return s - slopes[:, None, None] * far


@case(call(X), tp=4, allowed=HOSTILE)
class AlibiFromShape(Attention):
    """Slopes made from the number of heads of the tensor."""

    def scores(self, x):
        s = super().scores(x)
        slopes = 2.0 ** -torch.arange(1, s.shape[1] + 1, dtype=x.dtype)
        return s - slopes[:, None, None] * torch.arange(x.shape[1])


@case(call(X), tp=4, allowed=HOSTILE)
class LoopsOverHeads(Attention):
    """A Python loop over heads; the first is treated otherwise."""

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        out = []
        for n in range(q.shape[1]):
            s = q[:, n] @ k[:, n].transpose(-1, -2)
            out.append(torch.softmax(s if n == 0 else s / 2, -1) @ v[:, n])
        return torch.cat(out, -1)


@case(call(X), tp=4, allowed=HOSTILE)
class UnbindsHeads(Attention):
    """The last head is added to the first."""

    def mixed(self, x):
        p = torch.softmax(self.scores(x), -1)
        y = (p @ parted(self.v(x), self.heads)).unbind(1)
        return torch.cat([y[0] + y[-1], *y[1:]], -1)


@case(call(floats(2, 6, 16)), tp=4)
class SmallMlp(Mlp):
    """Four hidden units over four ranks: sound."""

    def __init__(self):
        super().__init__(16, 4)

"""Statistics over what is split: weights that are standardised, thresholds, ranks, running means, decorrelation."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
BOTH = (2, 4)


class Standard(nn.Linear):
    def forward(self, x):
        w = self.weight
        w = (w - w.mean(1, keepdim=True)) / torch.sqrt(w.var(1, keepdim=True, unbiased=True) * w.shape[1] + 1e-5)
        return F.linear(x, w, self.bias)


@case(call(X), tp=BOTH)
class StandardWeights(nn.Module):
    """Each row of both weights has mean 0 and variance 1 over its inputs, which are split in the second."""

    def __init__(self):
        super().__init__()
        self.up, self.down = Standard(16, 32), Standard(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Spectral(nn.Linear):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("u", F.normalize(torch.randn(o), dim=0))

    def forward(self, x):
        w, u = self.weight, self.u
        if self.training:
            with torch.no_grad():
                v = F.normalize(w.t() @ u, dim=0)
                u = F.normalize(w @ v, dim=0)
                self.u.copy_(u)
            u = u.clone()
        v = F.normalize(w.detach().t() @ u, dim=0)
        return F.linear(x, w / (u @ w @ v), self.bias)


@case(call(X), tp=BOTH)
class SpectralByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Spectral(16, 32), Spectral(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


@case(call(X), tp=BOTH)
class DirectionAndSize(nn.Module):
    """DoRA: a low-rank change of direction, columns of a learned size; up and down."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        for name, (i, o) in {"u": (16, 32), "d": (32, 16)}.items():
            self.register_parameter(f"{name}a", nn.Parameter(torch.randn(4, i) / 4))
            self.register_parameter(f"{name}b", nn.Parameter(torch.randn(o, 4) / 4))
            self.register_parameter(f"{name}m", nn.Parameter(torch.rand(o, 1) + 0.5))

    def forward(self, x):
        u = self.up.weight + self.ub @ self.ua
        d = self.down.weight + self.db @ self.da
        h = F.silu(F.linear(x, self.um * u / u.norm(dim=1, keepdim=True).detach(), self.up.bias))
        return F.linear(h, self.dm * d / d.norm(dim=1, keepdim=True), self.down.bias)


@case(call(X), tp=BOTH)
class FewWinners(nn.Module):
    """Only the five largest hidden values of a token stay."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        h = self.up(x)
        least = h.topk(5, -1).values[..., -1:]
        return self.down(torch.where(h >= least, h, 0.0))


@case(call(X), tp=BOTH)
class AboveQuantile(nn.Module):
    """What lies under the seventh decile of a token's hidden values is shrunk."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        h = self.up(x)
        cut = torch.quantile(h.detach(), 0.7, dim=-1, keepdim=True)
        return self.down(h * (1 + 3 * (h > cut)))


@case(call(X), tp=BOTH)
class OrderedNeurons(nn.Module):
    """ON-LSTM's gate: the running sum of a softmax over hidden values."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(self.gate(x).softmax(-1).cumsum(-1) * self.up(x).tanh())


@case(call(X), tp=BOTH)
class StrongestHead(nn.Module):
    """For each token only the head with the sharpest attention passes."""

    def __init__(self):
        super().__init__()
        self.a = Attention()

    def forward(self, x):
        p = self.a.scores(x).softmax(-1)
        best = p.amax(-1).argmax(1)
        only = F.one_hot(best, 4).permute(0, 2, 1)[..., None].to(x.dtype)
        return x + self.a.o(joined((p @ parted(self.a.v(x), 4)) * only))


@case(call(X), tp=BOTH)
class HeadsSorted(nn.Module):
    """Heads leave in the order of the size of what they say."""

    def __init__(self):
        super().__init__()
        self.a = Attention()

    def forward(self, x):
        y = self.a.scores(x).softmax(-1) @ parted(self.a.v(x), 4)
        order = y.norm(dim=-1).argsort(dim=1, descending=True)
        return self.a.o(joined(y.gather(1, order[..., None].expand_as(y))))


@case(call(X), tp=BOTH, sequence=None)
class ResponseNorm(nn.Module):
    """ConvNeXt's: the norm over the sequence of each hidden value, relative to the mean over all of them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.gain, self.bias = nn.Parameter(torch.randn(32)), nn.Parameter(torch.randn(32))

    def forward(self, x):
        h = F.gelu(self.up(x))
        size = h.norm(dim=1, keepdim=True)
        return x + self.down(self.gain * (h * size / (size.mean(-1, keepdim=True) + 1e-6)) + self.bias + h)


class MaxScaled(torch.autograd.Function):
    """Values divided by their largest, and that; the second has a gradient that the caller uses."""

    @staticmethod
    def forward(ctx, x):
        top, at = x.abs().max(-1, keepdim=True)
        ctx.save_for_backward(x, top, at)
        return x / top, top

    @staticmethod
    def backward(ctx, grad, grad_top):
        x, top, at = ctx.saved_tensors
        inner = grad_top - (grad * x).sum(-1, keepdim=True) / top**2
        sign = x.gather(-1, at).sign()
        return (grad / top).scatter_add(-1, at, inner * sign)


@case(call(X), tp=BOTH)
class FunctionOfTwoResults(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        h, top = MaxScaled.apply(self.up(x))
        return self.down(h.relu() + h**2) * top


@case(call(X), tp=BOTH)
class RunningLargest(nn.Module):
    """Activations are rounded by a running largest value, which training moves; rounding passes gradients on."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("top", torch.tensor(1.0))

    def forward(self, x):
        h = self.up(x).relu()
        if self.training:
            self.top.mul_(0.9).add_(h.detach().abs().max(), alpha=0.1)
        scale = self.top / 127
        rounded = (h / scale).round().clamp(-128, 127) * scale
        return self.down(h + (rounded - h).detach())


@case(call(X), tp=BOTH)
class RoundedWeights(nn.Module):
    """BitNet: weights are rounded by their mean size, inputs by the largest of each token."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def rounded(self, net, x):
        s = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        x = x + ((x * s).round().clamp(-128, 127) / s - x).detach()
        m = 1 / net.weight.abs().mean().clamp(min=1e-5)
        w = net.weight + ((net.weight * m).round().clamp(-1, 1) / m - net.weight).detach()
        return F.linear(x, w)

    def forward(self, x):
        return x + self.rounded(self.down, self.rounded(self.up, x).relu() ** 2)


@case(call(X, X.flip(1)), tp=BOTH)
class Decorrelated(nn.Module):
    """VICReg on hidden values: variance, covariance off the diagonal, and the distance of two views."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, y):
        a, b = (self.up(z).relu().flatten(0, 1) for z in (x, y))
        terms = [F.mse_loss(a, b)]
        for h in (a, b):
            h = h - h.mean(0)
            cov = h.T @ h / (len(h) - 1)
            terms += [F.relu(1 - (h.var(0) + 1e-4).sqrt()).mean()]
            terms += [(cov.pow(2).sum() - cov.diagonal().pow(2).sum()) / h.shape[1]]
        return torch.stack(terms), self.down(a)


@case(call(X), tp=BOTH)
class AttentionEntropy(nn.Module):
    """The entropy of each head's attention, its largest over heads, and how unlike heads are."""

    def __init__(self):
        super().__init__()
        self.a = Attention()

    def forward(self, x):
        p = self.a.scores(x).softmax(-1)
        entropy = -(p * (p + 1e-9).log()).sum(-1).mean(-1)
        flat = F.normalize(p.flatten(2), dim=-1)
        alike = (flat @ flat.mT).triu(1).sum((-1, -2))
        return x + self.a.o(joined(p @ parted(self.a.v(x), 4))), entropy.max(1).values, alike


@case(call(X), tp=BOTH)
class TalkingHeads(nn.Module):
    """Heads are mixed before the softmax and after it, by weights from heads to heads."""

    def __init__(self):
        super().__init__()
        self.a, self.pre, self.post = Attention(), nn.Linear(4, 4, bias=False), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        s = self.pre(self.a.scores(x).permute(0, 2, 3, 1)).softmax(2)
        p = torch.einsum("bqkh,hg->bgqk", s, self.post)
        return x + self.a.o(joined(p @ parted(self.a.v(x), 4)))


@case(call(ids(2, 6)), call(ids(2, 6, seed=4)), tp=BOTH, allowed=HOSTILE)
class RowsInABall(nn.Module):
    """A table that renorms the rows it looks up, in place."""

    def __init__(self):
        super().__init__()
        self.table, self.feed, self.head = nn.Embedding(32, 16, max_norm=1.5), Mlp(), nn.Linear(16, 32)

    def forward(self, i):
        return self.head(self.feed(self.table(i)))


@case(call(X), tp=BOTH)
class StoppedStatistics(nn.Module):
    """Hidden values over their norm, which has no gradient in one branch and one in the other."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(16, 32), nn.Linear(32, 16), nn.Parameter(torch.ones(32))

    def forward(self, x):
        h = self.up(x)
        stopped = h / h.detach().norm(dim=-1, keepdim=True)
        moving = F.normalize(h, dim=-1, p=1)
        return self.down(stopped.relu() * self.gain + moving) + self.down(h.detach()) * 0.1

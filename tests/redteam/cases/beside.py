"""What a user computes with parameters and plain tensors, outside of the model: losses, metrics, updates by hand."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, SOUND, call, case, floats, ids
from ..parts import Attention, Mlp

X = floats(2, 6, 16)
T = ids(2, 6)
L = ids(2, 6, seed=1)


class Lm(nn.Module):
    """Returns the stream; the head is the caller's."""

    def __init__(self):
        super().__init__()
        self.table, self.attention, self.mlp = nn.Embedding(32, 16), Attention(), Mlp()
        self.head = nn.Linear(16, 32)

    def hidden(self, input_ids):
        return self.mlp(self.attention(self.table(input_ids)))

    def forward(self, input_ids):
        return self.head(self.hidden(input_ids))


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x):
        return self.mlp(self.attention(x))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o, self.mlp = nn.Linear(16, 48), nn.Linear(16, 16), Mlp()

    def forward(self, x):
        q, k, v = (one.view(*x.shape[:2], 4, 4).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.mlp(x)


def case_of(do, base=Stream, given=X, allowed=HOSTILE, **options):
    build = type(do.__name__, (base,), {"__module__": __name__, "__doc__": do.__doc__})
    case(call(given, _do=do), vary=False, allowed=allowed, **options)(build)
    return do


def lm(do):
    return case_of(do, Lm, T)


def packed(do):
    return case_of(do, Packed)


def updated(m):
    """Two outputs after a step of SGD by what is in .grad."""
    with torch.no_grad():
        for p in m.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.05)
    return m


@partial(case_of, base=Lm, given=T, dp=2)
def TiedByHand(m, ids):
    """The stream, against rows of the table."""
    z = m(ids).log_softmax(-1)
    other = z @ m.table.weight
    return F.cross_entropy((other @ m.table.weight.T).flatten(0, 1), L.flatten())


@lm
def RowsCompared(m, ids):
    return m(ids), F.cosine_similarity(m.table.weight[None], floats(5, 16)[:, None], dim=-1).max(1).values


@case_of
def FarFromStart(m, x):
    """L2-SP: the distance from weights that were noted as plain tensors."""
    torch.manual_seed(0)
    start = {name: torch.randn(3, dtype=x.dtype).mean() * torch.ones(p.shape, dtype=x.dtype)
             for name, p in m.named_parameters()}  # fmt: skip
    return m(x).pow(2).mean() + sum((p - start[name]).pow(2).sum() for name, p in m.named_parameters())


def Elastic(m, x):
    """EWC: a plain importance of each weight."""
    loss = m(x).pow(2).mean()
    for n, p in enumerate(m.parameters()):
        loss = loss + (floats(*p.shape, seed=n).abs() * p.pow(2)).sum()
    return loss


case_of(Elastic, allowed=SOUND, dp=2)


@case_of
def PowerIterated(m, x):
    """The largest singular value, by vectors that start plain."""
    w = m.mlp.up.weight
    v = F.normalize(torch.ones(w.shape[1], dtype=w.dtype), dim=0)
    for _ in range(3):
        u = F.normalize(w.detach() @ v, dim=0)
        v = F.normalize(w.detach().T @ u, dim=0)
    return m(x).mean() + u @ (w @ v)


@case_of
def MaskedByHand(m, x):
    """Weights are multiplied by masks in place, and the model is called again."""
    with torch.no_grad():
        for n, p in enumerate(m.parameters()):
            p.mul_((floats(*p.shape, seed=n) > -0.5).to(p.dtype))
    return m(x)


@case_of
def NoisyGradients(m, x):
    m(x).pow(2).mean().backward()
    for n, p in enumerate(m.parameters()):
        p.grad.add_(floats(*p.shape, seed=n), alpha=0.01)
    return updated(m)(x)


@case_of
def OwnMomentum(m, x):
    """An optimizer by hand, whose states are plain zeros of the parameters' shapes."""
    states = [torch.zeros(p.shape, dtype=p.dtype) for p in m.parameters()]
    for _ in range(2):
        m.zero_grad()
        m(x).pow(2).mean().backward()
        with torch.no_grad():
            for p, state in zip(m.parameters(), states, strict=True):
                state.mul_(0.9).add_(p.grad)
                p.sub_(0.05 * state)
    return m(x)


@case_of
def GradientsGiven(m, x):
    """Gradients that come from elsewhere are put in place."""
    m.zero_grad()
    m(x).pow(2).mean().backward()
    for n, p in enumerate(m.parameters()):
        p.grad = p.grad + floats(*p.shape, seed=n)
    return updated(m)(x)


@case_of
def TwiceInOneLoss(m, x):
    """A weight in the model, in a product with plain tensors, and in a penalty, by one backward of two losses."""
    w = m.mlp.down.weight
    first = (x @ w).pow(2).mean() + m(x).pow(2).mean()
    second = (w @ floats(32, 3)).pow(3).sum() + w.pow(2).sum()
    first.backward(retain_graph=True)
    second.backward()
    return first.detach(), second.detach()


@case_of
def DerivedTwice(m, x):
    """A gradient penalty through a weight beside plain tensors."""
    w = m.mlp.up.weight
    z = x.clone().requires_grad_()
    (g,) = torch.autograd.grad((F.linear(z, w).tanh()).sum(), z, create_graph=True)
    return m(x).mean() + g.pow(2).sum()


@packed
def PackedTimesPlain(m, x):
    """A weight whose rows are in another order on ranks."""
    return m(x), x @ m.qkv.weight.T


@packed
def PackedPenalised(m, x):
    w = m.qkv.weight
    return m(x).mean() + (w.T @ w - torch.eye(16, dtype=w.dtype)).pow(2).sum() + (w * floats(48, 16)).sum()


@packed
def PackedGram(m, x):
    """Only entries above the diagonal count."""
    w = m.qkv.weight
    return m(x).mean() + torch.triu(w @ w.T, 20).sum()


@packed
def PackedOrdered(m, x):
    """Rows weighed by their place, with no plain tensor."""
    w = m.qkv.weight
    return m(x).mean() + w.cumsum(0).pow(2).sum() + (w.flip(0) * w).sum()


@packed
def PackedBiasInPlace(m, x):
    with torch.no_grad():
        m.qkv.bias.copy_(floats(48))
        m.qkv.weight.lerp_(floats(48, 16), 0.3)
    return m(x)

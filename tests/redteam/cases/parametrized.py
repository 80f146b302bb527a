"""Weights that are made from other weights in the forward: masks, scales, products, sums, lists, generated weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


class OfRowNorm(nn.Module):
    """Rows are divided by their largest value."""

    def forward(self, w):
        return w / w.abs().amax(1, keepdim=True)


class OfWhole(nn.Module):
    """The whole matrix is divided by its mean absolute value (BitNet's)."""

    def forward(self, w):
        scale = w.abs().mean().clamp(min=1e-5)
        return w + ((w / scale).round().clamp(-1, 1) * scale - w).detach()


class Masked(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.register_buffer("mask", (torch.arange(shape[0])[:, None] + torch.arange(shape[1])) % 3 > 0)

    def forward(self, w):
        return w * self.mask


def parametrized(layer, *how):
    for one in how:
        parametrize.register_parametrization(layer, "weight", one)


@case(call(X))
class MaskParametrized(Mlp):
    def __init__(self):
        super().__init__()
        parametrized(self.up, Masked((32, 16)))
        parametrized(self.down, Masked((16, 32)))


@case(call(X))
class TernaryWeights(Mlp):
    """Rounded by a statistic of the whole matrix, straight through."""

    def __init__(self):
        super().__init__()
        parametrized(self.up, OfWhole())
        parametrized(self.down, OfWhole())


@case(call(X))
class RowsThenMask(Mlp):
    """Two parametrizations on one weight."""

    def __init__(self):
        super().__init__()
        parametrized(self.up, OfRowNorm(), Masked((32, 16)))
        parametrized(self.down, OfRowNorm())


@case(call(X))
class SymmetricQuery(Attention):
    def __init__(self):
        super().__init__()
        parametrized(self.q, Symmetric())


@case(call(X), call(X, _train=True))
class Pruned(Mlp):
    """torch's own pruning: a mask in a pre-hook, before each forward."""

    def __init__(self):
        super().__init__()
        prune.ln_structured(self.up, "weight", amount=0.25, n=2, dim=0)
        prune.random_unstructured(self.down, "weight", amount=0.3)


@case(call(X))
class FactoredWeights(nn.Module):
    """Low rank: the weight is a product that is made in each forward."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(32, 4) / 2), nn.Parameter(torch.randn(4, 16) / 4)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.silu(F.linear(x, self.a @ self.b)))


@case(call(X))
class JoinedAtRun(Attention):
    """Three weights are joined to one before the product, and its result is chunked."""

    def mixed(self, x):
        w = torch.cat([self.q.weight, self.k.weight, self.v.weight])
        b = torch.cat([self.q.bias, self.k.bias, self.v.bias])
        q, k, v = (parted(part, self.heads) for part in F.linear(x, w, b).chunk(3, -1))
        return joined(F.scaled_dot_product_attention(q, k, v))


@case(call(X))
class Generated(nn.Module):
    """A small network makes the weights of the MLP from one vector."""

    def __init__(self):
        super().__init__()
        self.code, self.make = nn.Parameter(torch.randn(8)), nn.Linear(8, 32 * 16)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        w = self.make(self.code).view(32, 16) / 8
        return x + self.down(F.linear(x, w).tanh())


@case(call(X))
class MixedBanks(nn.Module):
    """A weight is a learned mixture of four (CondConv), mixed by each sample."""

    def __init__(self):
        super().__init__()
        self.bank = nn.Parameter(torch.randn(4, 32, 16) / 4)
        self.route, self.down = nn.Linear(16, 4), nn.Linear(32, 16)

    def forward(self, x):
        w = torch.einsum("be,eoi->boi", self.route(x.mean(1)).softmax(-1), self.bank)
        return x + self.down(torch.bmm(x, w.transpose(1, 2)).relu())


@case(call(X))
class LayerScaled(nn.Module):
    """LayerScale, a scalar gate and a learned residual weight for each of two blocks, in a ParameterList."""

    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()
        self.scales = nn.ParameterList([nn.Parameter(torch.full((16,), 0.1)), nn.Parameter(torch.full((16,), 0.3))])
        self.gate = nn.ParameterDict({"a": nn.Parameter(torch.zeros(())), "m": nn.Parameter(torch.ones(1))})

    def forward(self, x):
        x = x + self.scales[0] * self.attention.o(self.attention.mixed(x)) * self.gate["a"].sigmoid()
        return x + self.scales[1] * self.mlp.down(self.mlp.inner(x)) * self.gate["m"]


@case(call(X))
class DoraAdapted(Mlp):
    """DoRA: a direction with a low-rank change, normed by column, and a magnitude."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, 16) / 4), nn.Parameter(torch.randn(32, 2) / 4)
        self.magnitude = nn.Parameter(torch.ones(32))

    def inner(self, x):
        w = self.up.weight + self.b @ self.a
        return F.gelu(F.linear(x, w * (self.magnitude / w.norm(dim=1))[:, None], self.up.bias))


@case(call(X))
class DownDora(Mlp):
    """The same on the layer that contracts the cut dim: the norm of a row goes over ranks."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, 32) / 4), nn.Parameter(torch.randn(16, 2) / 4)
        self.magnitude = nn.Parameter(torch.ones(16))

    def forward(self, x):
        w = self.down.weight + self.b @ self.a
        w = w * (self.magnitude / w.norm(p=2, dim=1))[:, None]
        return x + F.linear(self.inner(x), w, self.down.bias)


@case(call(X))
class FixedHalfOfWeight(nn.Module):
    """Half of a weight is a buffer, half is learned; they are joined along the inputs."""

    def __init__(self):
        super().__init__()
        self.learned = nn.Parameter(torch.randn(32, 8) / 4)
        self.register_buffer("fixed", torch.randn(32, 8) / 4)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return x + self.down(F.linear(x, torch.cat([self.learned, self.fixed], 1)).relu())


@case(call(X), call(X, _train=True))
class BufferIsWeight(nn.Module):
    """A frozen projection in a buffer next to learned ones (random features)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("project", torch.randn(32, 16) / 4)
        self.scale, self.down = nn.Parameter(torch.rand(32)), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.cos(F.linear(x, self.project) * self.scale))


@case(call(X))
class ReplacedByFunctionalCall(nn.Module):
    """Its layer is called with other weights, by torch.func.functional_call."""

    def __init__(self):
        super().__init__()
        self.mlp, self.shift = Mlp(), nn.Parameter(torch.zeros(32, 16) + 0.1)

    def forward(self, x):
        return torch.func.functional_call(self.mlp, {"up.weight": self.mlp.up.weight + self.shift}, (x,))


@case(call(X), allowed=HOSTILE)
class SortedWeights(Mlp):
    """Rows are ordered by their norm."""

    def inner(self, x):
        order = self.up.weight.norm(dim=1).argsort()
        return F.gelu(F.linear(x, self.up.weight[order], self.up.bias))


@case(call(X))
class CentredWeights(Mlp):
    """The mean over the cut rows is taken away."""

    def inner(self, x):
        w = self.up.weight - self.up.weight.mean(0, keepdim=True)
        return F.gelu(F.linear(x, w, self.up.bias))


@case(call(X))
class Orthogonal(Attention):
    """torch's orthogonal parametrization."""

    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.orthogonal(self.v, orthogonal_map="cayley")


@case(call(X), tp=(2, 4), cp=2)
class TwoModulesMixed(nn.Module):
    """A module runs with weights mixed of its own and another's, as `named_parameters` gives them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.mix = Mlp(), Mlp(), Attention()

    def forward(self, x):
        others = dict(self.b.named_parameters())
        mixed = {name: torch.lerp(own, others[name], 0.3) for name, own in self.a.named_parameters()}
        return torch.func.functional_call(self.a, mixed, (self.mix(x),))


@case(call(X), cp=2)
class WeightsMadeForCall(nn.Module):
    """A module runs with weights made of its own, read one by one."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.mix = Mlp(), Mlp(), Attention()

    def forward(self, x):
        made = {"up.weight": self.a.up.weight * 2, "down.weight": self.a.down.weight + self.b.down.weight}
        return torch.func.functional_call(self.a, made, (self.mix(x),))

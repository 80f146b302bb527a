"""Linear algebra, indexing and complex numbers as people write them."""

from __future__ import annotations

import torch
from functorch.einops import rearrange
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
BOTH = (2, 4)


@case(call(X))
class Rearranged(Attention):
    """Heads by einops."""

    def mixed(self, x):
        q, k, v = (rearrange(f(x), "b t (h d) -> b h t d", h=self.heads) for f in (self.q, self.k, self.v))
        return rearrange(F.scaled_dot_product_attention(q, k, v), "b h t d -> b t (h d)")


@case(call(X))
class RearrangedInnermost(Attention):
    """The head is the inner factor of the width."""

    def mixed(self, x):
        q, k, v = (rearrange(f(x), "b t (d h) -> (b h) t d", h=self.heads) for f in (self.q, self.k, self.v))
        y = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1) @ v
        return rearrange(y, "(b h) t d -> b t (d h)", h=self.heads)


@case(call(X), tp=BOTH)
class HeadsInBatch(Attention):
    """Heads are folded into the batch, with baddbmm and a mask repeated for each head."""

    def mixed(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, 4, 4).transpose(1, 2).reshape(b * 4, t, 4) for f in (self.q, self.k, self.v))
        mask = torch.full((t, t), float("-inf")).triu(1).to(x.dtype).repeat(b * self.heads, 1, 1)
        p = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=0.5).softmax(-1)
        return torch.bmm(p, v).view(b, self.heads, t, 4).transpose(1, 2).reshape(b, t, -1)


@case(call(X), tp=BOTH)
class ThreeDimensionalWeights(nn.Module):
    """Weights of (width, heads, head width), einsum and tensordot."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Parameter(torch.randn(3, 16, 4, 4) / 4), nn.Parameter(torch.randn(4, 4, 16) / 4)

    def forward(self, x):
        q, k, v = torch.einsum("btd,cdhe->cbhte", x, self.qkv)
        y = torch.einsum("bhts,bhse->bthe", torch.softmax(q @ k.mT / 2, -1), v)
        return x + torch.tensordot(y, self.o, dims=([2, 3], [0, 1]))


@case(call(X), tp=BOTH)
class EllipsisAndBroadcast(Mlp):
    def forward(self, x):
        h = torch.einsum("...d,fd->...f", x, self.up.weight) + self.up.bias
        return x + torch.einsum("...f,df->...d", h.relu(), self.down.weight) + self.down.bias


@case(call(X), tp=BOTH)
class ComplexRotary(Attention):
    """Rotary by complex numbers, of a table in a buffer."""

    def __init__(self):
        super().__init__()
        angle = torch.outer(torch.arange(16.0), torch.tensor([1.0, 0.1]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angle), angle).to(torch.complex128), persistent=False)

    def turned(self, x):
        pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[: x.shape[-2]]).flatten(3).type_as(x)

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        return joined(F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True))


@case(call(X), tp=BOTH)
class PartialRotary(Attention):
    """Half of a head turns, interleaved pairs, written in place into a clone."""

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        angle = torch.arange(x.shape[1], dtype=x.dtype)
        c, s = angle.cos(), angle.sin()
        out = []
        for t in (q, k):
            r = t.clone()
            r[..., 0] = t[..., 0] * c - t[..., 1] * s
            r[..., 1] = t[..., 0] * s + t[..., 1] * c
            out.append(r)
        return joined(F.scaled_dot_product_attention(*out, v))


@case(call(X), tp=BOTH, allowed=HOSTILE)
class OuterProduct(Mlp):
    """Products of all pairs of four hidden groups."""

    def inner(self, x):
        h = self.up(x).unflatten(-1, (4, 8))
        pairs = torch.einsum("btgi,btki->btgk", h, h).flatten(2).softmax(-1).unflatten(-1, (4, 4))
        return (pairs @ h).flatten(2)


@case(call(X), tp=BOTH)
class SolvedInside(Attention):
    """Each head solves a small linear system (ridge regression of values on keys)."""

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        gram = k.mT @ k + torch.eye(4, dtype=x.dtype)
        return joined(q @ torch.linalg.solve(gram, k.mT @ v))


@case(call(X), tp=BOTH)
class CholeskyOfHeads(Attention):
    """Keys are whitened by a Cholesky factor of each head."""

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        factor = torch.linalg.cholesky(k.mT @ k / x.shape[1] + 0.1 * torch.eye(4, dtype=x.dtype))
        k = torch.linalg.solve_triangular(factor, k.mT, upper=False).mT
        return joined(F.scaled_dot_product_attention(q, k, v))


@case(call(X), tp=BOTH)
class MatrixExponential(Attention):
    """Orthogonal maps of each head by the exponential of a skew matrix."""

    def __init__(self):
        super().__init__()
        self.skew = nn.Parameter(torch.randn(4, 4, 4) / 2)

    def mixed(self, x):
        turn = torch.matrix_exp(self.skew - self.skew.mT)
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        return joined(F.scaled_dot_product_attention(q @ turn, k @ turn, v))


@case(call(X), tp=BOTH)
class DistanceScores(Attention):
    """Scores are distances (cdist), with a width of each head."""

    def __init__(self):
        super().__init__()
        self.width = nn.Parameter(torch.rand(4, 1, 1))

    def scores(self, x):
        q, k = parted(self.q(x), self.heads), parted(self.k(x), self.heads)
        return -torch.cdist(q, k).pow(2) * F.softplus(self.width)


@case(call(X), tp=BOTH, allowed=HOSTILE)
class KroneckerWeight(nn.Module):
    """The weight is a Kronecker product."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.down = (
            nn.Parameter(torch.randn(4, 4) / 2),
            nn.Parameter(torch.randn(8, 4) / 2),
            nn.Linear(32, 16),
        )

    def forward(self, x):
        return x + self.down(F.linear(x, torch.kron(self.a, self.b)).relu())


@case(call(X))
class BlockDiagonal(nn.Module):
    """Monarch: block-diagonal products with a transpose in between."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 4, 8) / 2), nn.Parameter(torch.randn(8, 4, 2) / 2)

    def forward(self, x):
        h = torch.einsum("btni,nij->btnj", x.unflatten(-1, (4, 4)), self.a).transpose(-1, -2)
        return x + torch.einsum("btni,nij->btnj", h.relu(), self.b).flatten(2)


@case(call(X), tp=BOTH, allowed=HOSTILE)
class RankedUnits(Mlp):
    """Units are replaced by their rank among the units of the token."""

    def inner(self, x):
        h = self.up(x)
        return h * (h.argsort(-1).argsort(-1).to(h.dtype) / 32)


@case(call(X), tp=BOTH)
class BucketedPositions(Attention):
    """T5's buckets of distances, a table with a row for each bucket."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.register_buffer("edges", torch.tensor([-2, 0, 1, 3]), persistent=False)

    def scores(self, x):
        t = torch.arange(x.shape[1])
        bucket = torch.bucketize(t[:, None] - t, self.edges)
        return super().scores(x) + self.table(bucket).permute(2, 0, 1)[None]


@case(call(X), tp=BOTH)
class TakenAlong(Attention):
    """Only the best three keys of each query count, by topk and take_along_dim."""

    def mixed(self, x):
        s = self.scores(x)
        best, place = s.topk(3, -1)
        v = parted(self.v(x), self.heads)[:, :, None].expand(-1, -1, x.shape[1], -1, -1)
        picked = torch.take_along_dim(v, place[..., None], 3)
        return joined((best.softmax(-1)[..., None] * picked).sum(3))


@case(call(X), tp=BOTH, allowed=HOSTILE)
class Skewed(Attention):
    """Transformer-XL's shift of relative scores by padding and viewing."""

    def __init__(self):
        super().__init__()
        self.places = nn.Linear(16, 16, bias=False)

    def scores(self, x):
        b, t, _ = x.shape
        r = parted(
            self.places(torch.arange(t, 0, -1, dtype=x.dtype)[None, :, None] * torch.ones(16).to(x.dtype) / 8), 4
        )
        s = parted(self.q(x), self.heads) @ r.mT
        s = F.pad(s, (1, 0)).view(b, -1, t + 1, t)[:, :, 1:].view(b, -1, t, t)
        return super().scores(x) + s


@case(call(X))
class MadeByVmap(nn.Module):
    """An ensemble of MLPs in stacked weights, run by vmap over functional calls."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 32, 16) / 4), nn.Parameter(torch.randn(3, 16, 32) / 6)

    def forward(self, x):
        one = lambda u, d: F.linear(F.linear(x, u).relu(), d)  # noqa: E731
        return torch.vmap(one)(self.up, self.down).mean(0)


@case(call(X))
class ModulesByVmap(nn.Module):
    """A list of modules run as one: vmap of a functional call over their stacked parameters."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.members = nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)])

    def forward(self, x):
        x = self.first(x)
        stacked, buffers = torch.func.stack_module_state(list(self.members))
        return x + torch.vmap(lambda p, b: torch.func.functional_call(self.members[0], (p, b), (x,)))(
            stacked, buffers
        ).mean(0)


@case(call(X))
class MixtureByVmap(nn.Module):
    """Experts as a list, stacked by name and mixed by a gate."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, x):
        names = [name for name, _ in self.experts[0].named_parameters()]
        stacked = {n: torch.stack([dict(e.named_parameters())[n] for e in self.experts]) for n in names}
        made = torch.vmap(lambda p: torch.func.functional_call(self.experts[0], p, (x,)))(stacked)
        return torch.einsum("bte,ebtd->btd", self.gate(x).softmax(-1), made.tanh())

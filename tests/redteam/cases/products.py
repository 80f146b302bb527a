"""Products in odd spellings: einsum, tensordot, bilinear and fused calls, transposed, tied and stacked weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
Y = floats(2, 6, 16, seed=2)
BOTH = (2, 4)


@case(call(X), tp=BOTH)
class WeightsByHeads(nn.Module):
    """(width, heads, width of a head), as in Flax."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(floats(16, 4, 4, seed=n) * 0.2) for n in range(3))
        self.o = nn.Parameter(floats(4, 4, 16, seed=5) * 0.2)

    def forward(self, x):
        q, k, v = (torch.einsum("btd,dhk->bthk", x, w) for w in (self.q, self.k, self.v))
        p = torch.einsum("bqhk,bthk->bhqt", q, k).softmax(-1)
        return x + torch.einsum("bhqt,bthk,hkd->bqd", p, v, self.o)


@case(call(X), tp=BOTH)
class OneEinsum(nn.Module):
    """Both layers of a bilinear MLP in one equation."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(floats(*shape) * 0.2) for shape in ((16, 32), (16, 32), (32, 16)))

    def forward(self, x):
        return torch.einsum("...i,ih,...j,jh,ho->...o", x, self.a, x, self.b, self.c)


@case(call(X), tp=BOTH)
class StackedProjections(nn.Module):
    """Q, K and V are one weight with a dim of three, taken apart by index."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Parameter(floats(3, 4, 16, 4) * 0.2), nn.Parameter(floats(4, 4, 16) * 0.2)

    def forward(self, x):
        q, k, v = torch.einsum("btd,nhdk->nbhtk", x, self.qkv)
        return x + torch.tensordot(((q @ k.mT) / 2).softmax(-1).matmul(v).transpose(1, 2), self.o, 2)


@case(call(X), tp=BOTH)
class TensorDots(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(floats(16, 8, 4) * 0.2), nn.Parameter(floats(16, 4, 8) * 0.2)

    def forward(self, x):
        return x + torch.tensordot(torch.tensordot(x, self.up, ([2], [0])).tanh(), self.down, ([3, 2], [1, 2]))


@case(call(X), tp=BOTH)
class AddedProducts(nn.Module):
    """addmm, baddbmm and addbmm with factors."""

    def __init__(self):
        super().__init__()
        self.up, self.bias, self.down = (nn.Parameter(floats(*s) * 0.2) for s in ((16, 32), (32,), (32, 16)))

    def forward(self, x):
        flat = x.reshape(-1, 16)
        h = torch.addmm(self.bias, flat, self.up, beta=0.5, alpha=2).relu()
        y = torch.baddbmm(x, h.view(*x.shape[:2], 32), self.down.expand(x.shape[0], 32, 16), beta=0.3)
        return torch.addcmul(y, y, x, value=0.5) + torch.addcdiv(x, y, x.abs() + 1, value=0.1)


@case(call(X, Y), tp=BOTH)
class Bilinears(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.pair, self.out = (
            nn.Linear(16, 8),
            nn.Linear(16, 8),
            nn.Bilinear(8, 8, 32),
            nn.Linear(32, 16),
        )

    def forward(self, x, y):
        return self.out(self.pair(self.a(x), self.b(y)).relu())


@case(call(X, Y), tp=BOTH)
class LowRankPairs(nn.Module):
    """MLB: a product of two projections, pooled over groups of factors, a signed root, a norm."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(16, 16)

    def forward(self, x, y):
        z = (self.a(x) * self.b(y)).unflatten(-1, (16, 4)).sum(-1)
        return self.out(F.normalize(z.sign() * (z.abs() + 1e-9).sqrt(), dim=-1))


@case(call(X, Y), tp=BOTH)
class CompactPairs(nn.Module):
    """Compact bilinear: count sketches, joined by a product of spectra."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("at", ids(2, 32, below=32))
        self.register_buffer("sign", ids(2, 32, below=2).double() * 2 - 1)

    def sketch(self, h, n):
        return torch.zeros_like(h).index_add(-1, self.at[n], h * self.sign[n])

    def forward(self, x, y):
        one, two = self.sketch(self.a(x), 0), self.sketch(self.b(y), 1)
        return self.out(torch.fft.irfft(torch.fft.rfft(one) * torch.fft.rfft(two), n=32))


@case(call(X), tp=BOTH)
class TiedAutoencoder(nn.Module):
    """The decoder's weight is the encoder's, transposed."""

    def __init__(self):
        super().__init__()
        self.encode, self.bias = nn.Linear(16, 32), nn.Parameter(floats(16))

    def forward(self, x):
        h = self.encode(x).sigmoid()
        y = F.linear(h, self.encode.weight.t(), self.bias)
        contractive = ((h * (1 - h)).pow(2) @ self.encode.weight.pow(2).sum(1)).mean()
        return y, contractive


@case(call(ids(2, 6)), tp=BOTH)
class TiedWithFactor(nn.Module):
    """ALBERT's table: ids to 8, 8 to 16; the head goes back through both."""

    def __init__(self):
        super().__init__()
        self.table, self.wide, self.mlp = nn.Embedding(32, 8), nn.Linear(8, 16, bias=False), Mlp()

    def forward(self, input_ids):
        h = self.mlp(self.wide(self.table(input_ids)))
        return (h @ self.wide.weight) @ self.table.weight.T


@case(call(ids(2, 6)), tp=BOTH)
class ScaledTie(nn.Module):
    """The head divides by the norm of the table's rows, and scales by a number that is learned."""

    def __init__(self):
        super().__init__()
        self.table, self.mlp, self.scale = nn.Embedding(32, 16), Mlp(), nn.Parameter(torch.tensor(3.0))

    def forward(self, input_ids):
        h = self.mlp(self.table(input_ids) * 4)
        return F.linear(F.normalize(h, dim=-1), F.normalize(self.table.weight, dim=-1)) * self.scale.exp()


@case(call(X), tp=BOTH)
class SameWeightTwoWays(nn.Module):
    """Used as it is in one place and transposed in another."""

    def __init__(self):
        super().__init__()
        self.w, self.down = nn.Parameter(floats(16, 16) * 0.2), nn.Linear(16, 16)

    def forward(self, x):
        return self.down((x @ self.w).relu()) + (x @ self.w.T).tanh()


@case(call(X), tp=BOTH)
class KernelOfRows(nn.Module):
    """A radial kernel between hidden units and centres, both with learned widths."""

    def __init__(self):
        super().__init__()
        self.up, self.centre, self.width, self.out = (
            *(nn.Linear(16, 32), nn.Parameter(floats(12, 32)), nn.Parameter(floats(12) * 0.1), nn.Linear(12, 16)),
        )

    def forward(self, x):
        away = (self.up(x)[..., None, :] - self.centre).pow(2).sum(-1)
        return self.out((-away * self.width.exp() / 32).exp())


@case(call(X), tp=BOTH)
class TuckerHead(nn.Module):
    """A core tensor between three factors."""

    def __init__(self):
        super().__init__()
        self.core = nn.Parameter(floats(8, 8, 8) * 0.1)
        self.a, self.b, self.c = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x):
        return self.c(torch.einsum("uvw,btu,btv->btw", self.core, self.a(x), self.b(x.flip(1))))


@case(call(X), tp=BOTH)
class TrainOfTensors(nn.Module):
    """A linear layer as a tensor train: 16 = 4 * 4 to 32 = 4 * 8."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.down = nn.Parameter(floats(4, 4, 3)), nn.Parameter(floats(3, 4, 8)), nn.Linear(32, 16)

    def forward(self, x):
        h = torch.einsum("btij,ipr,rjq->btpq", x.unflatten(-1, (4, 4)), self.one, self.two) * 0.2
        return x + self.down(h.flatten(-2).relu())


@case(call(X), tp=BOTH)
class OuterPooled(nn.Module):
    """Second-order pooling: the covariance of units over tokens, flattened."""

    def __init__(self):
        super().__init__()
        self.up, self.out = nn.Linear(16, 8), nn.Linear(64, 16)

    def forward(self, x):
        h = self.up(x)
        h = h - h.mean(1, keepdim=True)
        return self.out((h.mT @ h / h.shape[1]).flatten(1))


@case(call(X), tp=BOTH, sequence=None)
class TriangleUpdate(nn.Module):
    """Pairs of tokens, multiplied over a third: AlphaFold's outgoing edges."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.a, self.b, self.gate = (nn.Linear(16, 8) for _ in range(5))
        self.a, self.b, self.gate = (nn.Linear(8, 16) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x):
        z = self.left(x)[:, :, None] + self.right(x)[:, None]
        ab = self.a(z) * self.gate(z).sigmoid()
        return z + self.out(self.norm(torch.einsum("bikc,bjkc->bijc", ab, self.b(z))))


@case(call(X), tp=BOTH, sequence=None)
class AxialAttention(Attention):
    """Rows and columns of pairs, and a bias from the pairs, each head its own."""

    def __init__(self):
        super().__init__()
        self.pair, self.bias = nn.Linear(16, 8), nn.Linear(8, 4, bias=False)

    def mixed(self, x):
        p = self.pair(x)
        z = p[:, :, None] * p[:, None]
        s = self.scores(x) + torch.einsum("bijc,hc->bhij", z, self.bias.weight)
        return joined(s.softmax(-1) @ parted(self.v(x), self.heads))


@case(call(X), tp=BOTH)
class ChainedMatmul(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(floats(*s) * 0.2) for s in ((16, 32), (32, 8), (8, 16)))

    def forward(self, x):
        return x + torch.linalg.multi_dot([x.flatten(0, 1), self.a, self.b, self.c]).view_as(x)


@case(call(X), tp=BOTH)
class KroneckerProduct(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.down = nn.Parameter(floats(4, 8)), nn.Parameter(floats(4, 4)), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down((x @ torch.kron(self.a, self.b) * 0.1).tanh())


@case(call(X), tp=BOTH)
class InnerOfUnits(nn.Module):
    """inner, vdot and matrix-vector products with vectors that are learned."""

    def __init__(self):
        super().__init__()
        self.up, self.v, self.w = nn.Linear(16, 32), nn.Parameter(floats(32)), nn.Parameter(floats(5, 32))

    def forward(self, x):
        h = self.up(x).tanh()
        return (
            torch.inner(h, self.w),
            torch.mv(h[0], self.v),
            torch.linalg.vecdot(h, self.v),
            torch.outer(h[0, 0], h[0, 1]),
        )

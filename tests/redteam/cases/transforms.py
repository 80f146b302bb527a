"""Complex numbers, spectra, segments, sparse and indexed operations on hidden values."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Mlp

X = floats(2, 6, 16)
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])
NODES = floats(6, 16)


class Inner(nn.Module):
    def __init__(self, hidden=32, out=32):
        super().__init__()
        self.up, self.down = nn.Linear(16, hidden), nn.Linear(out, 16)

    def forward(self, x):
        return x + self.down(self.change(self.up(x)))


@case(call(X), tp=(2, 4))
class ComplexWeights(nn.Module):
    """Two complex layers with a rectifier of the modulus between them."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(32, 16, dtype=torch.complex64) * 0.2)
        self.w2 = nn.Parameter(torch.randn(16, 32, dtype=torch.complex64) * 0.2)
        self.bias = nn.Parameter(torch.full((32,), -0.1))

    def forward(self, x):
        z = torch.complex(x, x.roll(1, -1)) @ self.w1.to(torch.complex128).T
        size = z.abs()
        z = z * (F.relu(size + self.bias) / (size + 1e-3))
        y = z @ self.w2.to(torch.complex128).T
        return y.real + x, y.abs().mean()


@case(call(X), tp=(2, 4))
class ComplexParts(nn.Module):
    """A complex layer by real parts, put together to complex values in the middle."""

    def __init__(self):
        super().__init__()
        self.re, self.im, self.out = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(64, 16)

    def forward(self, x):
        z = torch.complex(self.re(x), self.im(x))
        z = torch.polar(torch.tanh(z.abs()), z.angle() * 2)
        return x + self.out(torch.cat([z.real, z.imag], -1))


@case(call(X), tp=(2, 4))
class ComplexNormed(nn.Module):
    """Whitened complex values: a covariance of real and imaginary parts over the batch."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        z = torch.view_as_complex(self.up(x).unflatten(-1, (-1, 2)))
        z = z - z.mean((0, 1), keepdim=True)
        z = z / (z.abs().pow(2).mean((0, 1), keepdim=True) + 1e-5).sqrt()
        return x + self.down(torch.view_as_real(z).flatten(-2))


@case(call(X), tp=(2, 4))
class BoundByConvolution(Inner):
    """Holographic binding: circular convolution of units with a key, by spectra."""

    def __init__(self):
        super().__init__()
        self.key = nn.Parameter(torch.randn(32) * 0.2)

    def change(self, h):
        return torch.fft.irfft(torch.fft.rfft(h) * torch.fft.rfft(self.key), n=h.shape[-1])


@case(call(X), tp=(2, 4))
class BandsOfSpectrum(Inner):
    """Frequencies along positions are masked and weighted unit by unit."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(4, 32) * 0.5)

    def change(self, h):
        spectrum = torch.fft.rfft(h, dim=1, norm="ortho")
        low = torch.fft.rfftfreq(h.shape[1]) < 0.4
        gain = F.interpolate(self.gain.T[None], spectrum.shape[1], mode="linear")[0].T
        return torch.fft.irfft(spectrum * gain * low[:, None], n=h.shape[1], dim=1, norm="ortho")


@case(call(X), tp=(2, 4))
class Envelope(Inner):
    """The analytic signal along units, and its envelope."""

    def change(self, h):
        n = h.shape[-1]
        filter_ = torch.zeros(n, dtype=h.dtype)
        filter_[0] = filter_[n // 2] = 1
        filter_[1 : n // 2] = 2
        return torch.fft.ifft(torch.fft.fft(h) * filter_).abs()


@case(call(X), tp=(2, 4))
class Cosines(Inner):
    """A cosine transform of heads' units by a matrix made of their number, quantised, and back."""

    def change(self, h):
        h = h.unflatten(-1, (4, -1))
        n = h.shape[-1]
        k = torch.arange(n, dtype=h.dtype)
        basis = torch.cos(torch.pi * k[:, None] * (2 * k + 1) / (2 * n))
        spectrum = h @ basis.T
        return (torch.tanh(spectrum) @ basis / n).flatten(-2)


@case(call(NODES, EDGES), tp=(2, 4), inputs={"x": NODES, "edges": EDGES})
class MessagesReduced(nn.Module):
    """Messages along edges, reduced in four ways."""

    def __init__(self):
        super().__init__()
        self.message, self.update = nn.Linear(32, 32), nn.Linear(128, 16)

    def forward(self, x, edges):
        s, t = edges
        m = torch.relu(self.message(torch.cat([x[s], x[t]], -1)))
        where = t[:, None].expand_as(m)
        base = x.new_zeros(x.shape[0], m.shape[-1])
        ways = [base.scatter_reduce(0, where, m, way, include_self=False) for way in ("sum", "mean", "amax", "amin")]
        return x + self.update(torch.cat(ways, -1))


@case(call(NODES, EDGES), tp=(2, 4), inputs={"x": NODES, "edges": EDGES})
class SoftmaxOfSegments(nn.Module):
    """GATv2: a softmax over the edges of each node for each head."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.out = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.a = nn.Parameter(torch.randn(4, 8) * 0.3)

    def forward(self, x, edges):
        s, t = edges
        left, right = self.left(x).view(-1, 4, 8), self.right(x).view(-1, 4, 8)
        score = (F.leaky_relu(left[s] + right[t], 0.2) * self.a).sum(-1)
        most = score.new_full((x.shape[0], 4), -1e9).index_reduce(0, t, score.detach(), "amax")
        p = torch.exp(score - most[t])
        p = p / x.new_zeros(x.shape[0], 4).index_add(0, t, p)[t]
        return x + self.out(x.new_zeros(x.shape[0], 4, 8).index_add(0, t, p.unsqueeze(-1) * left[s]).flatten(1))


@case(call(X), tp=(2, 4))
class SegmentsOfUnits(Inner):
    """Units are summed by a group that a table names for each, and every unit gets its group's mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("group", torch.arange(32) * 7 % 5)

    def change(self, h):
        sums = h.new_zeros(*h.shape[:-1], 5).index_add(-1, self.group, torch.tanh(h))
        count = torch.bincount(self.group, minlength=5)
        return h * (sums / count)[..., self.group]


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class SparseWeight(nn.Module):
    """A fixed sparse mask as a COO tensor of the weight's values."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("places", torch.stack([torch.arange(64) % 32, torch.arange(64) * 5 % 16]))
        self.values = nn.Parameter(torch.randn(64) * 0.2)

    def forward(self, x):
        extra = torch.sparse_coo_tensor(self.places, self.values, (32, 16))
        rows = x.flatten(0, 1)
        h = self.up(rows) + torch.sparse.mm(extra, rows.T).T
        return (rows + self.down(torch.relu(h))).view_as(x)


@case(call(X), tp=(2, 4))
class LowRankAndSparse(nn.Module):
    """A weight as a product of thin ones and single elements put in by places."""

    def __init__(self):
        super().__init__()
        self.u, self.v = nn.Parameter(torch.randn(32, 4) * 0.3), nn.Parameter(torch.randn(4, 16) * 0.3)
        self.values, self.down = nn.Parameter(torch.randn(40) * 0.3), nn.Linear(32, 16)
        self.register_buffer("rows", torch.arange(40) * 11 % 32)
        self.register_buffer("columns", torch.arange(40) * 3 % 16)

    def forward(self, x):
        weight = (self.u @ self.v).index_put((self.rows, self.columns), self.values, accumulate=True)
        return x + self.down(torch.relu(F.linear(x, weight)))


@case(call(X), tp=(2, 4))
class TriangleOfUnits(Inner):
    """Factorisation: products of all pairs of units of a head, by places of a triangle."""

    def __init__(self):
        super().__init__(out=4 * 28)

    def change(self, h):
        h = h.unflatten(-1, (4, -1))
        i, j = torch.triu_indices(h.shape[-1], h.shape[-1], 1)
        return (h[..., i] * h[..., j]).flatten(-2)


@case(call(X), tp=(2, 4))
class PooledAndPutBack(Inner):
    """Places of largest units of pairs are kept, and values put back there."""

    def change(self, h):
        small, places = F.max_pool1d(h, 2, return_indices=True)
        return F.max_unpool1d(torch.tanh(small) * 2, places, 2, output_size=h.shape[-1:])


@case(call(X), tp=(2, 4))
class SeldomModules(nn.Module):
    """Modules of torch that are seldom used, on hidden values."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(16, 16)
        self.parts = nn.Sequential(
            nn.GLU(-1), nn.Hardshrink(0.1), nn.LPPool1d(2, 2), nn.Threshold(0.05, 0.0), nn.Softsign(),
            nn.Unflatten(-1, (4, 4)), nn.Softmin(-2), nn.Flatten(-2), nn.CELU(0.5), nn.ConstantPad1d((0, 0), 1.0),
            nn.Tanhshrink(),
        )  # fmt: skip
        self.slope = nn.PReLU(64)

    def forward(self, x):
        h = self.slope(self.up(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(self.parts(h))


@case(call(ids(2, 8, below=30), floats(2, 8, seed=3)), tp=(2, 4))
class WeighedBags(nn.Module):
    """Bags with a weight for each sample, and one that takes the largest."""

    def __init__(self):
        super().__init__()
        self.sums = nn.EmbeddingBag(30, 16, mode="sum")
        self.tops = nn.EmbeddingBag(30, 16, mode="max")
        self.net = Mlp()

    def forward(self, words, weights):
        return self.net(self.sums(words, per_sample_weights=weights) + self.tops(words))

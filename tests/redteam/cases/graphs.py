"""Networks on graphs: messages along edges, aggregates of several kinds, relations, pooled graphs, triples."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Mlp

N = floats(10, 16)
E = ids(2, 24, below=10)
W = floats(24, 4)
K = ids(24, below=3)
G = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2])
TRIPLES = ids(6, 3, below=8)
BOTH = (2, 4)


def gathered(x, index, size, reduce="sum"):
    at = index.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    return x.new_zeros(size, *x.shape[1:]).scatter_reduce(0, at, x, reduce, include_self=False)


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.out = nn.Linear(16, 32), nn.Linear(32, 16)


@case(call(N, E), tp=BOTH)
class Isomorphism(Graph):
    """GIN: a learned weight of a node's own value, an MLP behind the sum."""

    def __init__(self):
        super().__init__()
        self.eps, self.mlp = nn.Parameter(torch.tensor(0.2)), Mlp(32, 64)

    def forward(self, x, edges):
        h = F.relu(self.enter(x))
        return self.out(self.mlp((1 + self.eps) * h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])))


@case(call(N, E), tp=BOTH)
class PrincipalAggregates(Graph):
    """PNA: mean, largest, smallest and deviation of messages, scaled by degrees."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(32 * 12, 16)

    def forward(self, x, edges):
        h, n = self.enter(x)[edges[0]], x.shape[0]
        mean = gathered(h, edges[1], n, "mean")
        deviation = (gathered(h * h, edges[1], n, "mean") - mean**2).clamp(min=0).add(1e-5).sqrt()
        all_of = torch.cat([mean, gathered(h, edges[1], n, "amax"), gathered(h, edges[1], n, "amin"), deviation], -1)
        degree = torch.bincount(edges[1], minlength=n).to(x.dtype).add(1).log()[:, None]
        return self.out(torch.cat([all_of, all_of * degree, all_of / degree], -1))


@case(call(N, E, W), tp=BOTH)
class WeightsOfEdges(Graph):
    """NNConv: each edge makes the matrix that its message is multiplied with."""

    def __init__(self):
        super().__init__()
        self.enter, self.make = nn.Linear(16, 8), nn.Linear(4, 8 * 32)

    def forward(self, x, edges, features):
        m = self.make(features).view(-1, 8, 32)
        h = (self.enter(x)[edges[0]][:, None] @ m)[:, 0]
        return self.out(gathered(h, edges[1], x.shape[0], "mean"))


@case(call(N, E, K), tp=BOTH)
class Relations(Graph):
    """R-GCN: weights of relations are mixed from bases."""

    def __init__(self):
        super().__init__()
        self.bases, self.mix = nn.Parameter(floats(4, 16, 32) * 0.2), nn.Parameter(floats(3, 4))

    def forward(self, x, edges, kinds):
        w = torch.einsum("rb,bio->rio", self.mix, self.bases)
        h = torch.einsum("ei,eio->eo", x[edges[0]], w[kinds])
        return self.out(F.relu(self.enter(x) + gathered(h, edges[1], x.shape[0])))


@case(call(N, E), tp=BOTH)
class Chebyshev(Graph):
    """Powers of a normalised Laplacian, in a recurrence."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(16, 32, bias=False) for _ in range(3))

    def forward(self, x, edges):
        a = x.new_zeros(x.shape[0], x.shape[0]).index_put((edges[1], edges[0]), x.new_ones(()), accumulate=True)
        d = a.sum(1).clamp(min=1).rsqrt()
        a = d[:, None] * a * d
        before, now = x, -a @ x
        h = self.steps[0](before) + self.steps[1](now)
        for step in self.steps[2:]:
            before, now = now, -2 * a @ now - before
            h = h + step(now)
        return self.out(h.relu())


@case(call(N, E), tp=BOTH)
class Personalised(Graph):
    """APPNP: what is predicted is spread ten times."""

    def forward(self, x, edges):
        h = first = self.enter(x).relu()
        for _ in range(4):
            h = 0.1 * first + 0.9 * gathered(h[edges[0]], edges[1], x.shape[0], "mean")
        return self.out(h)


@case(call(N, E), tp=BOTH)
class PooledGraph(Graph):
    """DiffPool: nodes are assigned to clusters by a softmax, and the graph is made smaller."""

    def __init__(self):
        super().__init__()
        self.assign = nn.Linear(16, 4)

    def forward(self, x, edges):
        a = x.new_zeros(x.shape[0], x.shape[0])
        a[edges[0], edges[1]] = 1
        s, z = self.assign(x).softmax(-1), self.enter(x).relu()
        small = s.T @ a @ s
        link = (a - s @ s.T).norm()
        entropy = -(s * (s + 1e-9).log()).sum(-1).mean()
        return self.out(small @ (s.T @ z)), link, entropy


@case(call(N, G), tp=BOTH)
class SetToSet(Graph):
    """An LSTM reads a graph's nodes by attention, several times."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTMCell(64, 32), nn.Linear(64, 16)

    def forward(self, x, graph):
        v = self.enter(x)
        q, state = x.new_zeros(3, 64), None
        for _ in range(3):
            state = self.cell(q, state)
            e = (v * state[0][graph]).sum(-1)
            top = e.new_zeros(3).scatter_reduce(0, graph, e, "amax", include_self=False)
            e = (e - top[graph]).exp()
            e = e / e.new_zeros(3).index_add(0, graph, e)[graph]
            q = torch.cat([state[0], v.new_zeros(3, 32).index_add(0, graph, e[:, None] * v)], -1)
        return self.out(q)


@case(call(N, G), tp=BOTH, inputs={"x": N, "graph": G}, allowed=HOSTILE)
class TopNodes(Graph):
    """The nodes of the highest scores are kept, and gated by them."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(floats(32))

    def forward(self, x, graph):
        h = self.enter(x).tanh()
        score = h @ self.p / self.p.norm()
        top = score.topk(6)
        return self.out(h[top.indices] * top.values.sigmoid()[:, None]), graph[top.indices]


@case(call(N, G), tp=BOTH, inputs={"x": N, "graph": G}, allowed=HOSTILE)
class NormOfGraph(Graph):
    """GraphNorm: each unit over the nodes of its graph, with a learned share of the mean."""

    def __init__(self):
        super().__init__()
        self.share, self.scale = nn.Parameter(floats(32)), nn.Parameter(floats(32))

    def forward(self, x, graph):
        h = self.enter(x)
        mean = gathered(h, graph, 3, "mean")[graph]
        h = h - self.share * mean
        spread = gathered(h * h, graph, 3, "mean")[graph]
        return self.out((self.scale * h / (spread + 1e-5).sqrt()).relu())


@case(call(N), tp=BOTH, inputs={"x": N}, allowed=HOSTILE)
class PairNorm(Graph):
    """All nodes and all units are scaled by one number."""

    def forward(self, x):
        h = self.enter(x)
        h = h - h.mean(0)
        return self.out(h / (1e-6 + h.pow(2).sum(1).mean()).sqrt())


@case(call(N), tp=BOTH, inputs={"x": N}, allowed=HOSTILE)
class NearestNeighbours(Graph):
    """DGCNN: edges to the nearest in the space of hidden units, the largest message."""

    def __init__(self):
        super().__init__()
        self.edge = nn.Linear(64, 32)

    def forward(self, x):
        h = self.enter(x)
        near = torch.cdist(h, h).topk(4, largest=False).indices
        pair = torch.cat([h[near] - h[:, None], h[:, None].expand(-1, 4, -1)], -1)
        return self.out(F.leaky_relu(self.edge(pair), 0.2).amax(1))


@case(call(N, E), tp=BOTH)
class SparseProduct(Graph):
    """The adjacency is a sparse matrix."""

    def forward(self, x, edges):
        a = torch.sparse_coo_tensor(edges.flip(0), x.new_ones(edges.shape[1]), (x.shape[0], x.shape[0]))
        return self.out(torch.sparse.mm(a, self.enter(x).relu()))


@case(call(N, E), tp=BOTH, allowed=HOSTILE)
class CompressedRows(Graph):
    def forward(self, x, edges):
        a = torch.zeros(x.shape[0], x.shape[0], dtype=x.dtype)
        a[edges[1], edges[0]] = 1
        return self.out(a.to_sparse_csr() @ self.enter(x).relu())


class Triples(nn.Module):
    """Embeddings of entities and of relations, and a projection before scores."""

    def __init__(self):
        super().__init__()
        self.entity, self.relation = nn.Embedding(8, 16), nn.Embedding(8, 32)
        self.wide = nn.Linear(16, 32)

    def forward(self, triples):
        h, t = self.wide(self.entity(triples[:, 0])), self.wide(self.entity(triples[:, 2]))
        return self.score(h, self.relation(triples[:, 1]), t)


@case(call(TRIPLES), tp=BOTH)
class TranslatedTriples(Triples):
    def score(self, h, r, t):
        return -(F.normalize(h, dim=-1) + r - F.normalize(t, dim=-1)).norm(p=1, dim=-1)


@case(call(TRIPLES), tp=BOTH)
class DiagonalTriples(Triples):
    def score(self, h, r, t):
        return (h * r * t).sum(-1), (h * r) @ self.wide(self.entity.weight).T


@case(call(TRIPLES), tp=BOTH)
class ComplexTriples(Triples):
    """ComplEx: halves are real and imaginary parts."""

    def score(self, h, r, t):
        h, r, t = (torch.complex(*one.chunk(2, -1)) for one in (h, r, t))
        return (h * r * t.conj()).real.sum(-1)


@case(call(TRIPLES), tp=BOTH)
class RotatedTriples(Triples):
    """RotatE: a relation turns pairs of neighbours."""

    def score(self, h, r, t):
        h, t = torch.view_as_complex(h.unflatten(-1, (16, 2))), torch.view_as_complex(t.unflatten(-1, (16, 2)))
        return 6 - (h * torch.polar(torch.ones_like(r[:, :16]), r[:, :16]) - t).abs().sum(-1)


@case(call(TRIPLES), tp=BOTH)
class ConvolvedTriples(Triples):
    """ConvE: head and relation are a picture."""

    def __init__(self):
        super().__init__()
        self.conv, self.project = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4 * 64, 32)

    def score(self, h, r, t):
        picture = torch.cat([h.view(-1, 1, 4, 8), r.view(-1, 1, 4, 8)], 2)
        return (self.project(self.conv(picture).relu().flatten(1)) * t).sum(-1)


@case(call(N, E), tp=BOTH)
class AttentionOfEdges(Graph):
    """GATv2 with four heads and a softmax over the edges that arrive."""

    def __init__(self):
        super().__init__()
        self.other, self.a = nn.Linear(16, 32), nn.Parameter(floats(4, 8))

    def forward(self, x, edges):
        n = x.shape[0]
        left, right = self.enter(x).view(n, 4, 8), self.other(x).view(n, 4, 8)
        e = (F.leaky_relu(left[edges[0]] + right[edges[1]], 0.2) * self.a).sum(-1)
        e = (e - gathered(e, edges[1], n, "amax")[edges[1]].detach()).exp()
        e = e / (gathered(e, edges[1], n)[edges[1]] + 1e-16)
        return self.out(gathered(left[edges[0]] * e[..., None], edges[1], n).flatten(1))


@case(call(N, E), tp=BOTH)
class JumpingKnowledge(Graph):
    """Outputs of all layers, attended to by an LSTM's scores, or the largest of them."""

    def __init__(self):
        super().__init__()
        self.again, self.lstm, self.score = nn.Linear(32, 32), nn.LSTM(32, 8, bidirectional=True), nn.Linear(16, 1)

    def forward(self, x, edges):
        h, layers = self.enter(x).relu(), []
        for _ in range(3):
            h = (self.again(h) + gathered(h[edges[0]], edges[1], x.shape[0])).relu()
            layers.append(h)
        all_of = torch.stack(layers)
        weight = self.score(self.lstm(all_of)[0]).softmax(0)
        return self.out((weight * all_of).sum(0)), self.out(all_of.amax(0))

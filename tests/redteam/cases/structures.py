"""Graphs, trees, loops whose length the data says, and torch's own modules in places where few use them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Mlp

X = floats(2, 6, 16)
N = floats(7, 16)
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 2], [1, 2, 3, 4, 5, 6, 0, 3, 5]])
G = {"x": N, "edges": EDGES}


class Messages(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, edges):
        h = self.up(x)
        return x + self.down(self.spread(h, edges[0], edges[1]).relu())


@case(call(N, EDGES), inputs=G, vary=False)
class GraphSum(Messages):
    def spread(self, h, source, target):
        return torch.zeros_like(h).index_add(0, target, h[source])


@case(call(N, EDGES), inputs=G, vary=False)
class GraphMeanMaxStd(Messages):
    """PNA: several statistics of what comes in."""

    def spread(self, h, source, target):
        index = target[:, None].expand(-1, h.shape[1])
        m = h[source]
        mean = torch.zeros_like(h).scatter_reduce(0, index, m, "mean", include_self=False)
        most = torch.zeros_like(h).scatter_reduce(0, index, m, "amax", include_self=False)
        square = torch.zeros_like(h).scatter_reduce(0, index, m * m, "mean", include_self=False)
        return mean + most + (square - mean * mean).relu().add(1e-5).sqrt()


@case(call(N, EDGES), inputs=G, vary=False)
class GraphSparse(Messages):
    """A sparse adjacency times the features, scaled by degrees."""

    def spread(self, h, source, target):
        n = h.shape[0]
        a = torch.sparse_coo_tensor(torch.stack([target, source]), h.new_ones(source.shape[0]), (n, n))
        degree = torch.bincount(target, minlength=n).clamp(min=1)[:, None]
        return torch.sparse.mm(a, h) / degree


@case(call(N, EDGES), inputs=G, vary=False)
class GraphAttention(nn.Module):
    """GAT: a softmax over the edges into a node, for each head."""

    def __init__(self):
        super().__init__()
        self.w, self.o = nn.Linear(16, 32, bias=False), nn.Linear(32, 16)
        self.a, self.b = nn.Parameter(torch.randn(1, 4, 8)), nn.Parameter(torch.randn(1, 4, 8))

    def forward(self, x, edges):
        source, target = edges
        h = self.w(x).view(-1, 4, 8)
        s = F.leaky_relu((h * self.a).sum(-1)[source] + (h * self.b).sum(-1)[target], 0.2)
        index = target[:, None].expand(-1, s.shape[1])
        most = torch.full((x.shape[0], s.shape[1]), float("-inf"), dtype=s.dtype)
        most = most.scatter_reduce(0, index, s, "amax")
        e = (s - most[target]).exp()
        total = torch.zeros_like(most).scatter_add(0, index, e)
        p = e / total[target]
        return x + self.o(torch.zeros_like(h).index_add(0, target, p[..., None] * h[source]).flatten(1))


@case(call(N, EDGES), inputs=G, vary=False)
class GraphGated(nn.Module):
    """Edges have features of their own, which gate (GatedGCN), with BatchNorm over edges."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(16, 32)
        self.norm, self.down = nn.BatchNorm1d(32), nn.Linear(32, 16)

    def forward(self, x, edges):
        source, target = edges
        e = self.norm(self.a(x)[source] + self.b(x)[target])
        gate = e.sigmoid()
        total = torch.zeros(x.shape[0], e.shape[1], dtype=x.dtype).index_add(0, target, gate)
        h = torch.zeros_like(total).index_add(0, target, gate * self.c(x)[source]) / (total + 1e-6)
        return x + self.down(h.relu()), self.down(e.relu())


@case(call(N, floats(7, 3)), inputs={"x": N, "place": floats(7, 3)}, vary=False)
class Equivariant(nn.Module):
    """EGNN: distances go into messages, messages move places."""

    def __init__(self):
        super().__init__()
        self.edge, self.move = (
            nn.Sequential(nn.Linear(33, 32), nn.SiLU(), nn.Linear(32, 16), nn.SiLU()),
            nn.Linear(16, 1),
        )
        self.node = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 16))

    def forward(self, x, place):
        n = x.shape[0]
        away = place[:, None] - place
        square = away.pow(2).sum(-1, keepdim=True)
        m = self.edge(torch.cat([x[:, None].expand(n, n, -1), x[None].expand(n, n, -1), square], -1))
        place = place + (away * self.move(m)).sum(1) / n
        return x + self.node(torch.cat([x, m.sum(1)], -1)), place


@case(call(floats(4, 16)), vary=False)
class Tree(nn.Module):
    """A recursion over a binary tree of the rows."""

    def __init__(self):
        super().__init__()
        self.join, self.gate, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 16)

    def node(self, rows):
        if rows.shape[0] == 1:
            return rows[0]
        half = rows.shape[0] // 2
        both = torch.cat([self.node(rows[:half]), self.node(rows[half:])])
        return self.down(self.join(both).tanh() * self.gate(both).sigmoid())

    def forward(self, x):
        return self.node(x)


@case(call(X), call(X * 3), allowed=HOSTILE)
class Ponder(nn.Module):
    """Adaptive computation: a loop until the halting probabilities of all tokens are used up."""

    def __init__(self):
        super().__init__()
        self.mlp, self.halt = Mlp(), nn.Linear(16, 1)

    def forward(self, x):
        left, out = torch.ones_like(x[..., :1]), torch.zeros_like(x)
        for step in range(5):
            p = self.halt(x).sigmoid() if step < 4 else torch.ones_like(left)
            out = out + left * p * x
            left = left * (1 - p)
            if bool((left < 0.05).all()):
                break
            x = self.mlp(x)
        return out


@case(call(X), call(X * 3), call(X * 0.1), allowed=HOSTILE)
class EarlyExit(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.heads = (
            nn.ModuleList([Mlp() for _ in range(3)]),
            nn.ModuleList([nn.Linear(16, 8) for _ in range(3)]),
        )

    def forward(self, x):
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            z = head(x.mean(1))
            if z.softmax(-1).amax(-1).min() > 0.4:
                break
        return z


@case(call(X, torch.tensor([6, 4])), inputs={"x": X, "lengths": torch.tensor([6, 4])}, vary=False, allowed=HOSTILE)
class PackedLstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 16)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.out(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])


@case(call(X))
class ProjectedLstm(nn.Module):
    """Two layers, a smaller projection, states returned."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(16, 32, 2, batch_first=True, proj_size=8), nn.Linear(8, 16)

    def forward(self, x):
        y, (h, c) = self.lstm(x)
        return self.out(y), h, c


@case(call(X))
class ChannelPools(nn.Module):
    """Average, maximum and LP pooling over the hidden units."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(16, 16)

    def forward(self, x):
        h = self.up(x)
        return x + self.down(F.avg_pool1d(h, 4) + F.max_pool1d(h, 4) + F.lp_pool1d(h.abs() + 1e-3, 2.0, 4))


@case(call(X))
class Maxout(nn.Module):
    """The largest of two pieces, pieces in the inner dim, and the outer one."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.a(x).unflatten(-1, (32, 2)).amax(-1) + self.b(x).unflatten(-1, (2, 32)).amax(-2))


@case(call(floats(2, 16, 6, 6)), allowed=HOSTILE)
class LocalResponse(nn.Module):
    """A norm over neighbouring channels."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(16, 32, 1), nn.LocalResponseNorm(5), nn.Conv2d(32, 16, 1)

    def forward(self, x):
        return self.b(self.norm(self.a(x).relu()))


@case(call(X))
class SlopesOfUnits(nn.Module):
    """PReLU with a slope for each unit, GLU, and a learned threshold."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 64), nn.PReLU(64), nn.Linear(32, 16)

    def forward(self, x):
        h = self.act(self.up(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.glu(h))


@case(call(X))
class BilinearPair(nn.Module):
    """nn.Bilinear of two projections."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.both, self.down = (
            nn.Linear(16, 8),
            nn.Linear(16, 8),
            nn.Bilinear(8, 8, 32),
            nn.Linear(32, 16),
        )

    def forward(self, x):
        return x + self.down(self.both(self.a(x), self.b(x)).relu())


@case(call(X), call(X, _train=True))
class CumulativeNorm(nn.Module):
    """BatchNorm with momentum=None beside one that keeps no statistics."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.a, self.b = nn.BatchNorm1d(32, momentum=None), nn.BatchNorm1d(32, track_running_stats=False, affine=False)

    def forward(self, x):
        h = self.b(self.a(self.up(x).transpose(1, 2)).relu()).transpose(1, 2)
        return x + self.down(h)


@case(call(X, floats(2, 4, 16)), inputs={"x": X, "memory": floats(2, 4, 16)}, vary=False)
class TorchDecoder(nn.Module):
    """nn.TransformerDecoder with a memory, norm first."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=True, activation="gelu")
        self.net = nn.TransformerDecoder(layer, 2, nn.LayerNorm(16))

    def forward(self, x, memory):
        return self.net(x, memory, tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype))


PADDED = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])


@case(call(X, PADDED), call(X, PADDED, _grad=False), inputs={"x": X, "padding": PADDED}, vary=False, allowed=HOSTILE)
class NestedEncoder(nn.Module):
    """nn.TransformerEncoder with padding: nested tensors on its fast path."""

    def __init__(self):
        super().__init__()
        self.net = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), 2)

    def forward(self, x, padding):
        return self.net(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0)


@case(
    call(X, floats(2, 5, 8), floats(2, 5, 12)), inputs={"x": X, "k": floats(2, 5, 8), "v": floats(2, 5, 12)}, vary=False
)
class OtherKeyWidths(nn.Module):
    """nn.MultiheadAttention with kdim, vdim, bias_k, a zero key, a mask of each head."""

    def __init__(self):
        super().__init__()
        self.net = nn.MultiheadAttention(16, 4, kdim=8, vdim=12, add_bias_kv=True, add_zero_attn=True, batch_first=True)

    def forward(self, x, k, v):
        mask = torch.arange(8 * 6 * 5).view(8, 6, 5) % 7 == 0
        return self.net(x, k, v, attn_mask=mask)


@case(
    call(ids(3, 5), ids(3, seed=4, below=40)),
    inputs={"input_ids": ids(3, 5), "labels": ids(3, below=40)},
    vary=False,
    allowed=HOSTILE,
)
class AdaptiveSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mlp = nn.Embedding(40, 16), Mlp()
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(16, 40, [10, 20])

    def forward(self, input_ids, labels):
        return tuple(self.loss(self.mlp(self.table(input_ids)).mean(1), labels))


@case(call(X), vary=False)
class FlattenedHead(nn.Module):
    """All tokens in one row, into a wide layer (MLP-Mixer's and MNIST's head)."""

    def __init__(self):
        super().__init__()
        self.body, self.net = Mlp(), nn.Sequential(nn.Flatten(), nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x):
        return self.net(self.body(x))


class Tagged(torch.Tensor):
    """A tensor with a tag, which follows it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@case(call(X), allowed=HOSTILE)
class TaggedTensor(Mlp):
    """A subclass of tensors runs through the block."""

    def forward(self, x):
        return super().forward(x.as_subclass(Tagged)).as_subclass(torch.Tensor)

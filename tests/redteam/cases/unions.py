"""Modules that several parts share: trunks, teachers, tied and transposed weights, adapters, generated weights."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
Z = floats(2, 9, 16, seed=3)
BOTH = (2, 4)


@case(call(X, Z), call(Z, X), tp=BOTH)
class OneTrunkTwoShapes(nn.Module):
    """One trunk works on two inputs of other lengths; pooled results meet in a bilinear head."""

    def __init__(self):
        super().__init__()
        trunk = nn.Sequential(Attention(), Mlp())
        self.left, self.right = (
            nn.ModuleDict({"trunk": trunk, "head": nn.Linear(16, 8)}),
            nn.ModuleDict({"trunk": trunk}),
        )
        self.score = nn.Parameter(torch.randn(8, 16) / 4)

    def forward(self, a, b):
        one, two = self.left["trunk"](a).mean(1), self.right["trunk"](b).amax(1)
        return self.left["head"](one) @ self.score @ two.mT


@case(call(X), tp=BOTH)
class FrozenTeacher(nn.Module):
    """A frozen copy of the same blocks teaches hidden values and logits."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(Mlp(), Attention(), nn.Linear(16, 12))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        for p in self.teacher.parameters():
            p.data.mul_(1.3)

    def forward(self, x):
        logits = self.student(x)
        with torch.no_grad():
            wanted = self.teacher(x)
        t = 2.0
        soft = F.kl_div(F.log_softmax(logits / t, -1), F.softmax(wanted / t, -1), reduction="batchmean") * t * t
        inner = F.cosine_embedding_loss(
            self.student[0](x).flatten(0, 1), self.teacher[0](x).detach().flatten(0, 1), torch.ones(x[..., 0].numel())
        )
        return {"loss": soft + inner, "logits": logits}


@case(call(X, X.flip(0)), tp=BOTH, allowed=HOSTILE)
class MomentumTwin(nn.Module):
    """BYOL: the target follows in the forward, in training."""

    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(Mlp(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predict = nn.Linear(8, 8)

    def forward(self, a, b):
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    slow.mul_(0.9).add_(fast, alpha=0.1)
        with torch.no_grad():
            goal = F.normalize(self.target(b), dim=-1)
        return 2 - 2 * (F.normalize(self.predict(self.online(a)), dim=-1) * goal).sum(-1)


@case(call(ids(2, 6), ids(2, 5, seed=1)), tp=BOTH)
class ThreeTied(nn.Module):
    """A table for the encoder, for the decoder and for the logits, which are scaled and biased."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.encode, self.decode, self.cross = Mlp(), Attention(), Attention()
        self.head, self.bias = nn.Linear(16, 32, bias=False), nn.Parameter(torch.randn(32))
        self.head.weight = self.table.weight

    def forward(self, source, target):
        memory = self.encode(self.table(source) * 4)
        y = self.decode(self.table(target) * 4)
        c = self.cross
        q, k, v = parted(c.q(y), 4), parted(c.k(memory), 4), parted(c.v(memory), 4)
        y = y + c.o(joined(F.scaled_dot_product_attention(q, k, v)))
        return self.head(y * 16**-0.5) + self.bias


@case(call(X, Z), tp=BOTH)
class SelfAndCross(nn.Module):
    """The same attention looks at itself, then at the other input, under norms of their own."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))

    def forward(self, x, z):
        x = self.norms[0](x + self.attention(x, x, x, need_weights=False)[0])
        x = self.norms[1](x + self.attention(x, z, z, need_weights=False)[0])
        return self.norms[2](x + self.attention(x, x, z[:, : x.shape[1]], need_weights=False)[0])


@case(call(X), tp=BOTH, sequence=None)
class SharedWithScales(nn.Module):
    """One block, passed three times, each with gains of its own on hidden values."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.gains = nn.ParameterList(nn.Parameter(1 + 0.1 * torch.randn(32)) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))

    def forward(self, x):
        for gain, norm in zip(self.gains, self.norms, strict=True):
            x = x + self.down(F.silu(self.up(norm(x))) * gain)
        return x


@case(call(X), tp=BOTH)
class UpIsDownTransposed(nn.Module):
    """The weight goes up in one place, and comes down, transposed, in another."""

    def __init__(self):
        super().__init__()
        self.w, self.b, self.c = nn.Parameter(torch.randn(32, 16) / 4), nn.Parameter(torch.randn(32)), nn.Linear(16, 16)

    def forward(self, x):
        h = F.linear(x, self.w, self.b).tanh()
        y = self.c(h @ self.w)
        return F.linear(y, self.w).relu() @ self.w


@case(call(X), tp=BOTH, allowed=HOSTILE)
class OneSquareThrice(nn.Module):
    """A square weight maps hidden values onto hidden values, and then comes down as well."""

    def __init__(self):
        super().__init__()
        self.up, self.square, self.down = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = self.square

    def forward(self, x):
        h = self.up(x).relu()
        h = self.square(self.square(h).relu()).relu()
        return self.head(self.down(h))


@case(call(X, ids(2, 6, below=3)), tp=BOTH)
class AdaptersByTask(nn.Module):
    """Low-rank adapters on up and down, mixed by a task id for each token."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.ua, self.ub = nn.Parameter(torch.randn(3, 16, 4) / 4), nn.Parameter(torch.randn(3, 4, 32) / 4)
        self.da, self.db = nn.Parameter(torch.randn(3, 32, 4) / 4), nn.Parameter(torch.randn(3, 4, 16) / 4)

    def forward(self, x, task):
        chosen = F.one_hot(task, 3).to(x.dtype)
        h = self.up(x) + torch.einsum("bld,tdr,trh,blt->blh", x, self.ua, self.ub, chosen)
        h = F.gelu(h)
        return x + self.down(h) + torch.einsum("blh,thr,trd,blt->bld", h, self.da, self.db, chosen)


@case(call(X, floats(2, 5)), tp=BOTH)
class WeightsByContext(nn.Module):
    """A small network makes both weights of a hidden layer, for each sample."""

    def __init__(self):
        super().__init__()
        self.make = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 2 * 16 * 8 + 8))
        self.base = Mlp()

    def forward(self, x, context):
        up, down, bias = self.make(context).split([128, 128, 8], -1)
        h = torch.baddbmm(bias[:, None], x, up.view(-1, 16, 8)).relu()
        return self.base(x) + torch.bmm(h, down.view(-1, 8, 16))


@case(call(X, X.roll(1, 0)), call(X.repeat(2, 1, 1), Z[:, :6].repeat(2, 1, 1)), tp=BOTH)
class TwoTowersMeet(nn.Module):
    """CLIP's loss: towers with an own and a shared layer, a learned temperature, both directions."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.shared = Mlp(), Mlp(), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, x, y):
        u, v = (F.normalize(self.shared(net(z).mean(1)), dim=-1) for net, z in ((self.a, x), (self.b, y)))
        logits = self.scale.exp() * u @ v.T
        goal = torch.arange(len(x))
        return (F.cross_entropy(logits, goal) + F.cross_entropy(logits.T, goal)) / 2, logits


@case(call(X), tp=BOTH)
class MergedInEval(nn.Module):
    """A low-rank change that is added to the weight in eval, and computed beside it in training."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.a, self.b = nn.Parameter(torch.randn(4, 16) / 4), nn.Parameter(torch.randn(32, 4) / 4)

    def forward(self, x):
        if self.training:
            h = self.up(x) + F.linear(F.linear(x, self.a), self.b) * 0.5
        else:
            h = F.linear(x, self.up.weight + 0.5 * self.b @ self.a, self.up.bias)
        return self.down(h.relu())


@case(call(X), tp=BOTH)
class EnsembleOfHeads(nn.Module):
    """Five small heads on one trunk, stacked; the spread of their means is an output."""

    def __init__(self):
        super().__init__()
        self.trunk = Mlp()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(5))

    def forward(self, x):
        out = torch.stack([head(self.trunk(x)) for head in self.heads])
        mean, log = out.unbind(-1)
        return mean.mean(0), (log.exp() + mean**2).mean(0) - mean.mean(0) ** 2


@case(call(X, 1), call(X, 3), call(X, 2), tp=BOTH, inputs={"x": X, "depth": 2}, allowed=HOSTILE)
class SandwichOfSharedBlocks(nn.Module):
    """How often the middle is passed is an argument; the last pass is another module with the same weights."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = Mlp(), Attention(), Mlp()
        self.last.up.weight, self.last.down.weight = self.first.up.weight, self.first.down.weight

    def forward(self, x, depth):
        x = self.first(x)
        for _ in range(depth):
            x = self.middle(x)
        return self.last(x)

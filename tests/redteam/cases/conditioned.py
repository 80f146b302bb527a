"""One input says how another is worked on: generated weights, adapters, memories, slots, gates between streams."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
C = floats(2, 8)
XC = {"x": X, "c": C}
M = floats(2, 5, 16)
XM = {"x": X, "memory": M}
T = torch.tensor([1, 0])
BOTH = (2, 4)


@case(call(X, C), inputs=XC, tp=BOTH)
class FilmOfHidden(Mlp):
    """The condition scales and shifts hidden units."""

    def __init__(self):
        super().__init__()
        self.film = nn.Linear(8, 64)

    def forward(self, x, c):
        scale, shift = self.film(c)[:, None].chunk(2, -1)
        return x + self.down(((1 + scale) * self.up(x) + shift).relu())


@case(call(X, C), inputs=XC, tp=BOTH)
class WeightsOfEachRow(Mlp):
    """A hypernetwork makes a low-rank change of the hidden layer for each row of the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(8, 64)

    def forward(self, x, c):
        a, b = self.a(c).view(-1, 16, 2), self.b(c).view(-1, 2, 32)
        return x + self.down((self.up(x) + x @ a @ b).relu())


@case(call(X, C), inputs=XC, tp=BOTH)
class WholeWeightGenerated(nn.Module):
    """All of a hidden layer comes from the condition, by bmm."""

    def __init__(self):
        super().__init__()
        self.make, self.down = nn.Linear(8, 16 * 32), nn.Linear(32, 16)

    def forward(self, x, c):
        w = self.make(c).view(-1, 16, 32) / 4
        return x + self.down(torch.bmm(x, w).relu())


@case(call(X, C), inputs=XC, tp=BOTH)
class MixtureOfWeights(nn.Module):
    """CondConv: weights are mixed for each row, before they are used."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.gate = (
            nn.Parameter(torch.randn(3, 32, 16) / 4),
            nn.Parameter(torch.randn(3, 16, 32) / 6),
            nn.Linear(8, 3),
        )

    def forward(self, x, c):
        g = self.gate(c).sigmoid()
        up, down = (torch.einsum("be,eij->bij", g, w) for w in (self.up, self.down))
        return x + (x @ up.mT).relu() @ down.mT


@case(call(X, T), inputs={"x": X, "task": T}, tp=BOTH, vary=False)
class AdaptersByTask(Mlp):
    """Rows of a batch use different LoRA pairs, picked by index out of stacked weights."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 2, 16) / 4), nn.Parameter(torch.randn(3, 32, 2) / 2)

    def forward(self, x, task):
        extra = torch.einsum("btr,bor->bto", torch.einsum("btd,brd->btr", x, self.a[task]), self.b[task])
        return x + self.down(F.gelu(self.up(x) + 2.0 * extra))


@case(call(X), tp=BOTH)
class Houlsby(nn.Module):
    """Bottleneck adapters behind frozen layers, a residual each."""

    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention().requires_grad_(False), Mlp().requires_grad_(False)
        self.a, self.b, self.c, self.d = nn.Linear(16, 4), nn.Linear(4, 16), nn.Linear(16, 4), nn.Linear(4, 16)

    def forward(self, x):
        y = self.attention.o(self.attention.mixed(x))
        x = x + y + self.b(self.a(y).relu())
        y = self.mlp.down(self.mlp.inner(x))
        return x + y + self.d(self.c(y).relu())


@case(call(X), tp=BOTH)
class ScaledActivations(nn.Module):
    """IA3: learned vectors on keys, values and hidden units; all else is frozen."""

    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention().requires_grad_(False), Mlp().requires_grad_(False)
        self.k, self.v, self.h = (nn.Parameter(torch.rand(n) + 0.5) for n in (16, 16, 32))

    def forward(self, x):
        a = self.attention
        q, k, v = parted(a.q(x), 4), parted(a.k(x) * self.k, 4), parted(a.v(x) * self.v, 4)
        x = x + a.o(joined(F.scaled_dot_product_attention(q, k, v)))
        return x + self.mlp.down(self.mlp.inner(x) * self.h)


@case(call(X), tp=BOTH)
class RotatedWeights(nn.Module):
    """OFT: blocks of a Cayley transform turn the inputs of a frozen layer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32).requires_grad_(False), nn.Linear(32, 16).requires_grad_(False)
        self.skew = nn.Parameter(torch.randn(8, 4, 4) / 4)

    def forward(self, x):
        s = self.skew - self.skew.mT
        eye = torch.eye(4, dtype=x.dtype)
        turn = torch.linalg.solve(eye + s, eye - s)
        w = torch.block_diag(*turn)
        return x + F.linear(self.up(x).relu(), self.down.weight @ w, self.down.bias)


@case(call(X), tp=BOTH)
class VectorBankAdapter(Mlp):
    """VeRA: shared frozen random matrices in buffers, sliced to size, with learned vectors."""

    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.randn(4, 64) / 4)
        self.register_buffer("b", torch.randn(64, 4) / 4)
        self.d, self.e = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(32))

    def inner(self, x):
        low = F.linear(x, self.a[:, : x.shape[-1]]) * self.d
        return (self.up(x) + F.linear(low, self.b[:32]) * self.e).relu()


@case(call(X, M), inputs=XM, tp=BOTH)
class TanhGatedCross(nn.Module):
    """Flamingo: cross attention and MLP behind tanh gates that start at zero."""

    def __init__(self):
        super().__init__()
        self.own, self.q, self.kv, self.o, self.mlp = (
            Attention(),
            nn.Linear(16, 16),
            nn.Linear(16, 32),
            nn.Linear(16, 16),
            Mlp(),
        )
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x, memory):
        k, v = self.kv(memory).chunk(2, -1)
        y = F.scaled_dot_product_attention(parted(self.q(x), 4), parted(k, 4), parted(v, 4))
        x = x + self.a.tanh() * self.o(joined(y))
        x = x + self.b.tanh() * (self.mlp(x) - x)
        return self.own(x)


@case(call(X), tp=BOTH)
class Resampler(nn.Module):
    """Perceiver: latents read inputs and themselves in one softmax."""

    def __init__(self):
        super().__init__()
        self.latents, self.q, self.kv, self.o = (
            nn.Parameter(torch.randn(3, 16)),
            nn.Linear(16, 16),
            nn.Linear(16, 32),
            nn.Linear(16, 16),
        )
        self.mlp = Mlp()

    def forward(self, x):
        z = self.latents.expand(x.shape[0], -1, -1)
        for _ in range(2):
            k, v = self.kv(torch.cat([x, z], 1)).chunk(2, -1)
            z = z + self.o(joined(F.scaled_dot_product_attention(parted(self.q(z), 4), parted(k, 4), parted(v, 4))))
            z = self.mlp(z)
        return z


@case(call(X), tp=BOTH, vary=False)
class Slots(nn.Module):
    """Slot attention: a softmax over slots, weights normed over inputs, a GRU cell moves slots."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.randn(3, 16))
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.cell, self.mlp, self.norm = nn.GRUCell(16, 16), Mlp(), nn.LayerNorm(16)

    def forward(self, x):
        k, v, s = self.k(x), self.v(x), self.start.expand(len(x), -1, -1)
        for _ in range(2):
            p = (self.q(self.norm(s)) @ k.mT / 4).softmax(1) + 1e-8
            u = (p / p.sum(-1, keepdim=True)) @ v
            s = self.cell(u.flatten(0, 1), s.flatten(0, 1)).view_as(s)
            s = self.mlp(s)
        return s, p


@case(call(X), tp=BOTH, vary=False)
class NeuralTuring(nn.Module):
    """A memory that is addressed by content, written by erasing and adding, read each step."""

    def __init__(self):
        super().__init__()
        self.cell, self.head, self.out = nn.LSTMCell(20, 32), nn.Linear(32, 13), nn.Linear(36, 16)
        self.memory = nn.Parameter(torch.randn(8, 4))

    def forward(self, x):
        b = x.shape[0]
        m, read = self.memory.expand(b, -1, -1), x.new_zeros(b, 4)
        state, out = (x.new_zeros(b, 32), x.new_zeros(b, 32)), []
        for t in range(x.shape[1]):
            state = self.cell(torch.cat([x[:, t], read], -1), state)
            key, erase, add, sharp = self.head(state[0]).split([4, 4, 4, 1], -1)
            w = (F.cosine_similarity(m, key[:, None], dim=-1) * F.softplus(sharp)).softmax(-1)[..., None]
            m = m * (1 - w * erase.sigmoid()[:, None]) + w * add.tanh()[:, None]
            read = (w * m).sum(1)
            out.append(self.out(torch.cat([state[0], read], -1)))
        return torch.stack(out, 1)


@case(call(X), tp=BOTH)
class InducedSets(nn.Module):
    """Set transformer: induced points, pooled by attention, no order."""

    def __init__(self):
        super().__init__()
        self.points, self.seed = nn.Parameter(torch.randn(1, 3, 16)), nn.Parameter(torch.randn(1, 1, 16))
        self.a, self.b, self.c = (nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(3))
        self.mlp = Mlp()

    def forward(self, x):
        h, _ = self.a(self.points.expand(len(x), -1, -1), x, x, need_weights=False)
        x = self.mlp(x + self.b(x, h, h, need_weights=False)[0])
        return self.c(self.seed.repeat(len(x), 1, 1), x, x)[0].squeeze(1)


@case(call(X), tp=BOTH)
class RoutedCapsules(nn.Module):
    """Capsules: votes by einsum, three rounds of agreement, squashed."""

    def __init__(self):
        super().__init__()
        self.vote = nn.Parameter(torch.randn(4, 4, 4, 8) / 2)

    def squash(self, s):
        n = s.pow(2).sum(-1, keepdim=True)
        return n / (1 + n) * s / (n + 1e-8).sqrt()

    def forward(self, x):
        u = torch.einsum("btid,ijde->btije", self.squash(x.unflatten(-1, (4, 4))), self.vote)
        logit = torch.zeros_like(u[..., 0])
        for turn in range(3):
            v = self.squash((logit.softmax(-1)[..., None] * u).sum(2))
            if turn < 2:
                logit = logit + (u * v[:, :, None]).sum(-1)
        return v.flatten(2)


@case(call(X), tp=BOTH, allowed=HOSTILE)
class Hopfield(nn.Module):
    """Stored patterns are the same weight in keys and in values; two steps of retrieval."""

    def __init__(self):
        super().__init__()
        self.q, self.store = nn.Linear(16, 16), nn.Parameter(torch.randn(32, 16) / 2)

    def forward(self, x):
        s = self.q(x)
        for _ in range(2):
            s = (s @ self.store.T).softmax(-1) @ self.store
        return x + s


@case(call(X, C), inputs=XC, tp=BOTH)
class GatedBranches(nn.Module):
    """Highway, and a choice between three branches by a softmax of the condition."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.gate, self.pick = Mlp(), Attention(), nn.Linear(16, 16), nn.Linear(8, 3)

    def forward(self, x, c):
        w = self.pick(c).softmax(-1)[:, :, None, None]
        y = torch.stack([self.a(x), self.b(x), x.flip(-1)], 1)
        g = self.gate(x).sigmoid()
        return g * (w * y).sum(1) + (1 - g) * x


@case(call(ids(2, 6), T), inputs={"input_ids": ids(2, 6), "task": T}, tp=BOTH, sequence=None, vary=False)
class PromptsOfTasks(nn.Module):
    """Prompts of a task are put before the tokens, and cut off before the head, tied to the table."""

    def __init__(self):
        super().__init__()
        self.table, self.prompts = nn.Embedding(32, 16), nn.Embedding(3, 32)
        self.block, self.mlp, self.norm = Attention(), Mlp(), nn.LayerNorm(16)

    def forward(self, input_ids, task):
        x = torch.cat([self.prompts(task).view(-1, 2, 16), self.table(input_ids) * 4.0], 1)
        x = self.norm(self.mlp(self.block(x)))[:, 2:]
        return F.linear(x, self.table.weight) / 4

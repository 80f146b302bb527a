"""Mixtures of experts as they are written: biases that training moves, choices by expert, groups, noise, capacities."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)


class Experts(nn.Module):
    """Eight experts in stacked weights, two a token; `route` gives weights and indices."""

    def __init__(self, count=8, hidden=8):
        super().__init__()
        self.count = count
        self.router = nn.Linear(16, count, bias=False)
        self.gate_up = nn.Parameter(torch.randn(count, 16, 2 * hidden) / 4)
        self.down = nn.Parameter(torch.randn(count, hidden, 16) / 3)

    def route(self, flat):
        weight, index = self.router(flat).softmax(-1).topk(2, -1)
        return weight / weight.sum(-1, keepdim=True), index

    def expert(self, n, t):
        gate, up = (t @ self.gate_up[n]).chunk(2, -1)
        return (F.silu(gate) * up) @ self.down[n]

    def forward(self, x):
        flat = x.reshape(-1, 16)
        weight, index = self.route(flat)
        out = torch.zeros_like(flat)
        for n in range(self.count):
            token, place = (index == n).nonzero(as_tuple=True)
            if token.numel():
                out.index_add_(0, token, self.expert(n, flat[token]) * weight[token, place, None])
        return x + out.view_as(x)


@case(call(X), call(X, _train=True))
class BiasMovedInTraining(Experts):
    """DeepSeek's balance without a loss: a buffer is moved by the load of each expert in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.zeros(8))

    def route(self, flat):
        score = self.router(flat).sigmoid()
        index = (score + self.bias).topk(2, -1).indices
        if self.training:
            with torch.no_grad():
                load = torch.bincount(index.flatten(), minlength=self.count).to(self.bias.dtype)
                self.bias += 0.01 * torch.sign(load.mean() - load)
        weight = score.gather(1, index)
        return weight / weight.sum(-1, keepdim=True), index


@case(call(X))
class GroupLimited(Experts):
    """The best groups of experts first, then the best experts in them."""

    def route(self, flat):
        score = self.router(flat).sigmoid()
        group = score.view(-1, 4, 2).sum(-1).topk(2, -1).indices
        mask = torch.zeros(flat.shape[0], 4).scatter_(1, group, 1.0)[..., None].expand(-1, -1, 2).reshape(-1, 8)
        weight, index = score.masked_fill(mask == 0, 0.0).topk(2, -1)
        return weight, index


@case(call(X))
class ExpertChoice(Experts):
    """Each expert picks its tokens."""

    def forward(self, x):
        flat = x.reshape(-1, 16)
        p = self.router(flat).softmax(-1)
        weight, token = p.t().topk(3, -1)
        picked = flat[token]
        gate, up = torch.bmm(picked, self.gate_up).chunk(2, -1)
        y = torch.bmm(F.silu(gate) * up, self.down) * weight[..., None]
        return x + torch.zeros_like(flat).index_add(0, token.flatten(), y.flatten(0, 1)).view_as(x)


@case(call(X), vary=False)
class SoftSlots(Experts):
    """Soft MoE: slots are mixtures of tokens."""

    def forward(self, x):
        z = self.router(x)
        slots = torch.einsum("bte,btd->bed", z.softmax(1), x)
        gate, up = torch.einsum("bed,edh->beh", slots, self.gate_up).chunk(2, -1)
        y = torch.einsum("beh,ehd->bed", F.silu(gate) * up, self.down)
        return x + torch.einsum("bte,bed->btd", z.softmax(-1), y)


@case(call(X), call(X, _train=True))
class BalanceLoss(Experts):
    """Returns the switch loss and the z-loss of its router."""

    def forward(self, x):
        z = self.router(x.reshape(-1, 16))
        p = z.softmax(-1)
        share = F.one_hot(z.argmax(-1), 8).to(p.dtype).mean(0)
        return super().forward(x), 8 * (share * p.mean(0)).sum(), z.logsumexp(-1).pow(2).mean()


@case(call(X))
class SortedDispatch(Experts):
    """Tokens are sorted by expert, and worked on in runs (torchtitan's)."""

    def forward(self, x):
        flat = x.reshape(-1, 16)
        weight, index = self.route(flat)
        order = index.flatten().argsort(stable=True)
        counts = torch.bincount(index.flatten(), minlength=8).tolist()
        rows = flat[order // 2]
        y = torch.cat([self.expert(n, part) for n, part in enumerate(rows.split(counts))])
        y = y * weight.flatten()[order, None]
        return x + torch.zeros_like(flat).scatter_add(0, (order // 2)[:, None].expand(-1, 16), y).view_as(x)


@case(call(X))
class SharedAndRouted(nn.Module):
    """A shared expert with a gate of its own beside the routed ones."""

    def __init__(self):
        super().__init__()
        self.routed, self.shared, self.gate = Experts(), Mlp(), nn.Linear(16, 1)

    def forward(self, x):
        return self.routed(x) + self.gate(x).sigmoid() * self.shared.down(self.shared.inner(x))


@case(call(X))
class WithNothingExperts(Experts):
    """Two more choices do nothing: the token itself and zero."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 10, bias=False)

    def forward(self, x):
        flat = x.reshape(-1, 16)
        weight, index = self.route(flat)
        out = (weight * (index == 8)).sum(-1, keepdim=True) * flat
        for n in range(8):
            token, place = torch.where(index == n)
            out = out.index_add(0, token, self.expert(n, flat[token]) * weight[token, place, None])
        return x + out.view_as(x)


@case(call(X), vary=False)
class MixtureOfDepths(nn.Module):
    """A router picks the tokens that go through the block, and weighs what comes out."""

    def __init__(self):
        super().__init__()
        self.router, self.block = nn.Linear(16, 1), Attention()

    def forward(self, x):
        weight, index = self.router(x).squeeze(-1).topk(3, 1)
        index, order = index.sort(1)
        spread = index[..., None].expand(-1, -1, 16)
        y = self.block.o(self.block.mixed(x.gather(1, spread))) * weight.gather(1, order)[..., None]
        return x.scatter_add(1, spread, y)


@case(call(X), allowed=HOSTILE)
class HeadsAsExperts(Attention):
    """Mixture of heads: a token uses the best two heads."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, self.heads)

    def mixed(self, x):
        p = self.router(x).softmax(-1)
        best = p.topk(2, -1).indices
        mask = torch.zeros_like(p).scatter(-1, best, 1.0)
        y = torch.softmax(self.scores(x), -1) @ parted(self.v(x), self.heads)
        return joined(y * (p * mask).transpose(1, 2)[..., None])


@case(call(X))
class Sinkhorn(Experts):
    """Router weights are balanced by a few rounds of normalising rows and columns."""

    def route(self, flat):
        z = self.router(flat)
        with torch.no_grad():
            p = z.exp()
            for _ in range(3):
                p = p / p.sum(0, keepdim=True)
                p = p / p.sum(1, keepdim=True)
            index = p.topk(2, -1).indices
        return z.sigmoid().gather(1, index), index


@case(call(X))
class SmallFirst(nn.Module):
    """Experts of different sizes in a ModuleList."""

    def __init__(self):
        super().__init__()
        self.experts, self.router = nn.ModuleList([Mlp(16, 8 * n) for n in (1, 2, 4)]), nn.Linear(16, 3)

    def forward(self, x):
        p = self.router(x).softmax(-1)
        return sum(p[..., n, None] * expert(x) for n, expert in enumerate(self.experts))


@case(call(X))
class ProductKeys(nn.Module):
    """A memory of values that is read by products of two halves of keys."""

    def __init__(self):
        super().__init__()
        self.query, self.keys = nn.Linear(16, 16), nn.Parameter(torch.randn(2, 6, 8))
        self.values, self.down = nn.Embedding(36, 16), nn.Linear(16, 16)

    def forward(self, x):
        a, b = self.query(x).chunk(2, -1)
        (wa, ia), (wb, ib) = ((q @ k.t()).topk(2, -1) for q, k in zip((a, b), self.keys, strict=True))
        weight = (wa[..., :, None] + wb[..., None, :]).flatten(-2)
        index = (ia[..., :, None] * 6 + ib[..., None, :]).flatten(-2)
        best, place = weight.topk(3, -1)
        rows = self.values(index.gather(-1, place))
        return x + self.down((best.softmax(-1)[..., None] * rows).sum(-2))


@case(call(X))
class HashRouted(Experts):
    """Experts by position: no router."""

    def route(self, flat):
        index = torch.arange(flat.shape[0])[:, None] % 8
        return flat.new_ones(flat.shape[0], 1) + 0 * self.router(flat).sum(-1, keepdim=True), index


class OneExpertChosen(nn.Module):
    """A list of experts, of which tokens choose one; in training those without a token are `kept` in the graph."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16)) for _ in range(4)
        )  # fmt: skip
        with torch.no_grad():
            self.gate.bias[2] += 9.0

    def forward(self, x):
        flat = x.reshape(-1, 16)
        weight, index = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            token = (index == n).nonzero().flatten()
            if token.numel():
                out.index_add_(0, token, expert(flat[token]) * weight[token, None])
            elif self.training:
                out = self.kept(out, expert)
        return x + out.view_as(x)


@case(call(X), call(X, _train=True), call(9.0 * X, _train=True))
class IdleExpertsTimesZero(OneExpertChosen):
    """As minimind and others write it, so that every parameter has a gradient: zero."""

    def kept(self, out, expert):
        out[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
        return out


@case(call(X), call(X, _train=True))
class IdleExpertsDecay(OneExpertChosen):
    """What is read of experts without tokens counts."""

    def kept(self, out, expert):
        return out + 0.01 * sum(p.square().sum() for p in expert.parameters())


@case(call(X), call(X, _train=True))
class IdleExpertsTimesZeroAndMore(OneExpertChosen):
    """One reading is multiplied by zero, another is not."""

    def kept(self, out, expert):
        total = sum(p.sum() for p in expert.parameters())
        return out + 0 * total + 0.01 * total.tanh()

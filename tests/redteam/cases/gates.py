"""Computation that adapts: early exits, halting, routers with capacity, skipped layers, trees, pruned tokens."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp

X = floats(2, 6, 16)
BOTH = (2, 4)


class Experts(nn.Module):
    """Four experts in one tensor each; `route` says which tokens they get, with which weights."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.up, self.down = nn.Parameter(floats(4, 16, 32) * 0.2), nn.Parameter(floats(4, 32, 16, seed=1) * 0.2)

    def expert(self, x, n):
        return F.silu(x @ self.up[n]) @ self.down[n]

    def forward(self, x):
        flat = x.flatten(0, 1)
        return x + self.mixed(flat, self.router(flat)).view_as(x)


@case(call(X), tp=BOTH)
class Capacity(Experts):
    """Switch: tokens beyond an expert's capacity are dropped; an auxiliary loss is kept out."""

    def mixed(self, x, z):
        p, at = z.softmax(-1).max(-1)
        mask = F.one_hot(at, 4)
        place = mask.cumsum(0) * mask
        mask = mask * (place <= 4)
        slots = F.one_hot((place.sum(-1) - 1).clamp(min=0), 12)[..., :4].to(x.dtype) * mask.any(-1, keepdim=True)
        dispatch = mask[..., None].to(x.dtype) * slots[:, None]
        rows = torch.einsum("tec,td->ecd", dispatch, x)
        out = torch.bmm(F.silu(torch.bmm(rows, self.up)), self.down)
        return torch.einsum("tec,ecd->td", dispatch * p[:, None, None], out)


@case(call(X), tp=BOTH)
class SoftSlots(Experts):
    """Soft MoE: slots are mixtures of all tokens."""

    def mixed(self, x, z):
        slots = z.softmax(0).T @ x
        out = torch.einsum("eh,ehd->ed", F.silu(torch.einsum("ed,edh->eh", slots, self.up)), self.down)
        return z.softmax(-1) @ out


@case(call(X), tp=BOTH)
class SortedByExpert(Experts):
    """Tokens are sorted by their expert and worked on in pieces whose lengths are read from tensors."""

    def mixed(self, x, z):
        p, at = z.softmax(-1).topk(2, -1)
        order = at.flatten().argsort(stable=True)
        count = torch.bincount(at.flatten(), minlength=4).tolist()
        rows = x[order // 2].split(count)
        out = torch.cat([self.expert(part, n) for n, part in enumerate(rows)])
        return x.new_zeros(x.shape).index_add(0, order // 2, out * p.flatten()[order][:, None])


@case(call(X), tp=BOTH)
class SigmoidRouter(Experts):
    """Every expert by a sigmoid of its own, normalised over those above a limit."""

    def mixed(self, x, z):
        p = z.sigmoid()
        p = torch.where(p > 0.4, p, 0)
        p = p / p.sum(-1, keepdim=True).clamp(min=1e-6)
        return sum(p[:, n, None] * self.expert(x, n) for n in range(4))


@case(call(X), tp=BOTH)
class HashRouter(Experts):
    """The expert of a token follows from its place."""

    def mixed(self, x, z):
        at = torch.arange(x.shape[0]) % 4
        return torch.einsum("th,thd->td", F.silu(torch.einsum("td,tdh->th", x, self.up[at])), self.down[at]) * z.mean()


@case(call(X), tp=BOTH)
class BalancedAndZLoss(Experts):
    def forward(self, x):
        flat = x.flatten(0, 1)
        z = self.router(flat)
        p = z.softmax(-1)
        share = F.one_hot(p.argmax(-1), 4).to(x.dtype).mean(0)
        out = sum(p[:, n, None] * self.expert(flat, n) for n in range(4))
        return x + out.view_as(x), 4 * (share * p.mean(0)).sum(), z.logsumexp(-1).pow(2).mean()


@case(call(X), tp=BOTH)
class RouterOnHidden(nn.Module):
    """Blocks of hidden units are experts: the units themselves say which of them run."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        h = self.up(x).relu().unflatten(-1, (8, 4))
        size = h.norm(dim=-1)
        keep = size >= size.topk(3, -1).values[..., -1:]
        return x + self.down((h * keep[..., None]).flatten(-2))


@case(call(X), tp=BOTH)
class Halting(nn.Module):
    """ACT: each token halts when its probabilities reach one; the loop goes on while one is left."""

    def __init__(self):
        super().__init__()
        self.block, self.halt = Mlp(), nn.Linear(16, 1)

    def forward(self, x):
        total, left, out = x.new_zeros(x.shape[:2]), torch.ones_like(x[..., 0]), torch.zeros_like(x)
        for step in range(6):
            x = self.block(x)
            p = self.halt(x).sigmoid()[..., 0] * 0.5 + 0.2
            p = torch.where(total + p > 0.99, left, p) if step < 5 else left
            out, total, left = out + p[..., None] * x, total + p, (left - p).clamp(min=0)
            if left.max() <= 0:
                break
        return out, total


@case(call(X), tp=BOTH)
class ExitWhenSure(nn.Module):
    """It leaves when its classifier is sure."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Mlp() for _ in range(3)), nn.Linear(16, 5)

    def forward(self, x):
        for n, block in enumerate(self.blocks):
            x = block(x)
            z = self.head(x.mean(1))
            if not self.training and z.softmax(-1).amax(-1).min() > 0.3:
                return z, n
        return z, n


@case(call(X), tp=BOTH)
class PatienceOfExits(nn.Module):
    """It leaves when two classifiers in a row agree."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(16, 5) for _ in range(4))

    def forward(self, x):
        last, found = None, []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            found.append(head(x.mean(1)))
            now = found[-1].argmax(-1)
            if last is not None and bool((now == last).all()):
                break
            last = now
        return found


@case(call(X), tp=BOTH)
class SkippedByGate(nn.Module):
    """A block runs if a gate is above a half for any of the batch."""

    def __init__(self):
        super().__init__()
        self.gate, self.blocks = nn.ModuleList(nn.Linear(16, 1) for _ in range(2)), nn.ModuleList([Attention(), Mlp()])

    def forward(self, x):
        for gate, block in zip(self.gate, self.blocks, strict=True):
            g = gate(x.mean(1)).sigmoid()[:, None]
            if (g > 0.5).any():
                x = x + g * (block(x) - x)
        return x


@case(call(X), tp=BOTH)
class TokensPruned(nn.Module):
    """After the first block the tokens of lowest attention are merged into one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Attention(), Mlp()

    def forward(self, x):
        score = self.a.scores(x).softmax(-1).mean((1, 2))
        x = self.a(x)
        order = score.argsort(-1, descending=True)
        kept = x.gather(1, order[:, :3, None].expand(-1, -1, 16).sort(1).values)
        rest = x.gather(1, order[:, 3:, None].expand(-1, -1, 16))
        weight = score.gather(1, order[:, 3:]).softmax(-1)
        return self.b(torch.cat([kept, (weight[..., None] * rest).sum(1, keepdim=True)], 1))


@case(call(X), tp=BOTH)
class TokensMerged(nn.Module):
    """ToMe: the keys, averaged over heads, say which tokens are alike."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Attention(), Mlp()

    def forward(self, x):
        k = self.a.k(x).view(*x.shape[:2], 4, 4).mean(2)
        x = self.a(x)
        k = F.normalize(k, dim=-1)
        best = (k[:, ::2] @ k[:, 1::2].mT).max(-1)
        low = best.values.argsort(-1)
        a, b = x[:, ::2], x[:, 1::2]
        src = a.gather(1, low[:, -1:, None].expand(-1, -1, 16))
        dst = best.indices.gather(1, low[:, -1:])[..., None].expand(-1, -1, 16)
        b = b.scatter_reduce(1, dst, src, "mean")
        return self.b(torch.cat([a.gather(1, low[:, :-1, None].expand(-1, -1, 16)), b], 1))


@case(call(X), tp=BOTH)
class BinaryTree(nn.Module):
    """Fast feed-forward: a path of hard decisions, each a unit of its own, chooses a leaf."""

    def __init__(self):
        super().__init__()
        self.node, self.leaf, self.out = nn.Linear(16, 7), nn.Parameter(floats(8, 16, 8) * 0.3), nn.Linear(8, 16)

    def forward(self, x):
        z = self.node(x)
        at = torch.zeros_like(z[..., 0], dtype=torch.long)
        for depth in range(3):
            right = z.gather(-1, (2**depth - 1 + at)[..., None])[..., 0] > 0
            at = 2 * at + right.long()
        return x + self.out(torch.einsum("btd,btdh->bth", x, self.leaf[at]).relu())


@case(call(X), tp=BOTH)
class SoftTree(nn.Module):
    """Hierarchical mixtures: leaves are weighted by products of sigmoids."""

    def __init__(self):
        super().__init__()
        self.node, self.leaf = nn.Linear(16, 7), nn.Linear(16, 8 * 16)

    def forward(self, x):
        g, p = self.node(x).sigmoid(), torch.ones_like(x[..., :1])
        begin = 0
        for depth in range(3):
            part = g[..., begin : begin + 2**depth]
            p = torch.stack([p * part, p * (1 - part)], -1).flatten(-2)
            begin += 2**depth
        return x + (p[..., None] * self.leaf(x).unflatten(-1, (8, 16))).sum(-2)


@case(call(X), tp=BOTH, allowed=HOSTILE)
class WidthByInput(nn.Module):
    """Slimmable: how many hidden units take part is said by the input's length."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        n = 32 if x.shape[1] > 5 else 16
        h = F.linear(x, self.up.weight[:n], self.up.bias[:n]).relu()
        return x + F.linear(h, self.down.weight[:, :n], self.down.bias)


@case(call(X), tp=BOTH)
class NestedWidths(nn.Module):
    """Matryoshka: heads on the first 4, 8 and 16 values of what is embedded."""

    def __init__(self):
        super().__init__()
        self.up, self.heads = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), nn.Linear(16, 8)

    def forward(self, x):
        h = self.up(x)
        return [
            F.linear(F.normalize(h[..., :n], dim=-1), self.heads.weight[:, :n], self.heads.bias) for n in (4, 8, 16)
        ]


@case(call(X), tp=BOTH)
class FixedPointUntil(nn.Module):
    """Iterates until the change is small, without gradient, then one step with it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        with torch.no_grad():
            self.up.weight.mul_(0.5)

    def step(self, z, x):
        return 0.5 * self.down(torch.tanh(self.up(z))) + x

    def forward(self, x):
        z, turns = torch.zeros_like(x), 0
        with torch.no_grad():
            while turns < 30:
                new = self.step(z, x)
                turns += 1
                if (new - z).norm() < 1e-3:
                    break
                z = new
        return self.step(z, x), turns


@case(call(X), tp=BOTH)
class StraightThrough(nn.Module):
    """Hard gates of units, straight through, with a penalty on how many are on."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        p = self.gate(x).sigmoid()
        hard = (p > 0.5).to(x.dtype) + p - p.detach()
        return x + self.down(self.up(x).relu() * hard), (p.mean() - 0.3).pow(2)

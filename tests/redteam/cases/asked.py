"""Gradients that are asked for by weights, after layers have used them; hooks on weights, set in a forward."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Mlp

X = floats(2, 6, 16)
T = ids(2, 6, below=40)


class Shared(nn.Module):
    """A trunk, and two tasks behind it."""

    def __init__(self):
        super().__init__()
        self.trunk, self.last, self.one, self.two = Mlp(), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def losses(self, x):
        h = torch.tanh(self.last(self.trunk(x)))
        return (self.one(h) - x).pow(2).mean(), self.two(h).logsumexp(-1).mean()


@case(call(X), tp=(2, 4))
class RatioOfGradients(Shared):
    """VQGAN: the second loss is weighed by how large its gradient is at the last shared weight."""

    def forward(self, x):
        a, b = self.losses(x)
        if not torch.is_grad_enabled():
            return a + b
        last = self.last.weight
        ga, gb = (torch.autograd.grad(loss, last, retain_graph=True)[0] for loss in (a, b))
        weight = (ga.norm() / (gb.norm() + 1e-4)).clamp(0.0, 1e4).detach()
        return a + 0.8 * weight * b, weight


@case(call(X), tp=(2, 4))
class RatioAtHidden(Shared):
    """The same at a weight whose rows ranks hold."""

    def forward(self, x):
        a, b = self.losses(x)
        if not torch.is_grad_enabled():
            return a + b
        up = self.trunk.up.weight
        ga, gb = (torch.autograd.grad(loss, up, retain_graph=True)[0] for loss in (a, b))
        return a + (ga.norm() / (gb.norm() + 1e-4)).detach() * b


@case(call(X), tp=(2, 4))
class CosineAtDown(Shared):
    """Tasks that pull a weight apart are weighed down; the weight's columns are a rank's."""

    def forward(self, x):
        a, b = self.losses(x)
        if not torch.is_grad_enabled():
            return a + b
        ga, gb = (torch.autograd.grad(loss, self.trunk.down.weight, retain_graph=True)[0] for loss in (a, b))
        return a + (1 + F.cosine_similarity(ga.flatten(), gb.flatten(), dim=0)).detach() * b


@case(call(X), tp=(2, 4))
class PenaltyAtBias(Shared):
    """Gradients by biases, once more differentiable."""

    def forward(self, x):
        a, b = self.losses(x)
        if not torch.is_grad_enabled():
            return a + b
        wanted = [self.last.bias, self.trunk.up.bias]
        gs = torch.autograd.grad(a, wanted, create_graph=True)
        return a + b + sum(g.pow(2).sum() for g in gs)


@case(call(T), tp=(2, 4))
class TiedTableAsked(nn.Module):
    """Adversarial training of embeddings: the gradient by a table that the head shares."""

    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(40, 16), Mlp(), nn.Linear(16, 40, bias=False)
        self.head.weight = self.table.weight

    def run(self, e):
        return self.head(e + self.body(e))

    def forward(self, t):
        logits = self.run(self.table(t))
        if not torch.is_grad_enabled():
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), t.flatten())
        (g,) = torch.autograd.grad(loss, self.table.weight, retain_graph=True)
        worse = self.run(F.embedding(t, self.table.weight + 0.1 * g / (g.norm() + 1e-6)))
        return logits, loss + F.cross_entropy(worse.flatten(0, 1), t.flatten())


@case(call(X), tp=(2, 4))
class FrozenInBetween(nn.Module):
    """A critic is frozen for the second term, and thawed."""

    def __init__(self):
        super().__init__()
        self.maker, self.critic = Mlp(), Mlp()

    def forward(self, x):
        made = self.maker(x)
        first = self.critic(made.detach()).mean() - self.critic(x).mean()
        for p in self.critic.parameters():
            p.requires_grad_(False)
        second = -self.critic(made).mean()
        for p in self.critic.parameters():
            p.requires_grad_(True)
        return first, second


@case(call(X), tp=(2, 4))
class StepsInside(nn.Module):
    """Weights are read, changed in place without gradients, and read again, in one call."""

    def __init__(self):
        super().__init__()
        self.a, self.out = Mlp(), nn.Linear(16, 16)

    def forward(self, x):
        y = self.a(x).detach()
        if self.training:
            with torch.no_grad():
                self.a.up.weight.mul_(0.99)
        return self.out(self.a(x) + y)


@case(call(X), tp=(2, 4))
class TwoBackwardsInside(nn.Module):
    """Test-time training: a head learns from its own loss twice before it answers; its weights come back."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Mlp(), Mlp()

    def forward(self, x):
        h = self.body(x)
        if not torch.is_grad_enabled():
            return self.head(h)
        w = self.head.down.weight
        for _ in range(2):
            loss = (F.linear(self.head.inner(h.detach()), w) - x).pow(2).mean()
            w = w - 0.1 * torch.autograd.grad(loss, w, create_graph=True)[0]
        return F.linear(self.head.inner(h), w), self.head(h)


@case(call(X), tp=(2, 4))
class CheckpointedAndAsked(Shared):
    """The trunk is recomputed, and a gradient is asked for by its last weight."""

    def forward(self, x):
        h = torch.tanh(self.last(checkpoint(self.trunk, x, use_reentrant=False)))
        a, b = (self.one(h) - x).pow(2).mean(), self.two(h).logsumexp(-1).mean()
        if not torch.is_grad_enabled():
            return a + b
        g = torch.autograd.grad(b, self.last.weight, retain_graph=True)[0]
        return a + b / (g.norm() + 1.0).detach()


@case(call(X), tp=(2, 4))
class GainOfHeadsAsked(nn.Module):
    """A gain of each head's width, used on all heads: its gradient is a sum over ranks."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.norm = nn.RMSNorm(4)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (p(x).view(b, n, 4, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = self.o(F.scaled_dot_product_attention(self.norm(q), self.norm(k), v).transpose(1, 2).reshape(b, n, 16))
        loss = (y - x).pow(2).mean()
        if not torch.is_grad_enabled():
            return y, loss
        g = torch.autograd.grad(loss, self.norm.weight, retain_graph=True)[0]
        return y, loss * (1 + g.norm().detach())


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class HookedEachTime(Shared):
    """Each call sets one more hook on a weight."""

    def forward(self, x):
        w = self.last.weight
        if w.requires_grad:
            w.register_hook(lambda g: g * 0.5)
        a, b = self.losses(x)
        return a + b + (self.last.weight * w).sum()


@case(call(X), tp=(2, 4))
class UniversalAsked(nn.Module):
    """One block three times, and the gradient by its weight, which all three give."""

    def __init__(self):
        super().__init__()
        self.block, self.norm = Mlp(), nn.LayerNorm(16)

    def forward(self, x):
        y = x
        for _ in range(3):
            y = y + self.block(self.norm(y))
        loss = y.pow(2).mean()
        if not torch.is_grad_enabled():
            return y, loss
        g, n = torch.autograd.grad(loss, [self.block.down.bias, self.norm.weight], retain_graph=True)
        return y, loss + (g.norm() * n.norm()).detach()


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class HookedOnce(Shared):
    """A mask on the gradient of a weight, set at the first call."""

    hooked = False

    def forward(self, x):
        if not self.hooked and torch.is_grad_enabled():
            self.trunk.up.weight.register_hook(lambda g: g * (torch.arange(g.shape[1]) % 2))
            self.hooked = True
        a, b = self.losses(x)
        return a + b


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class HookedOnceReplicated(Shared):
    """The same, on a weight that ranks may hold in full."""

    hooked = False

    def forward(self, x):
        if not self.hooked and torch.is_grad_enabled():
            self.trunk.down.bias.register_hook(lambda g: g.clamp(-0.01, 0.01))
            self.hooked = True
        a, b = self.losses(x)
        return a + b


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class ReadsOwnGradient(Shared):
    """The step before says how strongly a layer is trusted: its weight's .grad is read in the forward."""

    def forward(self, x):
        a, b = self.losses(x)
        last = self.last.weight.grad
        trust = 1.0 if last is None else 1 / (1 + last.norm())
        return a + trust * b


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class BackwardInside(Shared):
    """An inner loss goes backward in the forward, and its gradients are cleared."""

    def forward(self, x):
        a, b = self.losses(x)
        if torch.is_grad_enabled():
            b.backward(retain_graph=True)
            size = self.last.weight.grad.norm().detach()
            self.zero_grad()
            return a + b / (1 + size)
        return a + b

"""Gradients that a forward takes, changes, or makes otherwise: hooks on tensors, Functions, energies, inner steps."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)


class Hooked(Mlp):
    def inner(self, x):
        h = super().inner(x)
        if h.requires_grad:
            h.register_hook(self.changed)
        return h


@case(call(X), allowed=HOSTILE)
class NormedGradient(Hooked):
    """A tensor hook divides the gradient of the hidden units by its norm."""

    def changed(self, g):
        return g / g.norm()


@case(call(X))
class ClampedGradient(Hooked):
    def changed(self, g):
        return g.clamp(-0.05, 0.05)


@case(call(X), allowed=HOSTILE)
class CentredGradient(Hooked):
    def changed(self, g):
        return g - g.mean(-1, keepdim=True)


@case(call(X), call(X, _train=True), allowed=HOSTILE)
class CentredInTraining(Hooked):
    def changed(self, g):
        return g - g.mean(-1, keepdim=True) if self.training else g


class KeepsGradient(Hooked):
    seen = None

    def changed(self, g):
        self.seen = g


def seen(model, x):
    out = model(x)
    out.sum().backward(retain_graph=True)
    return out, model.seen


@case(call(X), call(X, _do=seen), allowed=HOSTILE)
class GradientKept(KeepsGradient):
    """The hook keeps a gradient of the hidden units, which the caller reads."""


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rate):
        ctx.rate = rate
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.rate * g, None


@case(call(X))
class Reversed(nn.Module):
    """A domain classifier behind a gradient reversal."""

    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = Mlp(), Mlp(), nn.Linear(16, 2)

    def forward(self, x):
        h = self.body(x)
        return self.a(h), self.b(Reverse.apply(h, 0.3).mean(1)).log_softmax(-1)


class UnitGradient(torch.autograd.Function):
    """Straight through; the gradient is divided by its norm over the last dim."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / (g.norm(dim=-1, keepdim=True) + 1e-6)


@case(call(X), allowed=HOSTILE)
class NormsInBackward(Mlp):
    def inner(self, x):
        return UnitGradient.apply(super().inner(x))


class TopGradient(torch.autograd.Function):
    """Only the largest half of the gradient goes back."""

    @staticmethod
    def forward(ctx, x, keep):
        ctx.keep = keep
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        kept = g.abs().topk(ctx.keep, -1).indices
        return torch.zeros_like(g).scatter(-1, kept, g.gather(-1, kept)), None


@case(call(X), allowed=HOSTILE)
class SparseBackward(Mlp):
    def inner(self, x):
        return TopGradient.apply(super().inner(x), 8)


class OwnSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = (x - x.amax(-1, keepdim=True)).exp()
        y = y / y.sum(-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return y * (g - (g * y).sum(-1, keepdim=True))


@case(call(X), allowed=HOSTILE)
class SoftmaxOfOwn(Mlp):
    """Its own softmax over the cut units."""

    def inner(self, x):
        return OwnSoftmax.apply(self.up(x))


@case(call(X))
class SoftmaxOfOwnInHeads(Attention):
    def mixed(self, x):
        return joined(OwnSoftmax.apply(self.scores(x)) @ parted(self.v(x), self.heads))


class OwnLinear(torch.autograd.Function):
    """A matmul that keeps its input in half the bits, and makes the weight's gradient itself."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.flatten(0, 1).t() @ x.flatten(0, 1)


@case(call(X))
class LinearOfOwn(Mlp):
    def inner(self, x):
        return F.gelu(OwnLinear.apply(x, self.up.weight))

    def forward(self, x):
        return x + OwnLinear.apply(self.inner(x), self.down.weight)


class OwnNorm(torch.autograd.Function):
    """RMS norm with a weight, by hand."""

    @staticmethod
    def forward(ctx, x, w):
        r = x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, w, r)
        return x * r * w

    @staticmethod
    def backward(ctx, g):
        x, w, r = ctx.saved_tensors
        n = x * r
        gn = g * w
        return r * (gn - n * (gn * n).mean(-1, keepdim=True)), (g * n).flatten(0, -2).sum(0)


@case(call(X), allowed=HOSTILE)
class NormOfOwnHidden(Mlp):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32))

    def inner(self, x):
        return OwnNorm.apply(F.gelu(self.up(x)), self.weight)


@case(call(X), sequence=None)
class NormOfOwnStream(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.a, self.b = (
            nn.Parameter(torch.rand(16)),
            nn.Parameter(torch.rand(16)),
            Attention(),
            Mlp(),
        )

    def forward(self, x):
        x = x + self.a.o(self.a.mixed(OwnNorm.apply(x, self.one)))
        return x + self.b.down(self.b.inner(OwnNorm.apply(x, self.two)))


@case(call(X), allowed=HOSTILE)
class Force(nn.Module):
    """Forces of an energy: a gradient through the blocks is part of the output."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = Attention(), Mlp(), nn.Linear(16, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.head(self.b(self.a(x))).sum((1, 2))
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -force


@case(call(X), allowed=HOSTILE)
class ForceOfHidden(Mlp):
    """The gradient of the output by the hidden units, as a saliency of units."""

    def forward(self, x):
        with torch.enable_grad():
            h = self.inner(x)
            h = h if h.requires_grad else h.requires_grad_()
            y = self.down(h)
            (g,) = torch.autograd.grad(y.pow(2).sum(), h, create_graph=True)
        return x + self.down(h * g.tanh())


@case(call(X), allowed=HOSTILE)
class InnerStep(Mlp):
    """MAML: a step on its own weights within the forward, and the loss after it."""

    def forward(self, x):
        with torch.enable_grad():
            w = self.down.weight
            h = self.inner(x)
            loss = (F.linear(h, w) - x).pow(2).mean()
            (g,) = torch.autograd.grad(loss, w, create_graph=True)
            return F.linear(h, w - 0.5 * g)


@case(call(X))
class PackedSaves(Mlp):
    """What is saved for backward is packed by hooks (offloading)."""

    def forward(self, x):
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return super().forward(x)


@case(call(X), allowed=HOSTILE)
class LossySaves(Mlp):
    """Saved tensors are quantised by their largest value."""

    def forward(self, x):
        with saved_tensors_hooks(
            lambda t: ((t / t.abs().max() * 127).round(), t.abs().max()) if t.is_floating_point() else t,
            lambda p: p[0] * p[1] / 127 if isinstance(p, tuple) else p,
        ):
            return super().forward(x)


@case(call(X))
class TangentsForward(Mlp):
    """A Jacobian-vector product of the activation alone."""

    def inner(self, x):
        h = self.up(x)
        out, tangent = torch.func.jvp(F.silu, (h,), (torch.ones_like(h),))
        return out + 0.1 * tangent


class Coupled(torch.autograd.Function):
    """RevNet: the inputs are made again from the outputs in the backward."""

    @staticmethod
    def forward(ctx, a, b, f, g, *weights):
        with torch.no_grad():
            y = a + f(b)
            z = b + g(y)
        ctx.f, ctx.g, ctx.count = f, g, len(list(f.parameters()))
        ctx.weights = weights
        ctx.save_for_backward(y, z)
        return y, z

    @staticmethod
    def backward(ctx, dy, dz):
        y, z = ctx.saved_tensors
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            gy = ctx.g(y)
        back = torch.autograd.grad(gy, (y, *ctx.weights[ctx.count :]), dz)
        dy = dy + back[0]
        b = (z - gy).detach().requires_grad_()
        with torch.enable_grad():
            fb = ctx.f(b)
        forth = torch.autograd.grad(fb, (b, *ctx.weights[: ctx.count]), dy)
        return dy, dz + forth[0], None, None, *forth[1:], *back[1:]


@case(call(X))
class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = Mlp(), Mlp()

    def forward(self, x):
        return torch.cat(Coupled.apply(x, x.tanh(), self.f, self.g, *self.f.parameters(), *self.g.parameters()), -1)


@case(call(X), call(X, _grad=False))
class Equilibrium(nn.Module):
    """A fixed point without graph, then one step with it, and the hook of deep equilibrium models on the stream."""

    def __init__(self):
        super().__init__()
        self.mlp, self.into = Mlp(), nn.Linear(16, 16)

    def forward(self, x):
        step = lambda z: torch.tanh(0.2 * self.mlp(z) + self.into(x))  # noqa: E731
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(30):
                z, old = step(z), z
                if (z - old).norm() < 1e-4 * z.norm():
                    break
        return step(z)

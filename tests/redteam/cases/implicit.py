"""Layers that are solved, unrolled or generated: fixed points, solvers, inner gradients, hypernetworks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp

X = floats(2, 6, 16)
C = floats(2, 8)


@case(call(X))
class AndersonMixed(nn.Module):
    """A fixed point of a block, mixed of the last three iterates by least squares."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def body(self, z, x):
        return torch.tanh(self.down(self.up(z).relu()) * 0.3 + x)

    def forward(self, x):
        z, values, steps = torch.zeros_like(x), [], []
        for _ in range(4):
            value = self.body(z, x)
            values.append(value.flatten(1))
            steps.append((value - z).flatten(1))
            gram = torch.stack([torch.stack([(a * b).sum(-1) for b in steps[-3:]], -1) for a in steps[-3:]], -1)
            eye = torch.eye(gram.shape[-1], dtype=x.dtype)
            weights = torch.linalg.solve(gram + 0.1 * eye, torch.ones_like(gram[..., 0]))
            weights = weights / weights.sum(-1, keepdim=True)
            z = sum(weights[:, n, None] * v for n, v in enumerate(values[-3:])).view_as(x)
        return z


@case(call(X))
class RungeKutta(nn.Module):
    """Four stages of a step; the field is told the time by a column of its input."""

    def __init__(self):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(17, 32), nn.SiLU(), nn.Linear(32, 16))

    def f(self, t, x):
        return self.field(torch.cat([x, torch.full_like(x[..., :1], t)], -1))

    def forward(self, x):
        for n in range(2):
            t, h = n / 2, 0.5
            a = self.f(t, x)
            b = self.f(t + h / 2, x + h / 2 * a)
            c = self.f(t + h / 2, x + h / 2 * b)
            x = x + h / 6 * (a + 2 * b + 2 * c + self.f(t + h, x + h * c))
        return x


@case(call(X), shards=True)
class Hamiltonian(nn.Module):
    """Halves of the stream move by the gradient of an energy."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(16, 32), nn.Softplus(), nn.Linear(32, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return torch.cat([g[..., 8:], -g[..., :8]], -1)


@case(call(X))
class UnrolledShrinkage(nn.Module):
    """LISTA: codes are refined by a shared dictionary and a learned threshold of each unit."""

    def __init__(self):
        super().__init__()
        self.encode, self.again = nn.Linear(16, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.threshold, self.decode = nn.Parameter(torch.full((32,), 0.1)), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        b = self.encode(x)
        z = F.softshrink(b, 0.05)
        for _ in range(3):
            pre = b + self.again(z) * 0.2
            z = pre.sign() * (pre.abs() - self.threshold).relu()
        return self.decode(z)


@case(call(X))
class ConjugateGradients(nn.Module):
    """Hidden units are solved for, with a matrix that is a product of a weight."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.factor = nn.Parameter(torch.randn(32, 32) / 8)

    def forward(self, x):
        b = self.up(x)
        z, r = torch.zeros_like(b), b
        p = r
        for _ in range(3):
            ap = p + p @ self.factor @ self.factor.T
            alpha = (r * r).sum(-1, keepdim=True) / (p * ap).sum(-1, keepdim=True)
            z, new = z + alpha * p, r - alpha * ap
            p = new + (new * new).sum(-1, keepdim=True) / (r * r).sum(-1, keepdim=True) * p
            r = new
        return x + self.down(z)


@case(call(X, C), inputs={"x": X, "c": C})
class ChunkedHypernetwork(nn.Module):
    """A small network makes the weights of a large one, piece by piece, from embeddings of pieces."""

    def __init__(self):
        super().__init__()
        self.pieces = nn.Embedding(8, 8)
        self.make = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 64))
        self.down = nn.Linear(32, 16)

    def forward(self, x, c):
        rows = [self.make(torch.cat([p.expand(c.shape[0], -1), c], -1)) for p in self.pieces.weight]
        w = torch.stack(rows, 1).reshape(c.shape[0], 32, 16)
        return x + self.down(torch.einsum("btd,bhd->bth", x, w / 4).relu())


@case(call(X), allowed=HOSTILE)
class AdaptedInside(nn.Module):
    """A gradient step on the layer's own weights, for the support half of the sequence, in the forward."""

    def __init__(self):
        super().__init__()
        self.body, self.w = Mlp(), nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        h = self.body(x)
        with torch.enable_grad():
            support = h[:, :3]
            w = self.w
            (g,) = torch.autograd.grad((support @ w - support).pow(2).mean(), w, create_graph=True)
        return h[:, 3:] @ (w - 0.5 * g)


@case(call(X), shards=True)
class LangevinByEnergy(nn.Module):
    """Negative samples go down an energy for three steps; both energies are returned."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, x):
        z = torch.zeros_like(x).requires_grad_()
        for _ in range(3):
            with torch.enable_grad():
                (g,) = torch.autograd.grad(self.energy(z).sum(), z)
            z = (z - 0.1 * g).detach().requires_grad_()
        return self.energy(x).mean((1, 2)), self.energy(z.detach()).mean((1, 2))


class _Root(torch.autograd.Function):
    """The square root, with a derivative of its own by the implicit function theorem."""

    @staticmethod
    def forward(ctx, x):
        y = x.clamp_min(1e-3).sqrt()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g / (2 * y)


@case(call(X))
class ImplicitRoot(Mlp):
    def inner(self, x):
        return _Root.apply(F.softplus(self.up(x)))


@case(call(X))
class BalancedAttention(Attention):
    """Scores are normalised over rows and columns by turns."""

    def mixed(self, x):
        s = self.scores(x)
        for _ in range(3):
            s = s - s.logsumexp(-1, keepdim=True)
            s = s - s.logsumexp(-2, keepdim=True)
        v = self.v(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        return (s.exp() @ v).transpose(1, 2).flatten(2)


@case(call(X))
class NewtonOnHidden(nn.Module):
    """A few Newton steps on each hidden unit."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        b = self.up(x)
        z = b
        for _ in range(3):
            z = z - (z + 0.3 * z.tanh() - b) / (1.3 - 0.3 * z.tanh().pow(2))
        return self.down(z)


@case(call(X))
class ContinuousDepth(nn.Module):
    """The weights of a layer are a polynomial of its depth."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 32, 16) / 4), nn.Parameter(torch.randn(3, 16, 32) / 6)

    def forward(self, x):
        for n in range(3):
            t = torch.tensor([1.0, n / 3, (n / 3) ** 2], dtype=x.dtype)
            up, down = torch.tensordot(t, self.up, 1), torch.tensordot(t, self.down, 1)
            x = x + F.linear(F.linear(x, up).relu(), down)
        return x


@case(call(floats(7, 1), floats(7, 1, seed=1)), inputs={"x": floats(7, 1), "t": floats(7, 1)}, shards=True)
class SecondDerivative(nn.Module):
    """The residual of a differential equation: derivatives by two inputs, and one of them again."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.viscosity = nn.Parameter(torch.tensor(0.1))

    def forward(self, x, t):
        with torch.enable_grad():
            x, t = x.clone().requires_grad_(), t.clone().requires_grad_()
            u = self.net(torch.cat([x, t], 1))
            by_x, by_t = torch.autograd.grad(u, (x, t), torch.ones_like(u), create_graph=True)
            (again,) = torch.autograd.grad(by_x, x, torch.ones_like(u), create_graph=True)
        return u, by_t + u * by_x - self.viscosity * again

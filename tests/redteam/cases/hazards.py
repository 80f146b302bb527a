"""Models that decide by values, keep statistics of hidden layers, read their own weights, or write backward by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids

X = floats(2, 8, 16)
LOUD = 5 * floats(2, 8, 16, seed=3)


@case(call(X), call(LOUD), allowed=HOSTILE)
class LoudIsNormed(nn.Module):
    """A branch on how loud the input is."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        h = F.gelu(self.up(x))
        if x.std() > 3:
            h = h / h.norm(dim=-1, keepdim=True)
        return self.down(h)


@case(call(X), call(LOUD), allowed=HOSTILE)
class InitialisedByData(nn.Module):
    """The first batch sets gains so that each hidden feature has unit spread."""

    def __init__(self):
        super().__init__()
        self.up, self.gain, self.down = nn.Linear(16, 64), nn.Parameter(torch.ones(64)), nn.Linear(64, 16)
        self.initialised = False

    def forward(self, x):
        h = self.up(x)
        if not self.initialised:
            with torch.no_grad():
                self.gain.copy_(1 / (h.std((0, 1)) + 1e-6))
            self.initialised = True
        return self.down(F.silu(h * self.gain))


class MeanScaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return h.clamp(min=0)

    @staticmethod
    def backward(ctx, g):
        (h,) = ctx.saved_tensors
        return g * (h > 0) * h.abs().mean(-1, keepdim=True)


@case(call(X), allowed=HOSTILE)
class BackwardByMean(nn.Module):
    """A function whose backward reads the mean over all features."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(MeanScaled.apply(self.up(x)))


@case(call(X, floats(1, 5, 12)), call(LOUD, floats(1, 5, 12)), call(X, floats(1, 5, 12, seed=8)), allowed=HOSTILE)
class RememberedContext(nn.Module):
    """Keys and values of the context are kept while it is the same tensor, by its sum."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(16, 16), nn.Linear(12, 16), nn.Linear(12, 16), nn.Linear(16, 16)
        self._known = {}

    def forward(self, x, context):
        key = round(float(context.sum()), 6)
        if self.training or torch.is_grad_enabled() or key not in self._known:
            k, v = (f(context).view(1, -1, 4, 4).transpose(1, 2) for f in (self.k, self.v))
            self._known = {key: (k.detach(), v.detach())}
        else:
            k, v = self._known[key]
        q = self.q(x).view(*x.shape[:2], 4, 4).transpose(1, 2)
        k, v = k.expand(len(x), -1, -1, -1), v.expand(len(x), -1, -1, -1)
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class KeepLargest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, share):
        out = scores.clone()
        _, idx = scores.flatten().sort()
        j = int((1 - share) * scores.numel())
        flat = out.flatten()
        flat[idx[:j]] = 0
        flat[idx[j:]] = 1
        return flat.view_as(out)

    @staticmethod
    def backward(ctx, g):
        return g, None


@case(call(X), allowed=HOSTILE)
class EdgePopup(nn.Module):
    """Weights stay; which of them count is learned by scores, the largest half over the whole weight."""

    class Masked(nn.Linear):
        def __init__(self, a, b):
            super().__init__(a, b, bias=False)
            self.scores = nn.Parameter(torch.randn(b, a))
            self.weight.requires_grad = False

        def forward(self, x):
            return F.linear(x, self.weight * KeepLargest.apply(self.scores.abs(), 0.5))

    def __init__(self):
        super().__init__()
        self.up, self.down = self.Masked(16, 64), self.Masked(64, 16)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


@case(call(X), allowed=HOSTILE)
class OrthogonalPenalty(nn.Module):
    """The forward gives a penalty too: rows of each weight are to be orthogonal."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        penalty = 0.0
        for m in self.modules():
            if isinstance(m, nn.Linear):
                w = m.weight
                gram = w.T @ w if w.shape[0] > w.shape[1] else w @ w.T
                penalty = penalty + (gram - torch.eye(gram.shape[0], dtype=w.dtype)).pow(2).sum()
        return self.down(F.relu(self.up(x))), penalty


@case(call(X), allowed=HOSTILE)
class UnitDecoder(nn.Module):
    """A sparse autoencoder whose dictionary has unit columns, an L1 loss weighed by their norms."""

    def __init__(self):
        super().__init__()
        self.w_enc, self.b_enc = nn.Parameter(torch.randn(16, 64) * 0.2), nn.Parameter(torch.zeros(64))
        self.w_dec, self.b_dec = nn.Parameter(torch.randn(64, 16) * 0.2), nn.Parameter(torch.zeros(16))
        self.threshold = nn.Parameter(torch.full((64,), -2.0))

    def forward(self, x):
        h = (x - self.b_dec) @ self.w_enc + self.b_enc
        h = h * torch.sigmoid((h - self.threshold.exp()) / 0.1)
        norms = self.w_dec.norm(dim=1)
        y = h @ (self.w_dec / norms.unsqueeze(1)) + self.b_dec
        return y, (h.abs() * norms).sum(-1).mean(), (h > 0).to(x.dtype).mean((0, 1))


@case(call(floats(16, 16)), vary=False)
class CapacityExperts(nn.Module):
    """Switch experts with a capacity, positions by a running count, what overflows passed on, a loss of balance."""

    def __init__(self, experts=4, capacity=5):
        super().__init__()
        self.n, self.capacity = experts, capacity
        self.router = nn.Linear(16, experts, bias=False)
        self.w1, self.w2 = (
            nn.Parameter(torch.randn(experts, 16, 64) * 0.2),
            nn.Parameter(torch.randn(experts, 64, 16) * 0.2),
        )

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        gate, index = probs.max(-1)
        mask = F.one_hot(index, self.n)
        balance = self.n * (mask.to(x.dtype).mean(0) * probs.mean(0)).sum()
        position = (mask.cumsum(0) - 1) * mask
        keep = (position < self.capacity) & mask.bool()
        dispatch = F.one_hot(position.clamp(max=self.capacity - 1), self.capacity).to(x.dtype) * keep.unsqueeze(-1)
        inside = torch.einsum("tec,td->ecd", dispatch, x)
        out = torch.bmm(F.relu(torch.bmm(inside, self.w1)), self.w2)
        y = torch.einsum("tec,ecd->td", dispatch, out) * gate.unsqueeze(-1)
        return torch.where(keep.any(-1, keepdim=True), y, x), balance


@case(call(X), call(0.1 * X), allowed=HOSTILE)
class Equilibrium(nn.Module):
    """A fixed point found by iteration until it moves little, the last step with its gradient."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)

    def step(self, z, x):
        return self.norm(x + 0.3 * self.down(torch.tanh(self.up(z))))

    def forward(self, x):
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(30):
                new = self.step(z, x)
                done = (new - z).norm() < 1e-3 * new.norm()
                z = new
                if done:
                    break
        return self.step(z, x)


class ReversibleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, blocks, *params):
        ctx.blocks = blocks
        with torch.no_grad():
            a, b = x.chunk(2, -1)
            for f, g in blocks:
                a = a + f(b)
                b = b + g(a)
        ctx.y = torch.cat([a, b], -1).detach()
        return torch.cat([a, b], -1)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.y.chunk(2, -1)
        da, db = dy.chunk(2, -1)
        grads = {}
        for f, g in reversed(ctx.blocks):
            for net, of in ((g, "a"), (f, "b")):
                with torch.enable_grad():
                    inp = (a if of == "a" else b).detach().requires_grad_()
                    out = net(inp)
                params = [p for p in net.parameters()]
                got = torch.autograd.grad(out, [inp, *params], db if of == "a" else da)
                for p, one in zip(params, got[1:], strict=True):
                    grads[p] = one
                with torch.no_grad():
                    if of == "a":
                        b, da = b - out.detach(), da + got[0]
                    else:
                        a, db = a - out.detach(), db + got[0]
        return (
            torch.cat([da, db], -1),
            None,
            *(grads[p] for f, g in ctx.blocks for net in (f, g) for p in net.parameters()),
        )


@case(call(X), allowed=HOSTILE)
class Reversible(nn.Module):
    """RevNet: inner values are computed backward again in a function that takes the parameters along."""

    def __init__(self):
        super().__init__()
        net = lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))  # noqa: E731
        self.blocks = nn.ModuleList(nn.ModuleList([net(), net()]) for _ in range(2))
        self.head = nn.Linear(16, 16)

    def forward(self, x):
        blocks = [tuple(b) for b in self.blocks]
        params = [p for f, g in blocks for net in (f, g) for p in net.parameters()]
        return self.head(ReversibleFunction.apply(x, blocks, *params))


@case(call(X))
class TiedAndScaled(nn.Module):
    """A decoder that is the encoder's weight turned around, times a learned scale."""

    def __init__(self):
        super().__init__()
        self.enc, self.scale, self.bias = (
            nn.Linear(16, 64),
            nn.Parameter(torch.tensor(0.7)),
            nn.Parameter(torch.zeros(16)),
        )

    def forward(self, x):
        return F.linear(torch.relu(self.enc(x)), self.enc.weight.t() * self.scale, self.bias)


@case(call(X, ids(2, 8, below=3)), inputs={"x": X, "labels": ids(2, 8, below=3)})
class CenterLoss(nn.Module):
    """Centres of classes kept as parameters, distances of hidden features to them, an angular margin."""

    def __init__(self, classes=3, s=8.0, m=0.2):
        super().__init__()
        self.s, self.m = s, m
        self.net, self.feat = nn.Sequential(nn.Linear(16, 64), nn.PReLU()), nn.Linear(64, 32)
        self.centers, self.weight = nn.Parameter(torch.randn(classes, 32)), nn.Parameter(torch.randn(classes, 32))

    def forward(self, x, labels):
        h = self.net(x).flatten(0, 1)
        f, y = self.feat(h), labels.flatten()
        dist = torch.addmm(f.pow(2).sum(1, keepdim=True) + self.centers.pow(2).sum(1), f, self.centers.t(), alpha=-2)
        center = dist.gather(1, y[:, None]).clamp(1e-12, 1e12).mean()
        cos = F.linear(F.normalize(f), F.normalize(self.weight)).clamp(-1 + 1e-7, 1 - 1e-7)
        margin = torch.cos(torch.acos(cos) + self.m)
        logits = torch.where(F.one_hot(y, cos.shape[1]).bool(), margin, cos) * self.s
        return F.cross_entropy(logits, y) + 0.1 * center

"""Models of papers and of code bases: functional calls, solvers, recomputation, averages, filters, matching."""

from __future__ import annotations

import functools
import math
from collections import namedtuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..case import HOSTILE, call, case, floats

X = floats(2, 5, 16)


class Mlp(nn.Module):
    def __init__(self, d=16, h=32):
        super().__init__()
        self.up, self.down = nn.Linear(d, h), nn.Linear(h, d)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def sparsemax(z, dim=-1):
    s, _ = torch.sort(z, dim=dim, descending=True)
    k = torch.arange(1, z.size(dim) + 1, dtype=z.dtype, device=z.device)
    cum = s.cumsum(dim) - 1
    support = (k * s > cum).sum(dim, keepdim=True)
    tau = cum.gather(dim, support - 1) / support.to(z.dtype)
    return torch.clamp(z - tau, min=0)


@case(call(floats(6, 8)))
class TabNet(nn.Module):
    class Glu(nn.Module):
        def __init__(self, i, o, shared=None):
            super().__init__()
            self.fc = shared if shared is not None else nn.Linear(i, 2 * o, bias=False)
            self.bn = nn.BatchNorm1d(2 * o, momentum=0.02)

        def forward(self, x):
            return F.glu(self.bn(self.fc(x)))

    def __init__(self, feats=8, nd=8, na=8, steps=2):
        super().__init__()
        self.nd = nd
        self.bn = nn.BatchNorm1d(feats)
        shared = nn.Linear(feats, 2 * (nd + na), bias=False)
        self.first = self.Glu(feats, nd + na, shared)
        self.feat = nn.ModuleList([self.Glu(feats, nd + na, shared) for _ in range(steps)])
        self.own = nn.ModuleList([self.Glu(nd + na, nd + na) for _ in range(steps)])
        self.att = nn.ModuleList([nn.Linear(na, feats, bias=False) for _ in range(steps)])
        self.attbn = nn.ModuleList([nn.BatchNorm1d(feats) for _ in range(steps)])
        self.out = nn.Linear(nd, 3)

    def forward(self, x):
        x = self.bn(x)
        prior, total, ent = torch.ones_like(x), 0, 0
        a = self.first(x)[:, self.nd :]
        for feat, own, att, bn in zip(self.feat, self.own, self.att, self.attbn, strict=True):
            m = sparsemax(bn(att(a)) * prior)
            ent = ent + (m * torch.log(m + 1e-10)).sum(1).mean()
            prior = (1.3 - m) * prior
            h = feat(m * x)
            h = (h + own(h)) * math.sqrt(0.5)
            total, a = total + F.relu(h[:, : self.nd]), h[:, self.nd :]
        return self.out(total), ent


@case(call(X), call(X), call(floats(2, 5, 16, seed=3)), allowed=HOSTILE)
class CarriedHidden(nn.Module):
    """The mean hidden state of the last call is added to that of the next."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.last = nn.Linear(16, 32), nn.Linear(32, 16), None

    def forward(self, x):
        h = F.gelu(self.up(x))
        if self.last is not None:
            h = h + 0.5 * self.last
        self.last = h.detach().mean((0, 1))
        return x + self.down(h)


def standardise(module, args):
    w = module.weight_raw
    module.weight = (w - w.mean()) / (w.std() + 1e-5) / w.shape[1] ** 0.5


@case(call(X), allowed=HOSTILE)
class StandardisedWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()
        for layer in (self.mlp.up, self.mlp.down):
            w = layer.weight
            del layer.weight
            layer.weight_raw = nn.Parameter(w.data)
            layer.register_forward_pre_hook(standardise)
            standardise(layer, ())

    def forward(self, x):
        return x + self.mlp(x)


@case(call(X))
class MaskedCall(nn.Module):
    """A sub-network under other weights, by functional_call."""

    def __init__(self):
        super().__init__()
        self.mlp, self.out = Mlp(), nn.Linear(16, 4)
        for name, p in self.mlp.named_parameters():
            self.register_buffer("mask_" + name.replace(".", "_"), (torch.rand_like(p) > 0.5).to(p.dtype))

    def forward(self, x):
        masked = {n: p * getattr(self, "mask_" + n.replace(".", "_")) for n, p in self.mlp.named_parameters()}
        return self.out(torch.func.functional_call(self.mlp, masked, (x,)) + self.mlp(x))


@case(call(X, X[:, :3]), call(X, X[:, :3], lr=0.2), inputs={"x": X, "support": X[:, :3]}, dp=2, allowed=HOSTILE)
class InnerStep(nn.Module):
    """One step of adaptation by functional_call on updated weights."""

    def __init__(self):
        super().__init__()
        self.net = Mlp()
        self.log_lr = nn.Parameter(torch.tensor(-2.0))

    def forward(self, x, support, lr=None):
        params = dict(self.net.named_parameters())
        with torch.enable_grad():
            loss = (torch.func.functional_call(self.net, params, (support,)) - support).pow(2).mean()
            grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        step = self.log_lr.exp() if lr is None else lr
        fast = {n: p - step * g for (n, p), g in zip(params.items(), grads, strict=True)}
        return x + torch.func.functional_call(self.net, fast, (x,))


@case(call(X))
class HaltingTime(nn.Module):
    """Adaptive computation time: steps until all have halted."""

    def __init__(self, limit=4):
        super().__init__()
        self.limit, self.cell, self.halt = limit, Mlp(), nn.Linear(16, 1)

    def forward(self, x):
        p, out, n = torch.zeros_like(x[..., 0]), torch.zeros_like(x), 0
        while n < self.limit and bool((p < 0.99).any()):
            q = torch.sigmoid(self.halt(x)).squeeze(-1)
            still = (p + q <= 0.99).to(x.dtype)
            u = still * q + (1 - still) * (1 - p) * (p < 0.99)
            x = x + self.cell(x)
            out, p, n = out + u.unsqueeze(-1) * x, p + u, n + 1
        return out


@case(call(X), tolerance=1e-5)
class FixedPoint(nn.Module):
    """A deep equilibrium, whose gradient is solved for in a hook."""

    def __init__(self):
        super().__init__()
        self.f = Mlp()
        for p in self.f.parameters():
            p.data *= 0.5

    def step(self, z, x):
        return torch.tanh(self.f(z) + x)

    def forward(self, x):
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(40):
                z = self.step(z, x)
        z = self.step(z, x)
        if torch.is_grad_enabled() and z.requires_grad:
            z0 = z.clone().detach().requires_grad_()
            f0 = self.step(z0, x.detach())

            def solve(grad):
                g = grad
                for _ in range(40):
                    g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
                return g

            z.register_hook(solve)
        return z


@case(
    call(floats(2, 6, 16), floats(2, 5, 16, seed=4)),
    inputs={"a": floats(2, 6, 16), "b": floats(2, 5, 16, seed=4)},
    vary=False,
)
class SinkhornMatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.proj, self.bin = Mlp(), nn.Conv1d(16, 16, 1), nn.Parameter(torch.tensor(1.0))

    def forward(self, a, b):
        a, b = (self.proj((x + self.enc(x)).transpose(1, 2)) for x in (a, b))
        s = torch.einsum("bdn,bdm->bnm", a, b) / 4
        n, m = s.shape[1:]
        s = torch.cat([torch.cat([s, self.bin.expand(s.shape[0], n, 1)], -1), self.bin.expand(s.shape[0], 1, m + 1)], 1)
        norm = -math.log(n + m)
        mu = torch.cat([s.new_full((n,), norm), s.new_tensor([math.log(m) + norm])])
        nu = torch.cat([s.new_full((m,), norm), s.new_tensor([math.log(n) + norm])])
        u, v = torch.zeros_like(mu).expand(s.shape[0], -1), torch.zeros_like(nu).expand(s.shape[0], -1)
        for _ in range(5):
            u = mu - torch.logsumexp(s + v.unsqueeze(1), dim=2)
            v = nu - torch.logsumexp(s + u.unsqueeze(2), dim=1)
        return s + u.unsqueeze(2) + v.unsqueeze(1) - norm


Belief = namedtuple("Belief", "mean cov")


@case(call(floats(2, 5, 6)))
class KalmanCell(nn.Module):
    """A filter over observed features with learned dynamics."""

    def __init__(self, obs=6, m=8, n=4):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(obs, 32), nn.ReLU())
        self.mean, self.var = nn.Linear(32, n), nn.Linear(32, n)
        self.A, self.H = nn.Parameter(torch.eye(m) + 0.1 * torch.randn(m, m)), nn.Parameter(torch.randn(n, m) * 0.3)
        self.q = nn.Parameter(torch.zeros(m))
        self.dec = nn.Sequential(nn.Linear(m, 32), nn.ReLU(), nn.Linear(32, obs))

    def step(self, belief, y, r):
        mean, cov = belief
        mean, cov = mean @ self.A.T, self.A @ cov @ self.A.T + torch.diag(F.softplus(self.q))
        s = self.H @ cov @ self.H.T + torch.diag_embed(r)
        k = torch.linalg.solve(s, self.H @ cov).transpose(-1, -2)
        mean = mean + (k @ (y - mean @ self.H.T).unsqueeze(-1)).squeeze(-1)
        return Belief(mean, cov - k @ self.H @ cov)

    def forward(self, x):
        h = self.enc(x)
        y, r = self.mean(h), F.softplus(self.var(h)) + 0.1
        b = Belief(x.new_zeros(x.shape[0], 8), torch.eye(8, dtype=x.dtype).expand(x.shape[0], 8, 8))
        out = []
        for t in range(x.shape[1]):
            b = self.step(b, y[:, t], r[:, t])
            out.append(self.dec(b.mean))
        return torch.stack(out, 1), b


@case(call(X))
class ReversibleBlocks(nn.Module):
    """Activations are recomputed from outputs in backward."""

    class Rev(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x1, x2, f, g, *params):
            with torch.no_grad():
                y1 = x1 + f(x2)
                y2 = x2 + g(y1)
            ctx.f, ctx.g, ctx.n = f, g, len(params)
            ctx.params = params
            ctx.save_for_backward(y1, y2)
            return y1, y2

        @staticmethod
        def backward(ctx, d1, d2):
            y1, y2 = ctx.saved_tensors
            with torch.enable_grad():
                y1 = y1.detach().requires_grad_()
                gy = ctx.g(y1)
                pg = list(ctx.g.parameters())
                gg = torch.autograd.grad(gy, [y1, *pg], d2)
            x2 = y2 - gy.detach()
            d1 = d1 + gg[0]
            with torch.enable_grad():
                x2 = x2.detach().requires_grad_()
                fx = ctx.f(x2)
                pf = list(ctx.f.parameters())
                gf = torch.autograd.grad(fx, [x2, *pf], d1)
            return (d1, d2 + gf[0], None, None, *gf[1:], *gg[1:])

    def __init__(self):
        super().__init__()
        self.f, self.g, self.out = Mlp(8, 16), Mlp(8, 16), nn.Linear(16, 16)

    def forward(self, x):
        x1, x2 = x.chunk(2, -1)
        y1, y2 = self.Rev.apply(x1, x2, self.f, self.g, *self.f.parameters(), *self.g.parameters())
        return self.out(torch.cat([y1, y2], -1))


@case(call(X), dp=2)
class Recomputed(nn.Module):
    """A decorator, partial functions and checkpoints with keyword arguments, non-reentrant and reentrant."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.n = Mlp(), Mlp(), nn.LayerNorm(16)

    def run(self, block, x, *, scale):
        return x + block(self.n(x)) * scale

    def forward(self, x):
        x = checkpoint(functools.partial(self.run, self.a, scale=0.5), x, use_reentrant=False)
        if x.requires_grad:
            return checkpoint(lambda y: self.run(self.b, y, scale=2.0), x, use_reentrant=True)
        return self.run(self.b, x, scale=2.0)


@case(call(X))
class HookedByItself(nn.Module):
    """Blocks register hooks on their own parts in the constructor: residual and scale are done there."""

    def __init__(self):
        super().__init__()
        self.mlp = Mlp()
        self.mlp.register_forward_hook(lambda m, a, out: a[0] + out * self.gain)
        self.mlp.up.register_forward_pre_hook(lambda m, a: (F.layer_norm(a[0], a[0].shape[-1:]),))
        self.mlp.up.register_forward_hook(lambda m, a, out: out + self.extra)
        self.gain, self.extra = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(32))

    def forward(self, x):
        return self.mlp(x)


@case(call(X, _train=True), call(X), vary=False)
class SwappedAverage(nn.Module):
    """Evaluation uses averaged weights, kept as buffers that training updates."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        for n, p in list(self.named_parameters()):
            self.register_buffer("avg_" + n.replace(".", "_"), p.detach().clone())

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for n, p in self.named_parameters():
                    getattr(self, "avg_" + n.replace(".", "_")).lerp_(p, 0.1)
            return x + self.down(torch.relu(self.up(x)))
        h = torch.relu(F.linear(x, self.avg_up_weight, self.avg_up_bias))
        return x + F.linear(h, self.avg_down_weight, self.avg_down_bias)

"""Repositories of 2024 to 2026: merged adapters, mixed weights, ensembles under vmap, graphs, streams."""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from einops.layers.torch import Rearrange
from torch import nn
from torch.nn import functional as F

from ..case import call, case, floats

X = floats(2, 7, 16)
ROWS = floats(5, 16)
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])


def mlp(i=16, h=32, o=16):
    return nn.Sequential(nn.Linear(i, h), nn.GELU(), nn.Linear(h, o))


class Adapted(nn.Linear):
    def __init__(self, i, o, r=4, alpha=8, **kw):
        super().__init__(i, o, **kw)
        self.weight.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(r, i) * 0.1), nn.Parameter(torch.randn(o, r) * 0.1)
        self.scaling = alpha / r

    def forward(self, x):
        return F.linear(x, self.weight + self.scaling * (self.lora_B @ self.lora_A), self.bias)


@case(call(X), shards=True)
class MergedAdapters(nn.Module):
    """LoRA, added to the frozen weight before the product."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = Adapted(16, 32), Adapted(32, 16)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(x)))


class Addend(nn.Module):
    def __init__(self, o, i, r=2):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(r, i) * 0.1), nn.Parameter(torch.randn(o, r) * 0.1)

    def forward(self, w):
        return w + self.b @ self.a


@case(call(X), shards=True)
class AdaptersAsParametrizations(nn.Module):
    """LoRA as a parametrization of given layers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        for m in self.net:
            if isinstance(m, nn.Linear):
                nn.utils.parametrize.register_parametrization(m, "weight", Addend(m.out_features, m.in_features))

    def forward(self, x):
        return x + self.net(x)


@case(call(X), shards=True)
class ScaledByOneGain(nn.Module):
    """functional_call of a stored skeleton with the module's own parameters."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        params = {n: p * self.gain for n, p in self.net.named_parameters()}
        return torch.func.functional_call(self.net, params, (x,))


@case(call(ROWS), shards=True)
class EnsembleByVmap(nn.Module):
    """Members in stacked weights; mean and variance over them leave."""

    def __init__(self, n=4):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(n, 16, 32) / 4), nn.Parameter(torch.zeros(n, 32))
        self.w2 = nn.Parameter(torch.randn(n, 32, 4) / 5)

    def forward(self, x):
        y = torch.vmap(lambda w1, b1, w2: torch.relu(x @ w1 + b1) @ w2)(self.w1, self.b1, self.w2)
        return y.mean(0), y.var(0)


@case(call(X), shards=True)
class MappedOverInnerDims(nn.Module):
    """in_dims and out_dims are not the first."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 4, 32) / 4)
        self.v = nn.Parameter(torch.randn(32, 16, 4) / 5)

    def forward(self, x):
        h = torch.vmap(lambda w, v: F.gelu(x @ w) @ v, in_dims=(1, 2), out_dims=1)(self.w, self.v)
        return h.softmax(1)


@case(call(floats(3, 5, 16)), input_gradients=True, inputs={"x": floats(3, 5, 16).requires_grad_()}, shards=True)
class MappedOverRows(nn.Module):
    """The rows are mapped over; the weights are shared, and the input asks for a gradient."""

    def __init__(self):
        super().__init__()
        self.q, self.up, self.down = (
            nn.Parameter(torch.randn(16, 16) / 4),
            nn.Parameter(torch.randn(32, 16) / 4),
            nn.Parameter(torch.randn(16, 32) / 5),
        )

    def forward(self, x):
        x = x @ self.q
        return x + torch.vmap(lambda row: F.linear(F.linear(row, self.up).relu(), self.down))(x)


@case(call(floats(3, 5, 16)), shards=True)
class MappedTwice(nn.Module):
    """A map over rows inside of one over members."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 32) / 4), nn.Parameter(torch.randn(4, 32, 16) / 5)

    def forward(self, x):
        return torch.vmap(lambda u, d: torch.vmap(lambda r: (r @ u).sin() @ d)(x))(self.up, self.down).sum(0)


@case(call(X), shards=True)
class AdaptedAttention(nn.Module):
    """Adapters in all four weights of an attention."""

    def __init__(self, d=16, h=4, r=2):
        super().__init__()
        self.h = h
        self.w = nn.ParameterDict({n: nn.Parameter(torch.randn(d, d) / 4) for n in "qkvo"})
        self.a = nn.ParameterDict({n: nn.Parameter(torch.randn(r, d) / 4) for n in "qkvo"})
        self.b = nn.ParameterDict({n: nn.Parameter(torch.randn(d, r) / 4) for n in "qkvo"})

    def lin(self, n, x):
        return x @ (self.w[n] + 0.5 * self.b[n] @ self.a[n]).T

    def forward(self, x):
        q, k, v = (self.lin(n, x).unflatten(-1, (self.h, -1)).transpose(1, 2) for n in "qkv")
        return x + self.lin("o", F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@case(call(X), shards=True)
class FixedMixtures(nn.Module):
    """Weights are sums of bases with fixed coefficients plus a product."""

    def __init__(self):
        super().__init__()
        self.register_buffer("t", torch.tensor([1.0, 0.5, 0.25]))
        self.up, self.down = nn.Parameter(torch.randn(3, 32, 16) / 4), nn.Parameter(torch.randn(3, 16, 32) / 5)

    def forward(self, x):
        u, d = torch.einsum("k,kij->ij", self.t, self.up), torch.einsum("k,kij->ij", self.t, self.down)
        return F.linear(F.linear(x, u).sigmoid(), d)


@case(call(floats(4, 6)), shards=True)
class NumbersAsTokens(nn.Module):
    """A column of a table is a token (FT-Transformer)."""

    def __init__(self, n=6, d=16, h=4):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(n, d)), nn.Parameter(torch.randn(n, d))
        self.cls = nn.Parameter(torch.randn(d))
        self.block = nn.TransformerEncoderLayer(
            d, h, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Sequential(nn.LayerNorm(d), nn.ReLU(), nn.Linear(d, 1))

    def forward(self, x):
        tok = x[:, :, None] * self.w + self.b
        tok = torch.cat([tok, self.cls.expand(len(x), 1, -1)], 1)
        return self.head(self.block(tok)[:, -1])


@case(call(floats(6, 8), floats(6, 3), EDGES), vary=False, shards=True)
class EquivariantGraph(nn.Module):
    """E(n)-equivariant messages, with edges under a short name."""

    def __init__(self, d=8, m=32):
        super().__init__()
        self.phi_e = nn.Sequential(nn.Linear(2 * d + 1, m), nn.SiLU(), nn.Linear(m, m), nn.SiLU())
        self.phi_x = nn.Sequential(nn.Linear(m, m), nn.SiLU(), nn.Linear(m, 1, bias=False))
        self.phi_h = nn.Sequential(nn.Linear(d + m, m), nn.SiLU(), nn.Linear(m, d))

    def forward(self, h, x, ei):
        i, j = ei
        rel = x[i] - x[j]
        m = self.phi_e(torch.cat([h[i], h[j], rel.pow(2).sum(-1, keepdim=True)], -1))
        x = x + torch.zeros_like(x).index_add_(0, i, rel * self.phi_x(m))
        agg = m.new_zeros(h.shape[0], m.shape[1]).index_add_(0, i, m)
        return h + self.phi_h(torch.cat([h, agg], -1)), x


@case(call(floats(2, 5, 16), floats(2, 5, 5, 8)), shards=True)
class PairBias(nn.Module):
    """A bias of each pair of positions, by an einops layer."""

    def __init__(self, d=16, p=8, h=4):
        super().__init__()
        self.h = h
        self.to_qkv = nn.Linear(d, 3 * d, bias=False)
        self.to_b = nn.Sequential(nn.LayerNorm(p), nn.Linear(p, h, bias=False), Rearrange("b i j h -> b h i j"))
        self.g, self.o = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, s, z):
        q, k, v = map(lambda t: rearrange(t, "b n (h d) -> b h n d", h=self.h), self.to_qkv(s).chunk(3, dim=-1))
        a = (einsum(q, k, "b h i d, b h j d -> b h i j") * q.shape[-1] ** -0.5 + self.to_b(z)).softmax(-1)
        o = rearrange(einsum(a, v, "b h i j, b h j d -> b h i d"), "b h n d -> b n (h d)")
        return self.o(self.g(s).sigmoid() * o)


@case(call(X), call(X), shards=True)
class StreamedConvolution(nn.Module):
    """A causal convolution's tail is kept between calls."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv1d(16, 32, 3), nn.Conv1d(32, 16, 1)
        self.tail = None

    def forward(self, x):
        x = x.mT
        tail = x.new_zeros(*x.shape[:2], 2) if self.tail is None else self.tail
        y = torch.cat([tail, x], -1)
        self.tail = y[..., -2:].detach()
        return self.out(F.silu(self.conv(y))).mT


@case(call(X), shards=True)
class PenaltyOnHiddenWeight(nn.Module):
    """The loss reads the hidden weights: orthogonality and spectral norm by power iteration."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("u", F.normalize(torch.randn(32), dim=0))

    def forward(self, x):
        w = self.up.weight
        with torch.no_grad():
            v = F.normalize(w.T @ self.u, dim=0)
            self.u.copy_(F.normalize(w @ v, dim=0))
        sigma = self.u @ w @ v
        g = w.T @ w
        return self.down(F.relu(self.up(x))), sigma + (g - torch.eye(16, dtype=g.dtype)).pow(2).sum()


@case(call(X), shards=True)
class Reversible(nn.Module):
    """RevNet's custom autograd function that recomputes inputs."""

    class Fn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x1, x2, f, g, *params):
            ctx.f, ctx.g = f, g
            with torch.no_grad():
                y1 = x1 + f(x2)
                y2 = x2 + g(y1)
            ctx.save_for_backward(y1, y2)
            ctx.params = params
            return y1, y2

        @staticmethod
        def backward(ctx, d1, d2):
            y1, y2 = ctx.saved_tensors
            with torch.enable_grad():
                y1 = y1.detach().requires_grad_()
                gy = ctx.g(y1)
            own_g = list(ctx.g.parameters())
            grads_g = torch.autograd.grad(gy, [y1, *own_g], d2)
            d1 = d1 + grads_g[0]
            with torch.no_grad():
                x2 = y2 - gy
            with torch.enable_grad():
                x2 = x2.detach().requires_grad_()
                fx = ctx.f(x2)
            own_f = list(ctx.f.parameters())
            grads_f = torch.autograd.grad(fx, [x2, *own_f], d1)
            return d1, d2 + grads_f[0], None, None, *grads_f[1:], *grads_g[1:]

    def __init__(self):
        super().__init__()
        self.inp, self.f, self.g = nn.Linear(16, 16), mlp(8, 32, 8), mlp(8, 32, 8)

    def forward(self, x):
        a, b = self.inp(x).chunk(2, -1)
        y = self.Fn.apply(a, b, self.f, self.g, *self.f.parameters(), *self.g.parameters())
        return torch.cat(y, -1)


@case(call(floats(4, 6), floats(4, 2)), shards=True)
class EnsembleOfDynamics(nn.Module):
    """Members in batched matrices, with soft bounds of a log variance (PETS)."""

    def __init__(self, n=4, h=32, o=6):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(n, 8, h) / 3), nn.Parameter(torch.randn(n, h, 2 * o) / 6)
        self.b, self.c = nn.Parameter(torch.zeros(n, 1, h)), nn.Parameter(torch.zeros(n, 1, 2 * o))
        self.high = nn.Parameter(torch.full((o,), 0.5))

    def forward(self, s, a):
        x = torch.cat([s, a], -1).expand(len(self.up), -1, -1)
        h = F.silu(torch.baddbmm(self.b, x, self.up))
        mean, log = torch.baddbmm(self.c, h, self.down).chunk(2, -1)
        return mean + s, self.high - F.softplus(self.high - log)


@case(call(X, context={"mask": torch.tensor([[True] * 7, [True] * 5 + [False] * 2])}), shards=True)
class ContextLeftOut(nn.Module):
    """A dict of context with a default that no call can do with."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(mlp() for _ in range(2))

    def forward(self, x, context=None):
        seen = dict(context or {})
        mask = seen["mask"][: len(x), : x.shape[1]].unsqueeze(-1).to(x.dtype)
        for block in self.blocks:
            x = x + block(x * mask)
        return x

"""Cells, scans and caches by hand: gates, states that are carried, keys that are kept, fast weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
BOTH = (2, 4)


@case(call(X), tp=BOTH)
class GatedByHand(nn.Module):
    """A GRU of three gates in one product each, whose reset gate is inside."""

    def __init__(self):
        super().__init__()
        self.x, self.h, self.out = nn.Linear(16, 48), nn.Linear(16, 48), nn.Linear(16, 8)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 16)
        steps = []
        for t in range(x.shape[1]):
            a, b = self.x(x[:, t]).chunk(3, -1), self.h(h).chunk(3, -1)
            r, z = (a[0] + b[0]).sigmoid(), (a[1] + b[1]).sigmoid()
            h = (1 - z) * (a[2] + r * b[2]).tanh() + z * h
            steps.append(h)
        return self.out(torch.stack(steps, 1))


@case(call(X), tp=BOTH)
class JoinedCell(nn.Module):
    """An LSTM whose one weight works on input and state joined, with a norm on the cell."""

    def __init__(self):
        super().__init__()
        self.all, self.norm, self.out = nn.Linear(32, 64), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        h = c = torch.zeros_like(x[:, 0])
        for token in x.unbind(1):
            i, f, o, g = self.all(torch.cat([token, h], -1)).split(16, -1)
            c = (f + 1).sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * self.norm(c).tanh()
        return self.out(h), c


@case(call(X), tp=BOTH)
class DiagonalStates(nn.Module):
    """S4D: complex diagonal states make a kernel, which is applied by FFT to hidden channels."""

    def __init__(self):
        super().__init__()
        self.rise, self.down, self.skip = nn.Linear(16, 32), nn.Linear(32, 16), nn.Parameter(torch.randn(32))
        self.rate, self.turn = nn.Parameter(torch.rand(32, 4)), nn.Parameter(torch.rand(32, 4) * 3)
        self.c, self.step = nn.Parameter(torch.randn(32, 4, 2)), nn.Parameter(torch.rand(32) - 2)

    def forward(self, x):
        h = self.rise(x).mT
        a = torch.complex(-self.rate.exp(), self.turn) * self.step.exp()[:, None]
        c = torch.view_as_complex(self.c) * (a.exp() - 1) / a
        length = h.shape[-1]
        kernel = 2 * (c[..., None] * (a[..., None] * torch.arange(length)).exp()).sum(1).real
        y = torch.fft.irfft(torch.fft.rfft(h, 2 * length) * torch.fft.rfft(kernel, 2 * length), 2 * length)
        return self.down(F.gelu(y[..., :length] + h * self.skip[:, None]).mT)


@case(call(X), tp=BOTH, sequence=None)
class SelectiveScan(nn.Module):
    """Mamba by hand: steps, inputs and outputs of states come from the hidden values themselves."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 64, bias=False), nn.Linear(32, 16, bias=False)
        self.conv = nn.Conv1d(32, 32, 3, padding=2, groups=32)
        self.select, self.step = nn.Linear(32, 2 + 2 * 4, bias=False), nn.Linear(2, 32)
        self.a, self.skip, self.norm = nn.Parameter(torch.rand(32, 4)), nn.Parameter(torch.ones(32)), nn.RMSNorm(16)

    def forward(self, x):
        u, z = self.enter(self.norm(x)).chunk(2, -1)
        u = F.silu(self.conv(u.mT)[..., : x.shape[1]].mT)
        d, b, c = self.select(u).split([2, 4, 4], -1)
        d = F.softplus(self.step(d))
        state, steps = u.new_zeros(x.shape[0], 32, 4), []
        for t in range(x.shape[1]):
            decay = torch.exp(-d[:, t, :, None] * self.a.exp())
            state = decay * state + (d[:, t] * u[:, t])[..., None] * b[:, t, None]
            steps.append((state * c[:, t, None]).sum(-1))
        return x + self.leave((torch.stack(steps, 1) + u * self.skip) * F.silu(z))


@case(call(X), tp=BOTH, sequence=None)
class TimeMixed(nn.Module):
    """RWKV: each token is mixed with the one before; keys and values are summed with decays in log space."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.rand(3, 16))
        self.r, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.decay, self.first = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, -1))
        r, k, v = (n(x * m + before * (1 - m)) for n, m in zip((self.r, self.k, self.v), self.mix, strict=True))
        w, num, den, out = -self.decay.exp(), 0.0, 0.0, []
        top = torch.full_like(k[:, 0], -1e38)
        for t in range(x.shape[1]):
            new = torch.maximum(top, self.first + k[:, t])
            a, b = (top - new).exp(), (self.first + k[:, t] - new).exp()
            out.append((a * num + b * v[:, t]) / (a * den + b))
            new = torch.maximum(top + w, k[:, t])
            a, b = (top + w - new).exp(), (k[:, t] - new).exp()
            num, den, top = a * num + b * v[:, t], a * den + b, new
        return x + self.o(r.sigmoid() * torch.stack(out, 1))


@case(call(X), tp=BOTH)
class Retention(nn.Module):
    """Decays of their own for each head, a group norm over heads, a gate."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.g, self.o = (nn.Linear(16, 16) for _ in range(5))
        self.register_buffer("decay", torch.log(1 - 2.0 ** (-1 - torch.arange(4.0))))
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x):
        q, k, v = (parted(n(x), 4) for n in (self.q, self.k, self.v))
        t = torch.arange(x.shape[1])
        apart = (t[:, None] - t[None]).to(x.dtype)
        mask = (apart.clamp(min=0) * self.decay.to(x.dtype)[:, None, None]).exp().masked_fill(apart < 0, 0)
        mask = mask / mask.sum(-1, keepdim=True).sqrt()
        s = q @ k.mT * mask
        s = s / s.detach().sum(-1, keepdim=True).abs().clamp(min=1)
        y = joined(s @ v)
        y = self.norm(y.flatten(0, 1)).view_as(y)
        return self.o(F.silu(self.g(x)) * y)


def token_by_token(model, x):
    cache, steps = None, []
    for t in range(x.shape[1]):
        y, cache = model(x[:, t : t + 1], cache)
        steps.append(y)
    return torch.cat(steps, 1), [part.shape[1:] for part in cache]


@case(
    call(X),
    call(X, _do=token_by_token, _grad=False),
    inputs={"whole": {"x": X}, "next": {"x": X[:, :1], "cache": (floats(2, 2, 3, 4), floats(2, 2, 3, 4))}},
    tp=2,
    allowed=HOSTILE,
)
class GivenBack(nn.Module):
    """Two key heads for four queries; keys are returned, and given back with the next token."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 16)

    def forward(self, x, cache=None):
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (n(x).unflatten(-1, (2, 4)).transpose(1, 2) for n in (self.k, self.v))
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        y = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        return x + self.o(y.transpose(1, 2).flatten(2)), (k, v)


def stepped(model, x):
    model.reset(x.shape[0])
    return torch.cat([model(x[:, t : t + 1], t) for t in range(x.shape[1])], 1)


@case(call(X, 0), call(X, _do=stepped, _grad=False), allowed=HOSTILE, vary=False)
class KeptInBuffers(nn.Module):
    """Keys are written at their place into buffers that are made when decoding starts."""

    def __init__(self):
        super().__init__()
        self.a, self.keys, self.values = Attention(), None, None

    def reset(self, batch):
        width = self.a.k.weight.shape[0] // 4
        self.keys = torch.zeros(batch, 4, 8, width, dtype=torch.float64)
        self.values = torch.zeros_like(self.keys)

    def forward(self, x, at):
        q, k, v = (parted(n(x), 4) for n in (self.a.q, self.a.k, self.a.v))
        if self.keys is not None:
            self.keys[:, :, at : at + x.shape[1]] = k
            self.values[:, :, at : at + x.shape[1]] = v
            k, v = self.keys[:, :, : at + x.shape[1]], self.values[:, :, : at + x.shape[1]]
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.a.o(joined(y))


@case(
    call(X),
    call(X, floats(2, 4, 4, 4)),
    inputs={"one": {"x": X}, "two": {"x": X, "state": floats(2, 4, 4, 4)}},
    tp=BOTH,
    allowed=HOSTILE,
)
class StateOfChunks(nn.Module):
    """Linear attention over chunks; the state of each head is returned."""

    def __init__(self):
        super().__init__()
        self.a = Attention()

    def forward(self, x, state=None):
        q, k, v = (parted(n(x), 4) for n in (self.a.q, self.a.k, self.a.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if state is None:
            state = q.new_zeros(x.shape[0], 4, 4, 4)
        parts = []
        for a, b, c in zip(q.split(2, 2), k.split(2, 2), v.split(2, 2), strict=True):
            parts.append(a @ state + (a @ b.mT).tril() @ c)
            state = state + b.mT @ c
        return self.a.o(joined(torch.cat(parts, 2))), state


@case(call(X), tp=BOTH)
class DeltaRule(nn.Module):
    """Each token corrects what its key recalls, by a rate for each head."""

    def __init__(self):
        super().__init__()
        self.a, self.rate = Attention(), nn.Linear(16, 4)

    def forward(self, x):
        q, k, v = (parted(n(x), 4) for n in (self.a.q, self.a.k, self.a.v))
        k, rate = F.normalize(k, dim=-1), self.rate(x).sigmoid().mT[..., None]
        state, out = torch.zeros_like(k[..., 0, :, None] * v[..., 0, None, :]), []
        for t in range(x.shape[1]):
            recalled = torch.einsum("bhd,bhde->bhe", k[:, :, t], state)
            state = state + torch.einsum("bhd,bhe->bhde", k[:, :, t], rate[:, :, t] * (v[:, :, t] - recalled))
            out.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], state))
        return x + self.a.o(torch.stack(out, 1).flatten(2))


@case(call(X), tp=BOTH, sequence=None)
class LogScan(nn.Module):
    """minGRU: a scan by running sums of logs."""

    def __init__(self):
        super().__init__()
        self.z, self.h, self.o = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        z, h = self.z(x), self.h(x)
        decay = -F.softplus(z)
        positive = torch.where(h >= 0, (F.relu(h) + 0.5).log(), -F.softplus(-h))
        star = decay.cumsum(1)
        return x + self.o((star + (-F.softplus(-z) + positive - star).logcumsumexp(1)).exp())


@case(call(X), tp=BOTH, allowed=HOSTILE)
class FastWeights(nn.Module):
    """Test-time training: an inner weight of each head takes steps down its own loss, by autograd."""

    def __init__(self):
        super().__init__()
        self.a, self.start, self.rate = (
            Attention(),
            nn.Parameter(torch.randn(4, 4, 4) / 2),
            nn.Parameter(torch.tensor(0.1)),
        )

    def forward(self, x):
        q, k, v = (parted(n(x), 4) for n in (self.a.q, self.a.k, self.a.v))
        w, out = self.start.expand(x.shape[0], 4, 4, 4), []
        for a, b, c in zip(q.split(2, 2), k.split(2, 2), v.split(2, 2), strict=True):
            with torch.enable_grad():
                inner = w if w.requires_grad else w.detach().requires_grad_()
                loss = 0.5 * ((b @ inner - c) ** 2).sum()
                (slope,) = torch.autograd.grad(loss, inner, create_graph=self.training)
            w = w - self.rate * slope
            out.append(a @ w)
        return x + self.a.o(joined(torch.cat(out, 2)))


@case(call(X), call(X[:, :3]), call(X[:, 3:]), tp=BOTH, vary=False, allowed=HOSTILE)
class StreamedConvolution(nn.Module):
    """A causal convolution of hidden channels keeps its last inputs for the next call."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.kernel = nn.Parameter(torch.randn(32, 3))
        self.register_buffer("past", torch.zeros(2, 2, 32), persistent=False)

    def forward(self, x):
        h = torch.cat([self.past, self.up(x)], 1)
        self.past = h[:, -2:].detach()
        return self.down(sum(h[:, n : n + x.shape[1]] * self.kernel[:, n] for n in range(3)).relu())


@case(call(X), tp=BOTH, sequence=None)
class SlotsThatRecur(nn.Module):
    """Learned slots read the sequence by attention and write back, three times with the same weights."""

    def __init__(self):
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, 5, 16))
        self.read, self.write, self.feed = Attention(), Attention(), Mlp()
        self.norm = nn.LayerNorm(16)

    def seen(self, a, x, y):
        q, k, v = parted(a.q(x), 4), parted(a.k(y), 4), parted(a.v(y), 4)
        p = (q @ k.mT / 2).softmax(-2)
        p = p / (p.sum(-1, keepdim=True) + 1e-6)
        return a.o(joined(p @ v))

    def forward(self, x):
        s = self.slots.expand(x.shape[0], -1, -1)
        for _ in range(3):
            s = self.feed(s + self.seen(self.read, self.norm(s), x))
        return x + self.seen(self.write, self.norm(x), s)

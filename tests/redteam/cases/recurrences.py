"""Linear attention, gated scans and long filters, as recent models write them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, joined, parted

X = floats(2, 6, 16)
BOTH = (2, 4)


@case(call(X), tp=BOTH, sequence=None)
class Retention(Attention):
    """Decays of each head in a buffer, GroupNorm over each head, a gate."""

    def __init__(self):
        super().__init__()
        self.gate, self.norm = nn.Linear(16, 16), nn.GroupNorm(4, 16, affine=False)
        self.register_buffer("decay", torch.log(1 - 2.0 ** -(5 + torch.arange(4))))

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        t = torch.arange(x.shape[1])
        away = (t[:, None] - t).clamp(min=0)
        mask = torch.exp(away * self.decay[:, None, None]).tril()
        y = joined(((q @ k.transpose(-1, -2)) * mask) @ v)
        y = self.norm(y.reshape(-1, 16)).view_as(y)
        return F.silu(self.gate(x)) * y


@case(call(X), tp=BOTH, sequence=None)
class GatedLinear(Attention):
    """GLA: data-dependent decay of each key's channel, in a loop over time."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 16))

    def mixed(self, x):
        q, k, v, g = (parted(f(x), self.heads) for f in (self.q, self.k, self.v, self.decay))
        state, out = x.new_zeros(x.shape[0], self.heads, 4, 4), []
        for t in range(x.shape[1]):
            state = state * g[:, :, t].sigmoid()[..., None] + k[:, :, t, :, None] * v[:, :, t, None]
            out.append((q[:, :, t, None] @ state).squeeze(2))
        return joined(torch.stack(out, 2))


@case(call(X), tp=BOTH, sequence=None)
class MinGru(nn.Module):
    """The scan in log space, by cumsum and logcumsumexp."""

    def __init__(self):
        super().__init__()
        self.both, self.out = nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, x):
        hidden, gate = self.both(x).chunk(2, -1)
        keep, new = -F.softplus(gate), -F.softplus(-gate)
        value = new + torch.where(hidden >= 0, (F.relu(hidden) + 0.5).log(), -F.softplus(-hidden))
        a = keep.cumsum(1)
        return x + self.out((a + (value - a).logcumsumexp(1)).exp())


@case(call(X), tp=BOTH, sequence=None)
class RealGatedUnit(nn.Module):
    """Griffin: block-diagonal gates of each head, a root of what is left, a short convolution."""

    def __init__(self):
        super().__init__()
        self.x, self.y, self.out = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.conv = nn.Conv1d(32, 32, 3, padding=2, groups=32)
        self.gate, self.bias = nn.Parameter(torch.randn(4, 8, 8) / 3), nn.Parameter(torch.zeros(4, 8))
        self.a = nn.Parameter(torch.rand(32))

    def forward(self, x):
        h = self.conv(self.x(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        r = torch.einsum("btni,nij->btnj", h.unflatten(-1, (4, 8)), self.gate) + self.bias
        log_a = -8 * r.sigmoid().flatten(2) * F.softplus(self.a)
        state, out = torch.zeros_like(h[:, 0]), []
        for t in range(x.shape[1]):
            state = log_a[:, t].exp() * state + (1 - (2 * log_a[:, t]).exp() + 1e-6).sqrt() * h[:, t]
            out.append(state)
        return x + self.out(torch.stack(out, 1) * F.gelu(self.y(x)))


@case(call(X), tp=BOTH, sequence=None)
class FusedProjection(nn.Module):
    """Mamba-2: one projection is split to gate, values, B, C and steps; a norm after the gate; D skips."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(16, 32 + 32 + 4 + 4 + 4, bias=False)
        self.conv, self.norm, self.out = nn.Conv1d(40, 40, 3, padding=2, groups=40), nn.RMSNorm(32), nn.Linear(32, 16)
        self.a, self.d, self.step = (
            nn.Parameter(torch.rand(4)),
            nn.Parameter(torch.ones(4)),
            nn.Parameter(torch.rand(4)),
        )

    def forward(self, x):
        z, mixed, step = self.into(x).split([32, 40, 4], -1)
        mixed = F.silu(self.conv(mixed.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        h, b, c = mixed.split([32, 4, 4], -1)
        h, step = h.unflatten(-1, (4, 8)), F.softplus(step + self.step)
        state, out = x.new_zeros(x.shape[0], 4, 8, 4), []
        for t in range(x.shape[1]):
            decay = (-step[:, t] * self.a.exp())[..., None, None].exp()
            state = decay * state + (step[:, t, :, None] * h[:, t])[..., None] * b[:, t, None, None]
            out.append((state * c[:, t, None, None]).sum(-1) + self.d[:, None] * h[:, t])
        y = torch.stack(out, 1).flatten(2)
        return x + self.out(self.norm(y * F.silu(z)))


@case(call(X), tp=BOTH, sequence=None)
class DeltaChunks(Attention):
    """Gated delta rule, with keys of unit length and a beta of each head."""

    def __init__(self):
        super().__init__()
        self.beta, self.alpha = nn.Linear(16, 4), nn.Linear(16, 4)
        self.rate = nn.Parameter(torch.rand(4))

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        beta = self.beta(x).sigmoid().transpose(1, 2)
        decay = (-self.rate.exp() * F.softplus(self.alpha(x))).transpose(1, 2).exp()
        state, out = x.new_zeros(x.shape[0], self.heads, 4, 4), []
        for t in range(x.shape[1]):
            state = state * decay[:, :, t, None, None]
            old = (state * k[:, :, t, :, None]).sum(-2)
            state = state + k[:, :, t, :, None] * (beta[:, :, t, None] * (v[:, :, t] - old))[:, :, None]
            out.append((state * q[:, :, t, :, None]).sum(-2))
        return joined(torch.stack(out, 2))


@case(call(X), tp=BOTH, sequence=None)
class ExponentialGates(Attention):
    """mLSTM: stabilised by a running maximum, normed by the larger of a product and one."""

    def __init__(self):
        super().__init__()
        self.i, self.f = nn.Linear(16, 4), nn.Linear(16, 4)

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        i, f = self.i(x).transpose(1, 2), F.logsigmoid(self.f(x)).transpose(1, 2)
        far = f.cumsum(-1)
        d = (far[..., :, None] - far[..., None, :] + i[..., None, :]).masked_fill(
            ~torch.ones(x.shape[1], x.shape[1]).bool().tril(), float("-inf")
        )
        most = d.amax(-1, keepdim=True)
        w = (q @ k.transpose(-1, -2) / 2) * (d - most).exp()
        return joined((w / torch.maximum(w.sum(-1, keepdim=True).abs(), (-most).exp())) @ v)


@case(call(X), tp=BOTH)
class ComplexState(nn.Module):
    """S4D: a kernel of complex exponentials of each channel, applied by FFT."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.c = nn.Parameter(torch.randn(32, 4, 2))
        self.log_re, self.im = nn.Parameter(torch.rand(32, 4).log()), nn.Parameter(torch.randn(32, 4))
        self.step, self.d = nn.Parameter(torch.rand(32)), nn.Parameter(torch.randn(32))

    def forward(self, x):
        u, n = self.up(x).transpose(1, 2), x.shape[1]
        a = torch.complex(-self.log_re.exp(), self.im) * self.step.exp()[:, None]
        kernel = (
            2 * torch.einsum("hn,hnl->hl", torch.view_as_complex(self.c), (a[..., None] * torch.arange(n)).exp()).real
        )
        y = torch.fft.irfft(torch.fft.rfft(u, 2 * n) * torch.fft.rfft(kernel, 2 * n), 2 * n)[..., :n]
        return x + self.down(F.gelu(y + u * self.d[:, None]).transpose(1, 2))


@case(call(X), tp=BOTH)
class ImplicitFilter(nn.Module):
    """Hyena: filters come from an MLP over positions, gates before and after."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(16, 96), nn.Linear(32, 16)
        self.short = nn.Conv1d(96, 96, 3, padding=2, groups=96)
        self.filter = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 32))

    def forward(self, x):
        n = x.shape[1]
        a, b, v = self.short(self.into(x).transpose(1, 2))[..., :n].chunk(3, 1)
        t = torch.arange(n, dtype=x.dtype)[:, None]
        h = self.filter(torch.cat([t / 8, t.sin(), t.cos()], -1)).t() * torch.exp(-t.t() / 4)
        y = torch.fft.irfft(torch.fft.rfft(v * b, 2 * n) * torch.fft.rfft(h, 2 * n), 2 * n)[..., :n]
        return x + self.out((y * a).transpose(1, 2))


@case(call(X), tp=BOTH, sequence=None)
class ReceptanceWeighted(nn.Module):
    """RWKV-4: time decay and a bonus of each channel, numerically safe."""

    def __init__(self):
        super().__init__()
        self.k, self.v, self.r = (nn.Linear(16, 32, bias=False) for _ in range(3))
        self.o = nn.Linear(32, 16, bias=False)
        self.decay, self.first, self.mix = (
            nn.Parameter(torch.randn(32)),
            nn.Parameter(torch.randn(32)),
            nn.Parameter(torch.rand(16)),
        )

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, -1))
        m = x * self.mix + before * (1 - self.mix)
        k, v, r = self.k(m), self.v(m), self.r(m).sigmoid()
        a = b = torch.zeros_like(k[:, 0])
        p, out = torch.full_like(a, -1e38), []
        for t in range(x.shape[1]):
            q = torch.maximum(p, self.first + k[:, t])
            e, f = (p - q).exp(), (self.first + k[:, t] - q).exp()
            out.append((e * a + f * v[:, t]) / (e * b + f))
            q = torch.maximum(p - self.decay.exp(), k[:, t])
            e, f = (p - self.decay.exp() - q).exp(), (k[:, t] - q).exp()
            a, b, p = e * a + f * v[:, t], e * b + f, q
        return x + self.o(r * torch.stack(out, 1))


@case(call(X), tp=BOTH)
class LearnsInside(Attention):
    """Test-time training: a weight of each head takes a gradient step for each token, written by hand."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.randn(4, 4, 4) / 2)

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        w, out = self.start.expand(x.shape[0], -1, -1, -1), []
        for t in range(x.shape[1]):
            error = torch.einsum("bhi,bhij->bhj", k[:, :, t], w) - v[:, :, t]
            w = w - 0.1 * k[:, :, t, :, None] * error[:, :, None]
            out.append(torch.einsum("bhi,bhij->bhj", q[:, :, t], w))
        return joined(torch.stack(out, 2))


@case(call(X), tp=BOTH)
class ChunkState(Attention):
    """Chunks of two: within by scores, between by a state."""

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads).unflatten(2, (-1, 2)) for f in (self.q, self.k, self.v))
        inner = (q @ k.transpose(-1, -2)).tril() @ v
        states = (k.transpose(-1, -2) @ v).cumsum(2)
        before = F.pad(states, (0, 0, 0, 0, 1, -1))
        return joined((inner + q @ before).flatten(2, 3))


@case(call(X), tp=BOTH, allowed=HOSTILE)
class StateAcrossHeads(Attention):
    """The state of a head is mixed with its neighbour's at each step."""

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        state, out = x.new_zeros(x.shape[0], self.heads, 4, 4), []
        for t in range(x.shape[1]):
            state = 0.5 * state + 0.1 * state.roll(1, 1) + k[:, :, t, :, None] * v[:, :, t, None]
            out.append((q[:, :, t, None] @ state).squeeze(2))
        return joined(torch.stack(out, 2))

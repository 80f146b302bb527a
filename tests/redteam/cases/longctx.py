"""Decoders over mixers of the literature, as their repositories write them, for context parallelism."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, ids

IDS = ids(2, 12, below=30)
D, H = 16, 4


class Block(nn.Module):
    def __init__(self, mixer):
        super().__init__()
        self.n1, self.n2, self.mixer = nn.LayerNorm(D), nn.LayerNorm(D), mixer
        self.up, self.down = nn.Linear(D, 32), nn.Linear(32, D)

    def forward(self, x):
        x = x + self.mixer(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Decoder(nn.Module):
    mixer: type
    blocks = 2

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(30, D), nn.Embedding(64, D)
        self.layers = nn.ModuleList(Block(type(self).mixer()) for _ in range(self.blocks))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 30, bias=False)

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids) + self.place(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].reshape(-1, 30), labels[:, 1:].reshape(-1), ignore_index=-100)


LABELS = IDS.clone()
LABELS[0, :3] = -100


def decoder(mixer, **options):
    model = type(mixer.__name__, (Decoder,), {"mixer": mixer})
    model.__module__ = mixer.__module__
    model.__qualname__ = f"{mixer.__qualname__}Decoder"
    case(call(IDS), call(IDS, labels=LABELS, _train=True), allowed=HOSTILE, tp=(), cp=2, **options)(model)
    return mixer


def heads(x, n=H):
    return x.view(*x.shape[:2], n, -1).transpose(1, 2)


def back(x):
    return x.transpose(1, 2).flatten(2)


class Qkv(nn.Module):
    def __init__(self, out=D):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(out, D)

    def split(self, x):
        return (heads(part) for part in self.qkv(x).chunk(3, -1))


@decoder
class Retention(Qkv):
    """RetNet's parallel form: a decay for each head, group norm over heads, a gate."""

    def __init__(self):
        super().__init__()
        self.register_buffer("gamma", 1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64)))
        self.gate, self.gn = nn.Linear(D, D), nn.GroupNorm(H, D)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.split(x)
        n = torch.arange(t, device=x.device)
        rel = (n[:, None] - n[None, :]).clamp(min=0)
        mask = torch.tril(self.gamma[:, None, None] ** rel)
        y = (q @ k.transpose(-1, -2) / math.sqrt(D // H) * mask) @ v
        y = self.gn(back(y).reshape(b * t, D)).view(b, t, D)
        return self.out(F.silu(self.gate(x)) * y)


@decoder
class GatedLinear(nn.Module):
    """GLA, one step after another, low-rank gate."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.g = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.low, self.high, self.o = nn.Linear(D, 4, bias=False), nn.Linear(4, D), nn.Linear(D, D)
        self.norm = nn.LayerNorm(D // H)

    def forward(self, x):
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        a = heads(torch.sigmoid(self.high(self.low(x))) ** (1 / 16))
        s = x.new_zeros(x.shape[0], H, D // H, D // H)
        out = []
        for t in range(x.shape[1]):
            s = s * a[:, :, t, :, None] + k[:, :, t, :, None] * v[:, :, t, None, :]
            out.append((q[:, :, t, :, None] * s).sum(-2))
        y = self.norm(torch.stack(out, 2))
        return self.o(back(y) * F.silu(self.g(x)))


@decoder
class HyenaFilter(nn.Module):
    """An implicit long filter, by FFT, between gates from short convolutions."""

    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.short = nn.Conv1d(3 * D, 3 * D, 3, padding=2, groups=3 * D)
        self.filter = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, D))
        self.bias = nn.Parameter(torch.randn(D))

    def forward(self, x):
        t = x.shape[1]
        u = self.short(self.inp(x).transpose(1, 2))[..., :t]
        x0, x1, v = u.chunk(3, 1)
        pos = torch.linspace(0, 1, t, dtype=x.dtype, device=x.device)[:, None]
        h = (self.filter(pos) * torch.exp(-3 * pos)).t()
        v = v * x1
        y = torch.fft.irfft(torch.fft.rfft(v, 2 * t) * torch.fft.rfft(h, 2 * t), 2 * t)[..., :t]
        return self.out(((y + v * self.bias[:, None]) * x0).transpose(1, 2))


@decoder
class AftFull(nn.Module):
    """Attention-free: position biases, no heads."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.u, self.w = nn.Parameter(torch.randn(64, 4)), nn.Parameter(torch.randn(64, 4))

    def forward(self, x):
        t = x.shape[1]
        bias = (self.u[:t] @ self.w[:t].t()).masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf"))
        k, e = self.k(x).exp(), bias.exp()
        return self.o(torch.sigmoid(self.q(x)) * (e @ (k * self.v(x))) / (e @ k))


@decoder
class AftSimple(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        e = k.exp()
        return self.o(torch.sigmoid(q) * (e * v).cumsum(1) / e.cumsum(1))


@decoder
class Performer(Qkv):
    """Random features, causal by a cumulated sum."""

    def __init__(self):
        super().__init__()
        self.register_buffer("omega", torch.randn(D // H, 8))

    def phi(self, x):
        return torch.exp(x @ self.omega - x.pow(2).sum(-1, keepdim=True) / 2) / math.sqrt(8)

    def forward(self, x):
        q, k, v = self.split(x)
        q, k = self.phi(q), self.phi(k)
        kv = torch.einsum("bhtf,bhtd->bhtfd", k, v).cumsum(2)
        y = torch.einsum("bhtf,bhtfd->bhtd", q, kv)
        z = torch.einsum("bhtf,bhtf->bht", q, k.cumsum(2))
        return self.out(back(y / (z[..., None] + 1e-6)))


@decoder
class SlidingWindow(Qkv):
    def forward(self, x):
        q, k, v = self.split(x)
        i = torch.arange(x.shape[1], device=x.device)
        far = i[:, None] - i[None, :]
        mask = (far >= 0) & (far < 4)
        return self.out(back(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


@decoder
class LocalChunks(Qkv):
    """Attention within chunks of 4, padded to a multiple."""

    def forward(self, x):
        b, t, _ = x.shape
        pad = -t % 4
        q, k, v = (heads(F.pad(p, (0, 0, 0, pad))) for p in self.qkv(x).chunk(3, -1))
        n = (t + pad) // 4
        q, k, v = (p.reshape(b, H, n, 4, -1) for p in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(back(y.reshape(b, H, n * 4, -1)[:, :, :t]))


@decoder
class SpatialGate(nn.Module):
    """gMLP's gate, by a causal convolution over time."""

    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(D, 32), nn.Linear(16, D)
        self.norm, self.conv = nn.LayerNorm(16), nn.Conv1d(16, 16, 5, groups=16)

    def forward(self, x):
        u, v = F.gelu(self.inp(x)).chunk(2, -1)
        v = self.conv(F.pad(self.norm(v).transpose(1, 2), (4, 0))).transpose(1, 2)
        return self.out(u * v)


@decoder
class ExponentialAverage(nn.Module):
    """Mega's damped average, as a kernel of the length of the input."""

    def __init__(self):
        super().__init__()
        self.alpha, self.delta = nn.Parameter(torch.randn(D, 2)), nn.Parameter(torch.randn(D, 2))
        self.beta, self.eta = nn.Parameter(torch.randn(D, 2)), nn.Parameter(torch.randn(D, 2))
        self.gate, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        t = x.shape[1]
        a, d = torch.sigmoid(self.alpha), torch.sigmoid(self.delta)
        decay = torch.log(1 - a * d)[..., None] * torch.arange(t, device=x.device)
        kernel = ((a * self.beta * self.eta)[..., None] * decay.exp()).sum(1)
        y = torch.fft.irfft(torch.fft.rfft(x.transpose(1, 2), 2 * t) * torch.fft.rfft(kernel, 2 * t), 2 * t)[..., :t]
        return self.out(F.silu(y.transpose(1, 2)) * torch.sigmoid(self.gate(x)))


@decoder
class LinearRecurrence(nn.Module):
    """RG-LRU: gates from the input, a normalised step."""

    def __init__(self):
        super().__init__()
        self.x, self.y, self.o = nn.Linear(D, 32), nn.Linear(D, 32), nn.Linear(32, D)
        self.conv = nn.Conv1d(32, 32, 4, padding=3, groups=32)
        self.r, self.i, self.lam = nn.Linear(32, 32), nn.Linear(32, 32), nn.Parameter(torch.randn(32))

    def forward(self, x):
        t = x.shape[1]
        u = self.conv(self.x(x).transpose(1, 2))[..., :t].transpose(1, 2)
        log_a = -8 * torch.sigmoid(self.r(u)) * F.softplus(self.lam)
        a = log_a.exp()
        gated = torch.sqrt(1 - torch.exp(2 * log_a) + 1e-6) * torch.sigmoid(self.i(u)) * u
        h, out = torch.zeros_like(u[:, 0]), []
        for n in range(t):
            h = a[:, n] * h + gated[:, n]
            out.append(h)
        return self.o(torch.stack(out, 1) * F.gelu(self.y(x)))


@decoder
class MatrixLstm(Qkv):
    """mLSTM's parallel form with its stabiliser."""

    def __init__(self):
        super().__init__()
        self.i, self.f, self.skip = nn.Linear(D, H), nn.Linear(D, H), nn.Parameter(torch.ones(D))

    def forward(self, x):
        t = x.shape[1]
        q, k, v = self.split(x)
        i, f = self.i(x).transpose(1, 2), F.logsigmoid(self.f(x)).transpose(1, 2)
        c = F.pad(f.cumsum(-1), (1, 0))
        d = c[..., 1:, None] - c[..., None, 1:] + i[..., None, :]
        d = d.masked_fill(torch.ones(t, t, device=x.device).triu(1).bool(), -float("inf"))
        m = d.amax(-1, keepdim=True)
        s = (q @ k.transpose(-1, -2)) / math.sqrt(D // H) * (d - m).exp()
        n = torch.maximum(s.sum(-1, keepdim=True).abs(), (-m).exp())
        return self.out(back((s / n) @ v) + self.skip * x)


@decoder
class ScalarLstm(nn.Module):
    """sLSTM with block-diagonal recurrence of heads."""

    def __init__(self):
        super().__init__()
        self.w, self.r = nn.Linear(D, 4 * D), nn.Parameter(torch.randn(H, D // H, 4 * D // H) / 2)
        self.out = nn.Linear(D, D)

    def forward(self, x):
        b, t, _ = x.shape
        w = self.w(x).view(b, t, H, -1)
        h = c = n = x.new_zeros(b, H, D // H)
        out = []
        for step in range(t):
            z, i, f, o = (w[:, step] + torch.einsum("bhd,hde->bhe", h, self.r)).chunk(4, -1)
            c = torch.sigmoid(f) * c + i.exp().clamp(max=20) * torch.tanh(z)
            n = torch.sigmoid(f) * n + i.exp().clamp(max=20)
            h = torch.sigmoid(o) * c / n.clamp(min=1e-6)
            out.append(h)
        return self.out(torch.stack(out, 1).flatten(2))


@decoder
class ShiftedMix(nn.Module):
    """RWKV-6: a token shift, data-dependent decay, a bonus."""

    def __init__(self):
        super().__init__()
        self.mu = nn.Parameter(torch.rand(5, D))
        self.r, self.k, self.v, self.g, self.o = (nn.Linear(D, D, bias=False) for _ in range(5))
        self.w1, self.w2 = nn.Linear(D, 4, bias=False), nn.Linear(4, D)
        self.u, self.ln = nn.Parameter(torch.randn(H, D // H)), nn.GroupNorm(H, D)

    def forward(self, x):
        b, t, _ = x.shape
        past = F.pad(x, (0, 0, 1, -1))
        r, k, v, g, w = (x + (past - x) * mu for mu in self.mu)
        r, k, v, g = heads(self.r(r)), heads(self.k(k)), heads(self.v(v)), F.silu(self.g(g))
        w = heads(torch.exp(-torch.exp(self.w2(torch.tanh(self.w1(w))))))
        s, out = x.new_zeros(b, H, D // H, D // H), []
        for n in range(t):
            kv = k[:, :, n, :, None] * v[:, :, n, None, :]
            out.append((r[:, :, n, None] @ (s + self.u[..., None] * kv)).squeeze(-2))
            s = s * w[:, :, n, :, None] + kv
        y = self.ln(torch.stack(out, 1).reshape(b * t, D)).view(b, t, D)
        return self.o(y * g)


@decoder
class Differential(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(D, 2 * D), nn.Linear(D, 2 * D), nn.Linear(D, D), nn.Linear(D, D)
        self.lq, self.lk = nn.Parameter(torch.randn(D // H) * 0.1), nn.Parameter(torch.randn(D // H) * 0.1)
        self.norm = nn.LayerNorm(D // H)

    def forward(self, x):
        b, t, _ = x.shape
        q, k = (p(x).view(b, t, 2 * H, -1).transpose(1, 2) for p in (self.q, self.k))
        v = heads(self.v(x))
        s = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(
            torch.ones(t, t, device=x.device).triu(1).bool(), float("-inf")
        )
        a = s.softmax(-1).view(b, H, 2, t, t)
        lam = torch.exp((self.lq * self.lk).sum()) - 0.2
        return self.o(back(self.norm((a[:, :, 0] - lam * a[:, :, 1]) @ v) * 0.8))


@decoder
class MultiQueryAlibi(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(D, D), nn.Linear(D, 2 * D // H), nn.Linear(D, D)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, H + 1, dtype=torch.float64), persistent=False)

    def forward(self, x):
        t = x.shape[1]
        q, (k, v) = heads(self.q(x)), self.kv(x).chunk(2, -1)
        i = torch.arange(t, device=x.device)
        bias = -self.slopes[:, None, None] * (i[:, None] - i[None, :]).abs()
        s = q @ k[:, None].transpose(-1, -2) / 2 + bias
        s = s.masked_fill(i[:, None] < i[None, :], float("-inf"))
        return self.o(back(s.softmax(-1) @ v[:, None]))


@decoder
class RelativeBuckets(Qkv):
    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(8, H)

    def forward(self, x):
        t = x.shape[1]
        q, k, v = self.split(x)
        i = torch.arange(t, device=x.device)
        rel = (i[:, None] - i[None, :]).clamp(0, 7)
        mask = self.bias(rel).permute(2, 0, 1).masked_fill(i[:, None] < i[None, :], float("-inf"))
        return self.out(back(F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None])))


@decoder
class Forgetting(Qkv):
    """FoX: a forget gate of each head, cumulated, as a bias."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(D, H)

    def forward(self, x):
        t = x.shape[1]
        q, k, v = self.split(x)
        c = F.logsigmoid(self.f(x)).cumsum(1).transpose(1, 2)
        bias = (c[..., :, None] - c[..., None, :]).masked_fill(
            torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1), float("-inf")
        )
        return self.out(back(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))


@decoder
class CosineHeads(Qkv):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(H, 1, 1))

    def forward(self, x):
        t = x.shape[1]
        q, k, v = self.split(x)
        s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) * self.scale.exp()
        s = s + torch.full((t, t), float("-inf"), device=x.device).triu(1)
        return self.out(back(s.softmax(-1) @ v))


@decoder
class TalkingHeads(Qkv):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Parameter(torch.eye(H)), nn.Parameter(torch.eye(H) + 0.1)

    def forward(self, x):
        t = x.shape[1]
        q, k, v = self.split(x)
        s = torch.einsum("bhij,hg->bgij", q @ k.transpose(-1, -2) / 2, self.before)
        s = s.masked_fill(torch.ones(t, t, device=x.device).triu(1).bool(), float("-inf"))
        a = torch.einsum("bhij,hg->bgij", s.softmax(-1), self.after)
        return self.out(back(a @ v))


@decoder
class DepthRouted(nn.Module):
    """Mixture of depths: the top tokens of a sequence go through an MLP, the others not."""

    def __init__(self):
        super().__init__()
        self.router, self.up, self.down = nn.Linear(D, 1), nn.Linear(D, 32), nn.Linear(32, D)

    def forward(self, x):
        w = self.router(x).squeeze(-1)
        top = w.topk(4, dim=1)
        at = top.indices[..., None].expand(-1, -1, D)
        y = self.down(F.relu(self.up(x.gather(1, at)))) * torch.sigmoid(top.values)[..., None]
        return torch.zeros_like(x).scatter_add(1, at, y)


@decoder
class Latents(nn.Module):
    """Set attention through a few learned latents."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, D))
        self.q1, self.kv1, self.q2, self.kv2 = (
            nn.Linear(D, D),
            nn.Linear(D, 2 * D),
            nn.Linear(D, D),
            nn.Linear(D, 2 * D),
        )
        self.out = nn.Linear(D, D)

    def forward(self, x):
        z = self.latents.expand(x.shape[0], -1, -1)
        k, v = self.kv1(x).chunk(2, -1)
        z = back(F.scaled_dot_product_attention(heads(self.q1(z)), heads(k), heads(v)))
        k, v = self.kv2(z).chunk(2, -1)
        return self.out(back(F.scaled_dot_product_attention(heads(self.q2(x)), heads(k), heads(v))))


@decoder
class Hourglass(nn.Module):
    """Tokens are pooled in pairs, mixed and repeated."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.MultiheadAttention(D, H, batch_first=True), nn.Linear(D, D)

    def forward(self, x):
        b, t, d = x.shape
        padded = F.pad(x, (0, 0, 0, -t % 2))
        pooled = padded.view(b, -1, 2, d).mean(2)
        y, _ = self.inner(pooled, pooled, pooled, need_weights=False)
        return self.out(y.repeat_interleave(2, 1)[:, :t])


@decoder
class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.v, self.o = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        n = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)
        return self.o(self.v(x).cumsum(1) / n[:, None])


@decoder
class SequenceStatistics(nn.Module):
    """Instance norm over time and a squeeze by the mean."""

    def __init__(self):
        super().__init__()
        self.inp, self.out, self.fc = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.norm = nn.InstanceNorm1d(D, affine=True)

    def forward(self, x):
        h = self.norm(self.inp(x).transpose(1, 2)).transpose(1, 2)
        return self.out(h * torch.sigmoid(self.fc(h.mean(1, keepdim=True))))


@decoder
class BatchStatistics(nn.Module):
    """Batch norm over all tokens, with running statistics."""

    def __init__(self):
        super().__init__()
        self.inp, self.out, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.BatchNorm1d(D)

    def forward(self, x):
        return self.out(F.relu(self.norm(self.inp(x).transpose(1, 2)).transpose(1, 2)).cumsum(1))


@decoder
class Reversed(nn.Module):
    """A two-way recurrence by flipping."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.o = nn.GRU(D, D, batch_first=True), nn.GRU(D, D, batch_first=True), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.o(torch.cat([self.a(x)[0], self.b(x.flip(1))[0].flip(1)], -1))


@decoder
class GroupedLatent(nn.Module):
    """MLA: a latent for keys and values, a shared rotary part."""

    def __init__(self):
        super().__init__()
        self.q, self.down, self.norm = nn.Linear(D, H * 6), nn.Linear(D, 8 + 2), nn.LayerNorm(8)
        self.up, self.o = nn.Linear(8, H * 8), nn.Linear(D, D)

    def rope(self, x):
        a = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)[:, None]
        x1, x2 = x.chunk(2, -1)
        return torch.cat([x1 * a.cos() - x2 * a.sin(), x1 * a.sin() + x2 * a.cos()], -1)

    def forward(self, x):
        b, t, _ = x.shape
        q = heads(self.q(x))
        c, r = self.down(x).split([8, 2], -1)
        k, v = heads(self.up(self.norm(c))).chunk(2, -1)
        q = torch.cat([q[..., :4], self.rope(q[..., 4:])], -1)
        k = torch.cat([k, self.rope(r)[:, None].expand(-1, H, -1, -1)], -1)
        return self.o(back(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


@decoder
class SinkAttention(Qkv):
    def __init__(self):
        super().__init__()
        self.sink = nn.Parameter(torch.randn(H))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.split(x)
        s = (q @ k.transpose(-1, -2) / 2).masked_fill(torch.ones(t, t, device=x.device).triu(1).bool(), -1e9)
        s = torch.cat([s, self.sink.view(1, H, 1, 1).expand(b, -1, t, 1)], -1)
        return self.out(back(s.softmax(-1)[..., :-1] @ v))


@decoder
class RandomSlots(nn.Module):
    """Attention over strided keys beside a local window of own tokens."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        far = F.scaled_dot_product_attention(q, k[:, :, ::3], v[:, :, ::3])
        near = v + torch.cat([torch.zeros_like(v[:, :, :1]), v[:, :, :-1]], 2)
        return self.o(back(far + near))

"""Mixers of the literature in one decoder, over context parallelism; its loss is all that it returns in training."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from ..case import call, case, ids

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
    case(call(IDS), call(IDS, labels=LABELS, _train=True), tp=(), cp=2, **options)(model)
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
class BatchStatistics(nn.Module):
    """Batch norm over all tokens, with running statistics."""

    def __init__(self):
        super().__init__()
        self.inp, self.out, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.BatchNorm1d(D)

    def forward(self, x):
        return self.out(F.relu(self.norm(self.inp(x).transpose(1, 2)).transpose(1, 2)).cumsum(1))


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

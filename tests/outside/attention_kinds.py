"""Attention as people write it who know no library: fused, by einsum, windowed, shared between layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 48
HEADS = 12
VOCABULARY = 120


class TorchEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(VOCABULARY, WIDTH)
        self.e = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, dropout=0.0, norm_first=True),
            3,
            enable_nested_tensor=False,
        )
        self.o = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.o(self.e(self.t(ids)))


class TorchSeq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(VOCABULARY, WIDTH)
        self.m = nn.Transformer(WIDTH, HEADS, 2, 2, 4 * WIDTH, batch_first=True, dropout=0.0)
        self.o = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        return self.o(self.m(self.t(src), self.t(tgt), tgt_mask=mask))


class FunctionalAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(VOCABULARY, WIDTH)
        self.ms = nn.ModuleList([nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2)])
        self.f = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)]
        )
        self.n = nn.LayerNorm(WIDTH)
        self.o = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.t(ids)
        for m, f in zip(self.ms, self.f, strict=True):
            y, _ = m(self.n(x), self.n(x), self.n(x), need_weights=False)
            x = x + y
            x = x + f(x)
        return self.o(x)


class EinsumBlock(nn.Module):
    """one fused matrix as a raw Parameter, einsum everything"""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, WIDTH, HEADS, WIDTH // HEADS) * 0.1)
        self.p = nn.Parameter(torch.randn(HEADS, WIDTH // HEADS, WIDTH) * 0.1)
        self.a = nn.Parameter(torch.randn(2, WIDTH, 96) * 0.1)
        self.b = nn.Parameter(torch.randn(96, WIDTH) * 0.1)
        self.g = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-06) * self.g
        q, k, v = torch.einsum("bld,cdhe->cbhle", h, self.w)
        a = torch.einsum("bhle,bhme->bhlm", q, k) / math.sqrt(WIDTH // HEADS)
        a = a.masked_fill(torch.triu(torch.ones_like(a, dtype=torch.bool), 1), -1e30).softmax(-1)
        x = x + torch.einsum("bhlm,bhme,hed->bld", a, v, self.p)
        u, g = torch.einsum("bld,cdf->cblf", x, self.a)
        return x + F.silu(g) * u @ self.b


class EinsumGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.1)
        self.l = nn.ModuleList([EinsumBlock() for _ in range(3)])

    def forward(self, ids):
        x = F.embedding(ids, self.t) * math.sqrt(WIDTH)
        for layer in self.l:
            x = layer(x)
        return x @ self.t.T


class ParallelBlock(nn.Module):
    """PaLM: one fused matrix for q,k,v,ff ; multi query ; parallel"""

    def __init__(self, dh=8, ff=96):
        super().__init__()
        self.n = nn.LayerNorm(WIDTH)
        self.dh, self.ff = (dh, ff)
        self.fused = (HEADS * dh, dh, dh, 2 * ff)
        self.w = nn.Linear(WIDTH, sum(self.fused), bias=False)
        self.ao = nn.Linear(HEADS * dh, WIDTH, bias=False)
        self.fo = nn.Linear(ff, WIDTH, bias=False)

    def forward(self, x):
        q, k, v, f = self.w(self.n(x)).split(self.fused, -1)
        q = q.unflatten(-1, (HEADS, self.dh)).transpose(1, 2)
        a = torch.einsum("bhid,bjd->bhij", q * self.dh ** (-0.5), k)
        size = x.shape[1]
        a = a.masked_fill(torch.ones(size, size, dtype=torch.bool).triu(1), -torch.finfo(a.dtype).max).softmax(-1)
        o = torch.einsum("bhij,bjd->bhid", a, v).transpose(1, 2).flatten(2)
        u, g = f.chunk(2, -1)
        return x + self.ao(o) + self.fo(F.silu(g) * u)


class PaLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(VOCABULARY, WIDTH)
        self.l = nn.Sequential(ParallelBlock(), ParallelBlock())
        self.n = nn.LayerNorm(WIDTH)
        self.o = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.o.weight = self.t.weight

    def forward(self, ids):
        return self.o(self.n(self.l(self.t(ids))))


class Swin(nn.Module):
    """windowed attention with relative bias table and shift"""

    def __init__(self, w=4):
        super().__init__()
        self.w = w
        self.p = nn.Linear(12, WIDTH)
        self.q = nn.Linear(WIDTH, 3 * WIDTH)
        self.o = nn.Linear(WIDTH, WIDTH)
        self.tb = nn.Parameter(torch.randn((2 * w - 1) ** 2, HEADS) * 0.02)
        self.m = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))
        self.red = nn.Linear(4 * WIDTH, 2 * WIDTH)
        self.h = nn.Linear(2 * WIDTH, 5)
        c = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(w), indexing="ij")).flatten(1)
        r = (c[:, :, None] - c[:, None]).permute(1, 2, 0) + w - 1
        self.register_buffer("ri", r[..., 0] * (2 * w - 1) + r[..., 1])

    def forward(self, x):
        x = self.p(x)
        B, Hh, Ww, C = x.shape
        w = self.w
        y = (
            torch.roll(x, (-2, -2), (1, 2))
            .view(B, Hh // w, w, Ww // w, w, C)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(-1, w * w, C)
        )
        q, k, v = self.q(y).view(-1, w * w, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        a = q @ k.transpose(-1, -2) * (C // HEADS) ** (-0.5) + self.tb[self.ri.view(-1)].view(
            w * w, w * w, HEADS
        ).permute(2, 0, 1)
        y = (
            self.o((a.softmax(-1) @ v).transpose(1, 2).reshape(-1, w * w, C))
            .view(B, Hh // w, Ww // w, w, w, C)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(B, Hh, Ww, C)
        )
        x = x + torch.roll(y, (2, 2), (1, 2))
        x = x + self.m(x)
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.h(self.red(x).mean((1, 2)))


class SharedRelativeBias(nn.Module):
    """relative bias computed once, shared by layers through an argument; tied in/out embeddings with scale"""

    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(VOCABULARY, WIDTH)
        self.rb = nn.Embedding(8, HEADS)
        self.L = nn.ModuleList(
            [
                nn.ModuleDict(
                    dict(
                        q=nn.Linear(WIDTH, 72, bias=False),
                        k=nn.Linear(WIDTH, 72, bias=False),
                        v=nn.Linear(WIDTH, 72, bias=False),
                        o=nn.Linear(72, WIDTH, bias=False),
                        wi=nn.Linear(WIDTH, 96, bias=False),
                        wo=nn.Linear(96, WIDTH, bias=False),
                    )
                )
                for _ in range(2)
            ]
        )

    def forward(self, ids):
        x = self.t(ids)
        size = ids.shape[1]
        i = torch.arange(size)
        bias = self.rb((i[:, None] - i).abs().clamp(max=7)).permute(2, 0, 1)[None]
        for m in self.L:
            q, k, v = [m[n](x).view(*ids.shape, HEADS, -1).transpose(1, 2) for n in "qkv"]
            x = x + m["o"](((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).reshape(*ids.shape, -1))
            x = x + m["wo"](F.relu(m["wi"](x)))
        return F.linear(x * WIDTH ** (-0.5), self.t.weight)


class SharedKeysAndValues(nn.Module):
    """GQA by expand, kv from first layer used by others; qk norm over full width; soft cap; sink logits"""

    def __init__(self, kv=4):
        super().__init__()
        self.kv = kv
        self.t = nn.Embedding(VOCABULARY, WIDTH)
        self.k = nn.Linear(WIDTH, kv * 6)
        self.v = nn.Linear(WIDTH, kv * 6)
        self.q = nn.ModuleList([nn.Linear(WIDTH, HEADS * 6) for _ in range(3)])
        self.qn = nn.ModuleList([nn.RMSNorm(HEADS * 6) for _ in range(3)])
        self.o = nn.ModuleList([nn.Linear(HEADS * 6, WIDTH) for _ in range(3)])
        self.si = nn.ParameterList([nn.Parameter(torch.randn(HEADS)) for _ in range(3)])
        self.h = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.t(ids)
        b, size, _ = x.shape
        k = self.k(x).view(b, size, self.kv, 1, 6).expand(-1, -1, -1, HEADS // self.kv, -1).reshape(b, size, HEADS, 6)
        v = self.v(x).view(b, size, self.kv, 6).repeat_interleave(HEADS // self.kv, 2)
        for q, n, o, si in zip(self.q, self.qn, self.o, self.si, strict=True):
            a = torch.einsum("blhd,bmhd->bhlm", n(q(x)).view(b, size, HEADS, 6), k)
            a = 30 * torch.tanh(a / 30)
            a = torch.cat([a, si[None, :, None, None].expand(b, -1, size, 1)], -1).softmax(-1)[..., :-1]
            x = x + o(torch.einsum("bhlm,bmhd->blhd", a, v).flatten(2))
        return 5 * torch.tanh(self.h(x) / 5)


class BiasOfEachHead(nn.Module):
    """Relative positions, gated by the stream: a mask for each head of `multi_head_attention_forward`, as WavLM's."""

    def __init__(self):
        super().__init__()
        self.t = nn.Embedding(VOCABULARY, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.bias = nn.Embedding(16, HEADS)
        self.gate = nn.Linear(WIDTH // HEADS, 1)
        self.f = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))
        self.h = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.t(ids)
        b, s, _ = x.shape
        places = torch.arange(s)
        bias = self.bias((places[:, None] - places[None]).clamp(-8, 7) + 8).permute(2, 0, 1)
        gate = self.gate(x.view(b, s, HEADS, -1).permute(0, 2, 1, 3)).sigmoid()
        mask = (gate * bias).reshape(b * HEADS, s, s)
        y = x.transpose(0, 1)
        y, _ = F.multi_head_attention_forward(
            y, y, y, WIDTH, HEADS, torch.empty([0]), torch.cat((self.q.bias, self.k.bias, self.v.bias)), None, None,
            False, 0.0, self.o.weight, self.o.bias, self.training, attn_mask=mask, use_separate_proj_weight=True,
            q_proj_weight=self.q.weight, k_proj_weight=self.k.weight, v_proj_weight=self.v.weight,
        )  # fmt: skip
        x = x + y.transpose(0, 1)
        return self.h(x + self.f(x))

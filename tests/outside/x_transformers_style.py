"""Sequentials, small closures and keyword switches, as in x-transformers: GLU with one packed projection, ALiBi slopes,
a learned scale for each head, cosine-normed queries and keys, memory tokens before the text, a residual scale."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class AlibiPositionalBias(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
        self.register_buffer("slopes", slopes[:, None, None], persistent=False)

    def forward(self, i: int, j: int) -> torch.Tensor:
        distance = (
            torch.arange(j, device=self.slopes.device)[None, :] - torch.arange(i, device=self.slopes.device)[:, None]
        )
        return -distance.abs()[None] * self.slopes


class GLU(nn.Module):
    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.act, self.proj = nn.SiLU(), nn.Linear(dim_in, dim_out * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * self.act(gate)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_k = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_v = nn.Linear(dim, heads * dim_head, bias=False)
        self.qk_norm_q_scale = nn.Parameter(torch.ones(heads, 1, dim_head))
        self.qk_norm_k_scale = nn.Parameter(torch.ones(heads, 1, dim_head))
        self.to_v_gate = nn.Linear(dim, heads * dim_head)
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(self, x: torch.Tensor, rel_pos: nn.Module) -> torch.Tensor:
        b, n, _ = x.shape
        h = self.heads
        q, k, v = (t.reshape(b, n, h, -1).permute(0, 2, 1, 3) for t in (self.to_q(x), self.to_k(x), self.to_v(x)))
        q, k = F.normalize(q, dim=-1) * self.qk_norm_q_scale, F.normalize(k, dim=-1) * self.qk_norm_k_scale
        dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 10.0
        dots = dots + rel_pos(n, n)
        causal = torch.ones((n, n), device=x.device, dtype=torch.bool).triu(1)
        attention = dots.masked_fill(causal, -torch.finfo(dots.dtype).max).softmax(dim=-1)
        out = torch.einsum("b h i j, b h j d -> b h i d", attention, v)
        out = out.permute(0, 2, 1, 3).reshape(b, n, -1)
        return self.to_out(out * self.to_v_gate(x).sigmoid())


class Residual(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.residual_scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return x + residual * self.residual_scale


class AttentionLayers(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.layer_types = ("a", "f") * depth
        self.rel_pos = AlibiPositionalBias(heads)
        self.layers = nn.ModuleList()
        for layer_type in self.layer_types:
            layer: nn.Module = Attention(dim, heads, dim_head)
            if layer_type == "f":
                layer = nn.Sequential(GLU(dim, dim * 2), nn.LayerNorm(dim * 2), nn.Linear(dim * 2, dim))
            self.layers.append(nn.ModuleList([nn.LayerNorm(dim), layer, Residual(dim)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer_type, (norm, block, residual_fn) in zip(self.layer_types, self.layers, strict=True):
            residual = x
            out = block(norm(x), self.rel_pos) if layer_type == "a" else block(norm(x))
            x = residual_fn(out, residual)
        return x


class TransformerWrapper(nn.Module):
    def __init__(self, *, num_tokens: int, num_memory_tokens: int, attn_layers: AttentionLayers, dim: int) -> None:
        super().__init__()
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.memory_tokens = nn.Parameter(torch.zeros(num_memory_tokens, dim))
        self.project_emb = nn.Linear(dim, dim)
        self.attn_layers, self.norm = attn_layers, nn.LayerNorm(dim)
        self.to_logits = nn.Linear(dim, num_tokens, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.project_emb(self.token_emb(ids))
        memory = self.memory_tokens.expand(x.shape[0], *self.memory_tokens.shape)
        x = torch.cat((memory, x), dim=1)
        x = self.attn_layers(x)[:, memory.shape[1] :]
        return self.to_logits(self.norm(x))


def build() -> nn.Module:
    layers = AttentionLayers(dim=96, depth=2, heads=8, dim_head=16)
    return TransformerWrapper(num_tokens=160, num_memory_tokens=3, attn_layers=layers, dim=96)

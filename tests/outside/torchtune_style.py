"""Separate projections passed in from outside, keys and values repeated by expand and flatten (torchtune)."""

from __future__ import annotations

import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.scale


class MultiHeadAttention(nn.Module):
    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_proj: nn.Module,
        k_proj: nn.Module,
        v_proj: nn.Module,
        output_proj: nn.Module,
        q_norm: nn.Module,
        k_norm: nn.Module,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = q_proj, k_proj, v_proj, output_proj
        self.q_norm, self.k_norm = q_norm, k_norm

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        b, s_x, _ = x.shape
        s_y = y.shape[1]
        q_per_kv = self.num_heads // self.num_kv_heads
        q = self.q_proj(x).view(b, s_x, self.num_kv_heads * q_per_kv, self.head_dim).transpose(1, 2)
        k = self.k_proj(y).view(b, s_y, -1, self.head_dim)
        v = self.v_proj(y).view(b, s_y, -1, self.head_dim)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.num_heads != self.num_kv_heads:
            expand_shape = (b, self.num_kv_heads, q_per_kv, -1, self.head_dim)
            k = k.unsqueeze(2).expand(expand_shape).flatten(1, 2)
            v = v.unsqueeze(2).expand(expand_shape).flatten(1, 2)
        output = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        output = output.transpose(1, 2).contiguous().view(b, s_x, -1)
        return self.output_proj(output)


class FeedForward(nn.Module):
    def __init__(self, *, gate_proj: nn.Module, down_proj: nn.Module, up_proj: nn.Module) -> None:
        super().__init__()
        self.w1, self.w2, self.w3, self.activation = gate_proj, down_proj, up_proj, nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.activation(self.w1(x)) * self.w3(x))


class TransformerSelfAttentionLayer(nn.Module):
    def __init__(self, attn: nn.Module, mlp: nn.Module, dim: int) -> None:
        super().__init__()
        self.attn, self.mlp = attn, mlp
        self.sa_norm, self.mlp_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.sa_norm(x)
        h = self.attn(h, h) + x
        return h + self.mlp(self.mlp_norm(h))


class TransformerDecoder(nn.Module):
    def __init__(self, *, tok_embeddings: nn.Embedding, layers: list[nn.Module], norm: nn.Module, output: nn.Module):
        super().__init__()
        self.tok_embeddings, self.norm, self.output = tok_embeddings, norm, output
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h)).float() if h.dtype is torch.bfloat16 else self.output(self.norm(h))


def linear(into: int, out: int) -> nn.Linear:
    return nn.Linear(into, out, bias=False)


def build(vocab: int = 160, dim: int = 96, heads: int = 8, groups: int = 4, width: int = 16) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(2):
        attention = MultiHeadAttention(
            num_heads=heads,
            num_kv_heads=groups,
            head_dim=width,
            q_proj=linear(dim, heads * width),
            k_proj=linear(dim, groups * width),
            v_proj=linear(dim, groups * width),
            output_proj=linear(heads * width, dim),
            q_norm=RMSNorm(width),
            k_norm=RMSNorm(width),
        )
        mlp = FeedForward(gate_proj=linear(dim, 128), down_proj=linear(128, dim), up_proj=linear(dim, 128))
        layers.append(TransformerSelfAttentionLayer(attention, mlp, dim))
    return TransformerDecoder(
        tok_embeddings=nn.Embedding(vocab, dim), layers=layers, norm=RMSNorm(dim), output=linear(dim, vocab)
    )

"""Queries, keys and values interleaved by group in one weight, as litgpt keeps them (before it split the weight)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Config:
    n_embd: int = 96
    n_head: int = 8
    n_query_groups: int = 4
    head_size: int = 16
    intermediate_size: int = 128
    n_layer: int = 2
    padded_vocab_size: int = 160
    parallel_residual: bool = False


class CausalSelfAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        shape = (config.n_head + 2 * config.n_query_groups) * config.head_size
        self.attn = nn.Linear(config.n_embd, shape, bias=True)
        self.proj = nn.Linear(config.head_size * config.n_head, config.n_embd, bias=True)
        self.config = config

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        B, T, _ = x.size()
        qkv = self.attn(x)
        q_per_kv = self.config.n_head // self.config.n_query_groups
        total_qkv = q_per_kv + 2
        qkv = qkv.view(B, T, self.config.n_query_groups, total_qkv, self.config.head_size).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((q_per_kv, 1, 1), dim=2)
        if self.config.n_query_groups != self.config.n_head:
            k = k.expand(B, self.config.n_query_groups, q_per_kv, T, self.config.head_size)
            v = v.expand(B, self.config.n_query_groups, q_per_kv, T, self.config.head_size)
        q = q.reshape(B, -1, T, self.config.head_size)
        k = k.reshape(B, -1, T, self.config.head_size)
        v = v.reshape(B, -1, T, self.config.head_size)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.proj(y.reshape(B, T, self.config.head_size * self.config.n_head))


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


class LLaMAMLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc_1 = nn.Linear(config.n_embd, config.intermediate_size, bias=False)
        self.fc_2 = nn.Linear(config.n_embd, config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(F.silu(self.fc_1(x)) * self.fc_2(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn, self.mlp, self.config = CausalSelfAttention(config), LLaMAMLP(config), config

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        attention = self.attn(self.norm_1(x), cos, sin)
        if self.config.parallel_residual:
            return self.mlp(self.norm_2(x)) + attention + x
        x = attention + x
        return self.mlp(self.norm_2(x)) + x


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        angles = torch.arange(64)[:, None] * 10000 ** (-torch.arange(0, config.head_size, 2) / config.head_size)
        self.register_buffer("cos", angles.repeat(1, 2).cos(), persistent=False)
        self.register_buffer("sin", angles.repeat(1, 2).sin(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        T = ids.size(1)
        cos, sin = self.cos[:T], self.sin[:T]
        x = self.transformer["wte"](ids)
        for block in self.transformer["h"]:
            x = block(x, cos, sin)
        return self.lm_head(self.transformer["ln_f"](x))


def build(parallel_residual: bool = False) -> nn.Module:
    return GPT(Config(parallel_residual=parallel_residual))

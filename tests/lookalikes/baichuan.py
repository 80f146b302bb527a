"""Shaped like Baichuan 2: query, key and value packed in W_pack, and a head that is no nn.Linear and norms its rows."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from lookalikes.parts import GatedMLP, Norm, rotate


class NormHead(nn.Module):
    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, F.normalize(self.weight))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.hidden_size = heads, width // heads, width
        self.W_pack = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.size()
        packed = self.W_pack(x).unflatten(-1, (3, self.hidden_size)).unsqueeze(0).transpose(0, -2).squeeze(-2)
        query, key, value = (part.view(batch, length, self.num_heads, self.head_dim).transpose(1, 2) for part in packed)
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, self.hidden_size))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads)
        self.mlp = GatedMLP(width, hidden)
        self.input_layernorm, self.post_attention_layernorm = Norm(width), Norm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class BaichuanModel(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, vocabulary: int, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.norm = Norm(width)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class BaichuanForCausalLM(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, hidden: int = 96, vocabulary: int = 128) -> None:
        super().__init__()
        self.model = BaichuanModel(width, heads, hidden, vocabulary, layers=2)
        self.lm_head = NormHead(width, vocabulary)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(input_ids))


MODEL = BaichuanForCausalLM

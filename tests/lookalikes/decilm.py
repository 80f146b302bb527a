"""Shaped like DeciLM (Nemotron-NAS): each layer has its own attention and MLP, or a linear in place, or nothing."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from lookalikes.parts import GatedMLP, Norm, rotate

# (query heads in a key/value group, or "linear" or "none"; hidden features of the MLP, or "linear" or "none")
BLOCKS: tuple[tuple[int | str, int | str], ...] = ((2, 160), ("linear", 96), ("none", 160), (4, "linear"), (2, "none"))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, group: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.num_key_value_heads, self.num_key_value_groups = heads // group, group
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width // group, bias=False)
        self.v_proj = nn.Linear(width, width // group, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.size()
        query = self.q_proj(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        key = self.k_proj(x).view(batch, length, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        key, value = (rows.repeat_interleave(self.num_key_value_groups, dim=1) for rows in (key, value))
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class LinearAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_attn = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_attn(x)


class LinearMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_mlp = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_mlp(x)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, attention: int | str, mlp: int | str) -> None:
        super().__init__()
        if attention != "none":
            self.input_layernorm = Norm(width)
            linear = attention == "linear"
            self.self_attn = LinearAttention(width) if linear else Attention(width, heads, int(attention))
        if mlp != "none":
            self.post_attention_layernorm = Norm(width)
            self.mlp = LinearMLP(width) if mlp == "linear" else GatedMLP(width, int(mlp))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "self_attn"):
            x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x)) if hasattr(self, "mlp") else x


class DeciLMModel(nn.Module):
    def __init__(self, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, *block) for block in BLOCKS)
        self.norm = Norm(width)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class DeciLMForCausalLM(nn.Module):
    def __init__(self, width: int = 128, heads: int = 8, vocabulary: int = 192) -> None:
        super().__init__()
        self.model = DeciLMModel(width, heads, vocabulary)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(input_ids))


MODEL = DeciLMForCausalLM

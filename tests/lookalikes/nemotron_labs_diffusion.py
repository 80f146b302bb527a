"""Shaped like Nemotron-Labs-Diffusion: a decoder called `encoder`, a head `diffusion_head`, attention sees all."""

from __future__ import annotations

import torch
from torch import nn

from lookalikes.decilm import Attention
from lookalikes.parts import GatedMLP, Norm


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads, 2)
        self.mlp = GatedMLP(width, hidden)
        self.input_layernorm, self.post_attention_layernorm = Norm(width), Norm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(2))
        self.norm = Norm(width)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class NemotronLabsDiffusionModel(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, hidden: int = 96, vocabulary: int = 160) -> None:
        super().__init__()
        self.encoder = Encoder(width, heads, hidden, vocabulary)
        self.diffusion_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.diffusion_head(self.encoder(input_ids))


MODEL = NemotronLabsDiffusionModel

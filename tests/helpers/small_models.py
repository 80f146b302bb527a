"""Plain torch models, small enough to record in milliseconds, whose plans are known by thinking."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["Decoder", "PackedDecoder", "give_random_values", "ids", "with_adapters", "with_experts"]


def ids(vocabulary: int = 96, batch: int = 2, length: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"ids": torch.randint(0, vocabulary, (batch, length), generator=generator)}


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    """Grouped-query attention; with `head_norm`, queries are normed within each head."""

    def __init__(self, hidden: int, heads: int, groups: int, width: int, head_norm: bool) -> None:
        super().__init__()
        self.width = width
        self.q = nn.Linear(hidden, heads * width, bias=False)
        self.k = nn.Linear(hidden, groups * width, bias=False)
        self.v = nn.Linear(hidden, groups * width, bias=False)
        self.o = nn.Linear(heads * width, hidden)
        self.norm = Norm(width) if head_norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, -1, self.width).transpose(1, 2) for p in (self.q, self.k, self.v))
        repeat = q.shape[1] // k.shape[1]
        k, v = (t[:, :, None].expand(-1, -1, repeat, -1, -1).reshape(q.shape) for t in (k, v))
        scores = torch.softmax(self.norm(q) @ k.transpose(2, 3) / self.width**0.5, dim=-1)
        return self.o((scores @ v).transpose(1, 2).reshape(batch, length, -1))


class Gated(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, hidden: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.first, self.second = Norm(hidden), Norm(hidden)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Decoder(nn.Module):
    """Llama-like: 8 query heads in 4 groups of width 6, hidden 40, a gated MLP of `inner` features per layer."""

    def __init__(self, inner: tuple[int, ...] = (56, 56), head_norm: bool = False, tied: bool = False) -> None:
        super().__init__()
        hidden = 40
        self.table = nn.Embedding(96, hidden)
        self.layers = nn.ModuleList(
            Block(hidden, Attention(hidden, 8, 4, 6, head_norm), Gated(hidden, n)) for n in inner
        )
        self.last = Norm(hidden)
        self.head = nn.Linear(hidden, 96, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x))


class PackedAttention(nn.Module):
    """Queries, keys and values in one weight, one after the other."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.o = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for t in self.qkv(x).split(hidden, dim=2)
        )
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, hidden))


class PackedGated(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.both = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate) * up)


class PackedDecoder(nn.Module):
    """Packed attention and packed MLP, learned positions, one layer, no head: what leaves is the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(96, 40), nn.Embedding(16, 40)
        self.block = Block(40, PackedAttention(40, 4), PackedGated(40, 56))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.block(self.table(ids) + self.places(torch.arange(ids.shape[1])))


class ListedExperts(nn.Module):
    """A router, experts as separate modules that read the tokens that chose them, and a shared expert."""

    def __init__(self, hidden: int, inner: int, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(Gated(hidden, inner) for _ in range(experts))
        self.shared = Gated(hidden, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(torch.softmax(self.router(tokens), dim=-1), 2)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            result.index_add_(0, row, expert(tokens[row]) * weights[row, place, None])
        return (result + self.shared(tokens)).view(x.shape)


class Adapted(nn.Module):
    """A linear with a low-rank adapter next to it."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * self.b(self.a(x))


def with_experts() -> Decoder:
    model = Decoder()
    for layer in model.layers:
        layer.mlp = ListedExperts(40, 56)
    return model


def with_adapters() -> Decoder:
    model = Decoder()
    for layer in model.layers:
        for module, names in ((layer.attention, "qkvo"), (layer.mlp, ("gate", "up", "down"))):
            for name in names:
                setattr(module, name, Adapted(getattr(module, name)))
    return model


def give_random_values(model: nn.Module, seed: int = 1) -> nn.Module:
    """Add noise to every float parameter: initial ones, zeros and tiny weights hide wrong layouts and missing sums."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                noise *= 0.3 if parameter.dim() < 2 else 0.15
                parameter.add_(noise.to(parameter.device, parameter.dtype))
    return model

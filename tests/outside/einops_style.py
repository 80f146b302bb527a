"""One projection for queries, keys and values, in each of the three orders that people give to `rearrange`.

With einops the line reads `rearrange(self.to_qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.heads)`, and
so on; here it is either that, or the reshape and permute that einops makes of it.
"""

from __future__ import annotations

import torch
from torch import nn

ORDERS = ("three h d", "h three d", "h d three")
_AXES = {"three h d": (2, 0, 3, 1, 4), "h three d": (3, 0, 2, 1, 4), "h d three": (4, 0, 2, 1, 3)}


def to_heads(qkv: torch.Tensor, order: str, heads: int, einops: bool) -> torch.Tensor:
    """Three tensors of heads, whatever the order of the columns."""
    if einops:
        from einops import rearrange

        found: torch.Tensor = rearrange(qkv, f"b n ({order}) -> three b h n d", three=3, h=heads)
        return found
    sizes = {"three": 3, "h": heads, "d": qkv.shape[-1] // (3 * heads)}
    unpacked = qkv.reshape(*qkv.shape[:2], *(sizes[name] for name in order.split()))
    return unpacked.permute(_AXES[order])


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, dim_head: int, order: str, einops: bool) -> None:
        super().__init__()
        self.heads, self.scale, self.order, self.einops = heads, dim_head**-0.5, order, einops
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = to_heads(self.to_qkv(x), self.order, self.heads, self.einops)
        scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        attention = scores.masked_fill(ahead, -torch.finfo(scores.dtype).max).softmax(dim=-1)
        out = torch.einsum("b h i j, b h j d -> b h i d", attention, v)
        return self.to_out(out.permute(0, 2, 1, 3).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, mult: int = 2) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim * mult), nn.GELU(), nn.Linear(dim * mult, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Transformer(nn.Module):
    def __init__(
        self, order: str, einops: bool, *, vocab: int, dim: int, depth: int, heads: int, dim_head: int
    ) -> None:
        super().__init__()
        self.token_emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(dim), Attention(dim, heads, dim_head, order, einops), FeedForward(dim)])
            for _ in range(depth)
        )
        self.to_logits = nn.Linear(dim, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token_emb(ids)
        for norm, attention, feed_forward in self.layers:
            x = attention(norm(x)) + x
            x = feed_forward(x) + x
        return self.to_logits(x)


def build(order: str, einops: bool = False) -> nn.Module:
    return Transformer(order, einops, vocab=160, dim=96, depth=2, heads=8, dim_head=16)

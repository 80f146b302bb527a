"""Small models that have in them what the published failures needed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEAD = 32, 8


class RootMeanSquare(nn.Module):
    """A norm as models write it: nothing in it knows how wide its input should be."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    """Separate projections; head counts are read off the tensors. `norm`: None, "head" (per head) or "full"."""

    def __init__(self, heads: int = 4, kv_heads: int = 4, norm: str | None = None) -> None:
        super().__init__()
        self.groups, self.norm = heads // kv_heads, norm
        self.q_proj = nn.Linear(WIDTH, heads * HEAD, bias=False)
        self.k_proj = nn.Linear(WIDTH, kv_heads * HEAD, bias=False)
        self.v_proj = nn.Linear(WIDTH, kv_heads * HEAD, bias=False)
        self.o_proj = nn.Linear(heads * HEAD, WIDTH, bias=False)
        if norm is not None:
            self.q_norm = RootMeanSquare(HEAD if norm == "head" else heads * HEAD)
            self.k_norm = RootMeanSquare(HEAD if norm == "head" else kv_heads * HEAD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(batch, length, -1, HEAD).transpose(1, 2) for t in (q, k, v))
        if self.norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class FusedAttention(nn.Module):
    """One weight for query, key and value, and a stored number of heads."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv_proj = nn.Linear(WIDTH, 3 * heads * HEAD, bias=False)
        self.o_proj = nn.Linear(heads * HEAD, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv_proj(x).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.num_heads, HEAD).transpose(1, 2) for t in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, hidden, bias=False)
        self.w3 = nn.Linear(WIDTH, hidden, bias=False)
        self.w2 = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class FusedMlp(nn.Module):
    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 2 * hidden, bias=False)
        self.down_proj = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_norm, self.attn = nn.RMSNorm(WIDTH), attention
        self.post_norm, self.mlp = nn.RMSNorm(WIDTH), mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Decoder(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, blocks: list[nn.Module], vocab: int = 64, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def decoder(attention=Attention, mlp=Mlp, layers: int = 2, **options) -> Decoder:
    return Decoder([Block(attention(), mlp()) for _ in range(layers)], **options)


ATTENTION = {
    "layers.*.attn.q_proj": "colwise",
    "layers.*.attn.k_proj": "colwise",
    "layers.*.attn.v_proj": "colwise",
    "layers.*.attn.o_proj": "rowwise",
}
MLP = {"layers.*.mlp.w1": "colwise", "layers.*.mlp.w3": "colwise", "layers.*.mlp.w2": "rowwise"}
TABLES = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}
GOOD = {**TABLES, **ATTENTION, **MLP}


def inferred(model: nn.Module):
    return "inferred"


def said(plan):
    """A plan that does not depend on the model."""
    return lambda model: plan


def torch_styles(plan: dict[str, str]):
    """A dict of names as torch's own style objects."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    objects = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    return lambda model: {pattern: objects[style]() for pattern, style in plan.items()}

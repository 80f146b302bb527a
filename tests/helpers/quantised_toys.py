"""A llama-like model in plain torch whose projections hold quantised weights with their scales and zero points."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

BLOCK, GROUP = 128, 32


class BlockLinear(nn.Module):
    """float8 in blocks of 128 x 128, one scale a block."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stored = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(stored, requires_grad=False)
        scale = 0.01 + 0.05 * torch.rand(-(-outputs // BLOCK), -(-inputs // BLOCK))
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = self.weight.shape
        blocks = self.weight.to(x.dtype).view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        weight = (blocks * self.weight_scale_inv.to(x.dtype)[:, None, :, None]).view(rows, columns)
        return F.linear(x, weight)


class RepeatedBlockLinear(BlockLinear):
    """The same, with the scales repeated to the weight's size and cut to it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight_scale_inv.to(x.dtype).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return F.linear(x, self.weight.to(x.dtype) * scale)


class GroupLinear(nn.Module):
    """Four bits, two to a byte along the input, a scale and a zero point for each 32 inputs of each output."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.register_buffer("packed", torch.randint(256, (outputs, inputs // 2)).to(torch.uint8))
        self.register_buffer("scales", 0.01 + 0.05 * torch.rand(outputs, inputs // GROUP))
        self.register_buffer("zeros", torch.randint(16, (outputs, inputs // GROUP)).to(torch.int8))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self.packed & 15, self.packed >> 4
        four_bits = torch.stack([low, high], -1).view(self.outputs, self.inputs).to(x.dtype)
        zeros = self.zeros.to(x.dtype).repeat_interleave(GROUP, 1)
        weight = (four_bits - zeros) * self.scales.to(x.dtype).repeat_interleave(GROUP, 1)
        return F.linear(x, weight, self.bias)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    def __init__(self, linear: type[nn.Module], width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q, self.k, self.v, self.o = (linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)
        self.before, self.between = Norm(width), Norm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Quantised(nn.Module):
    """Two blocks between a table and a head."""

    def __init__(
        self, linear: type[nn.Module], width: int = 256, heads: int = 4, hidden: int = 512, rows: int = 96
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.blocks = nn.ModuleList(Block(linear, width, heads, hidden) for _ in range(2))
        self.norm, self.head = Norm(width), nn.Linear(width, rows, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

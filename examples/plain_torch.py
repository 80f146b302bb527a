"""Plan code that no library knows: the fused projection is sharded as three segments, as its forward splits it."""

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import autoplan

WIDTH, HEADS = 64, 8


class Brick(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.wide(self.before(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        x = x + self.back(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.between(x))))


def build() -> nn.Module:
    """Build the model; on the command line: `autoplan plan examples.plain_torch:build --tp 4`."""
    return nn.Sequential(nn.Embedding(96, WIDTH), *(Brick() for _ in range(4)), nn.Linear(WIDTH, 96, bias=False))


if __name__ == "__main__":
    model = build()
    plan = autoplan.plan(model, tp_size=4)
    print(plan)
    report = autoplan.verify(model, plan, tp_size=4)
    assert report.ok, report
    print(f"\n{len(report.gradients)} gradients agree, the largest error is {max(report.gradients.values()):.0e}")

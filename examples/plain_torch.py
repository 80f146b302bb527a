"""Plan code that no library has heard of: a block with one fused projection for query, key and value.

Nothing is named as libraries name it, and nothing needs to be: the three parts are found because the forward cuts the
projection's output in three.
"""

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import autoplan

WIDTH, HEADS, DEPTH, VOCABULARY = 64, 8, 4, 96


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.back = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for part in self.wide(x).chunk(3, -1))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.back(y.transpose(1, 2).reshape(batch, length, -1))


class Brick(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixer = Mixer()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.before(x))
        return x + self.down(gelu(self.up(self.between(x))))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.bricks = nn.Sequential(*(Brick() for _ in range(DEPTH)))
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.bricks(self.table(ids)))


def build() -> nn.Module:
    """Also for the command line: `autoplan plan examples.plain_torch:build --tp 4`."""
    return Tower()


if __name__ == "__main__":
    model = build()
    plan = autoplan.plan(model, tp_size=4)
    print(plan)
    report = autoplan.verify(model, plan, tp_size=4)
    assert report.ok, report
    print(f"\n{len(report.gradients)} gradients agree, the largest error is {max(report.gradients.values()):.0e}")

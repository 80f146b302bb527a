"""vllm#52997: a weight with block scales is cut inside a block: 24 rows a rank, blocks of 16."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from corpus.case import Case, Setting
from corpus.toys import ATTENTION, TABLES, WIDTH, decoder, said


class BlockScaled(nn.Module):
    """A linear whose weight has one scale for each block of `block` rows."""

    def __init__(self, rows: int, block: int) -> None:
        super().__init__()
        self.out_features, self.block = rows, block
        self.weight = nn.Parameter(torch.randn(rows, WIDTH) * 0.1)
        self.scale = nn.Parameter(torch.rand(rows // block, 1) + 0.5)

    def forward(self, x):
        scale = self.scale.repeat_interleave(self.block, dim=0)
        return F.linear(x, self.weight * scale)


class ScaledMlp(nn.Module):
    def __init__(self, rows: int, block: int) -> None:
        super().__init__()
        self.up, self.down = BlockScaled(rows, block), nn.Linear(rows, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


def model(rows: int, block: int):
    return decoder(mlp=partial(ScaledMlp, rows, block))


CUT = {"layers.*.mlp.up": "packed_colwise", "layers.*.mlp.down": "rowwise"}
WHOLE = {**TABLES, **ATTENTION}
CASE = Case(
    22, "vllm#52997", "block scales cut at the wrong size", "quantised",
    bad=Setting(partial(model, 48, 16), said({**WHOLE, "layers.*.mlp.up.weight": "colwise", **CUT})),
    good=Setting(partial(model, 64, 16), said(WHOLE)),
)  # fmt: skip

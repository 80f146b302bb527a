"""tpu-inference#3435: experts, router and shared expert reduced wrongly: gsm8k 23.9 % instead of 96.2 %."""

import torch
from torch import nn
from torch.nn import functional as F

from corpus.case import Case, Setting
from corpus.toys import ATTENTION, TABLES, WIDTH, decoder, said


class Experts(nn.Module):
    """All experts on all tokens, weighted: what batched kernels compute, in two products."""

    def __init__(self, experts: int = 4, hidden: int = 24) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, hidden, WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, hidden) * 0.1)

    def forward(self, x, index, weights):
        batch, length, width = x.shape
        flat = x.reshape(-1, width).expand(self.up.shape[0], -1, -1)
        out = torch.bmm(F.silu(torch.bmm(flat, self.up.transpose(1, 2))), self.down.transpose(1, 2))
        full = torch.zeros(flat.shape[1], self.up.shape[0], dtype=x.dtype).scatter(1, index, weights)
        return (out * full.t().unsqueeze(-1)).sum(0).view(batch, length, width)


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = Experts()

    def forward(self, x):
        scores = self.gate(x).softmax(-1).reshape(-1, 4)
        weights, index = scores.topk(2, dim=-1)
        return self.experts(x, index, weights)


def model():
    return decoder(mlp=Moe)


CUT = {"layers.*.mlp.experts.up": "colwise", "layers.*.mlp.experts.down": "rowwise"}
CASE = Case(
    21, "tpu-inference#3435", "the experts' partial outputs are never summed", "experts",
    bad=Setting(model, said({**TABLES, **ATTENTION, **CUT, "layers.*.mlp.experts": "local_params"})),
    good=Setting(model, said({**TABLES, **ATTENTION, **CUT, "layers.*.mlp.experts": "moe_tp_experts"})),
)  # fmt: skip

"""A module inside a mixer that picks keys for each query, from the stream that the mixer's projections read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from mixer_stack import Stack

import autoplan
from autoplan.values import ExchangeToPositions


class Indexer(torch.nn.Module):
    """It returns a mask, so no gradient comes back; its input is one that heads give parts of a gradient to."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys = self.both(x).chunk(2, -1)
        later = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
        scores = (queries @ keys.transpose(-1, -2)).masked_fill(later, -1e4)
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(2).indices, True)


class Mixer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(16, 16, bias=False) for _ in range(4))
        self.indexer = Indexer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        picked = self.indexer(x).unsqueeze(1)
        q, k, v = (layer(x).unflatten(-1, (4, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=picked)
        made: torch.Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return made


def test_a_stream_whose_gradient_is_scaled_on_the_way_is_not_shown_as_whole() -> None:
    torch.manual_seed(0)
    plan = autoplan.plan(Stack(Mixer), cp_size=2, inputs={"input_ids": torch.randint(30, (2, 9))}, prove="ranks")
    assert plan.proof.ok, plan.findings
    assert not [finding for finding in plan.findings if finding.check == "scoped"]  # the first plan is the right one
    assert plan.runtime.of(ExchangeToPositions)

"""A plan says in which order its modules' weights are read, one block of each kind; and that no block is split."""

from __future__ import annotations

import torch
from example_plans import llama_plan
from small_models import Decoder, ids
from torch import nn
from torch.nn import functional as F

import autoplan
from autoplan.decide.plan.folding import whole_blocks
from autoplan.values import Stack, replace

torch.set_num_threads(1)


def test_like_blocks_are_one_part_and_modules_stand_in_the_order_of_the_run() -> None:
    flow = autoplan.plan(Decoder(), tp_size=2, inputs=ids(), prove="none").flow
    assert [(part.block, part.blocks) for part in flow] == [("", 1), ("layers.0", 2), ("", 1)]
    assert flow[1].steps == (
        "first", "attention.q", "attention.k", "attention.v", "attention.o", "second", "mlp.gate", "mlp.up", "mlp.down",
    )  # fmt: skip
    assert flow[2].steps == ("last", "head") and flow[2].reads == ((-1,), (0,))
    assert flow[1].reads == ((-1,), (0,), (0,), (0,), (1, 2, 3), (4,), (5,), (5,), (6, 7))


class ReadByAnother(nn.Module):
    """The module of its second weight never runs: the code of the model reads the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(32, 8, bias=False), nn.Linear(8, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(F.linear(x, self.up.weight)))


def test_a_weight_that_another_module_reads_has_its_place() -> None:
    flow = autoplan.plan(ReadByAnother(), tp_size=2, inputs={"x": torch.randn(2, 8)}, prove="none").flow
    assert [(part.steps, part.reads) for part in flow] == [(("up", "down"), ((), (0,)))]


def test_a_plan_that_splits_no_block_is_warned_of() -> None:
    """Its size is legal: every rank computes nearly the whole model."""
    plan = llama_plan()
    blocks = tuple(f"model.layers.{number}" for number in range(4))
    plan = replace(plan, layers=(Stack("model.layers", "decoder", blocks),))
    assert whole_blocks(plan) == ()
    outside = tuple(entry for entry in plan.entries if "layers" not in entry.pattern)
    assert outside and len(outside) < len(plan.entries)
    (found,) = whole_blocks(replace(plan, entries=outside))
    assert found.level == "warn" and f"tp={plan.tp_size}" in found.message and "all 4 blocks" in found.message
    assert whole_blocks(replace(plan, entries=outside, layers=())) == (), "a model without repeated blocks"
    assert whole_blocks(replace(plan, entries=())) == (), "nothing is split: that is an error of its own"

"""torch.compile on a planned model: one graph, no break caused by what the plan does, the same numbers.

The ranks are two gloo processes: compiled code runs its collectives for real. `aot_eager` traces forward and backward
as inductor would, and generates no code. A model whose own code breaks the graph is not our business; llama-likes do
not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import run_processes
from autoplan.execute.parameters.gather import full_tensors
from autoplan.execute.randomness.dropout import may_draw
from autoplan.hf.source import resolve
from autoplan.values import LocalExperts

# (model type, with labels, options of parallelize, options of plan)
CASES: tuple[tuple[str, bool, dict[str, Any], dict[str, Any]], ...] = (
    ("llama", False, {}, {}),
    ("llama", True, {}, {}),
    ("qwen3", True, {"gather_logits": True}, {}),
    ("gemma2", True, {}, {"sequence_parallel": True}),
    ("cohere", True, {}, {}),  # attention and MLP side by side: one withholds its part of the sum
    ("cohere", False, {}, {"sequence_parallel": True}),
    ("mixtral", False, {}, {"ep_size": 2}),
)


def built(model_type: str) -> nn.Module:
    torch.manual_seed(0)
    return resolve(model_type).tiny(dtype=torch.float64, experts="batched_mm")


def ids() -> torch.Tensor:
    return torch.randint(100, (2, 8), generator=torch.Generator().manual_seed(5))


def step(model: Any, run: Any, given: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and every gradient of one step; without labels, of a sum over logits."""
    model.train().zero_grad(set_to_none=True)
    output = run(**given)
    logits = output.logits
    whole = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    loss = output.loss if "labels" in given else whole.square().mean()
    loss.backward()
    return loss.detach(), full_tensors(model, grads=True)


@dataclass(frozen=True)
class Compiled:
    """What came of one case: graphs, breaks, and the distance from the unsharded model that is not compiled."""

    breaks: int
    graphs: int
    loss: float
    gradient: float


def compiled(rank: int) -> list[Compiled]:
    """Every case on a rank."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return [one(mesh, *case) for case in CASES]


def one(mesh: Any, model_type: str, labels: bool, options: dict[str, Any], planned: dict[str, Any]) -> Compiled:
    given = {"input_ids": ids(), "use_cache": False, **({"labels": ids()} if labels else {})}
    unsharded = built(model_type)
    loss, gradients = step(unsharded, unsharded, given)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = autoplan.parallelize(built(model_type), mesh, plan_for(model_type, **planned), **options)
    got, theirs = step(model, torch.compile(model, backend="aot_eager"), given)
    counters = torch._dynamo.utils.counters
    worst = max(float((theirs[name] - wanted).abs().max()) for name, wanted in gradients.items())
    breaks = sum(counters["graph_break"].values())
    return Compiled(breaks, counters["stats"]["unique_graphs"], float((got - loss).abs()), worst)


def plan_for(model_type: str, **planned: Any) -> autoplan.Plan:
    plan = autoplan.plan(built(model_type), 2, prove="none", **planned)
    assert plan.sequence_parallel == ("sequence_parallel" in planned) and bool(plan.runtime.of(LocalExperts)) == (
        plan.ep_size > 1
    )
    return plan


@pytest.mark.gloo
@pytest.mark.slow
def test_planned_models_compile_whole() -> None:
    for ranks in run_processes(compiled, (), 2, timeout=900.0):
        for case, found in zip(CASES, ranks, strict=True):
            assert (found.breaks, found.graphs) == (0, 1), case
            limit = 1e-6 if case[1] else 1e-10  # models compute their losses in float32
            assert found.loss < limit and found.gradient < limit, (case, found)


def test_who_may_draw() -> None:
    """Compiled training agrees on a seed only where something draws: that interrupts the graph."""
    quiet, loud = built("llama"), built("llama")
    assert not may_draw(quiet)
    loud.config.attention_dropout = 0.1
    assert may_draw(loud)
    assert may_draw(nn.Sequential(nn.Dropout(0.1))) and not may_draw(nn.Sequential(nn.Dropout(0.0)))

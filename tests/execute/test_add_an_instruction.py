"""A stranger's change: a new thing done at run time is one class and one executor, and nothing else is touched.

What docs/howto/add-an-instruction.md tells is done here, and the new instruction is explained, costed, saved, loaded
and executed on two simulated ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.analyse.solve import solve
from autoplan.capture.capture import capture_real
from autoplan.check.ranks.run import run_ranks
from autoplan.check.scoreboard.score import reductions_per_block
from autoplan.decide.plan.planner import make_plan
from autoplan.execute.collectives import all_reduce
from autoplan.execute.executors import EXECUTORS, At, executes
from autoplan.values import (
    INSTRUCTIONS,
    AllReduce,
    Boundary,
    Collective,
    Cost,
    Move,
    Plan,
    Spread,
    Stack,
    instruction,
    replace,
)


@pytest.fixture(scope="module")
def largest() -> Iterator[type[Boundary]]:
    """The stranger's class and its executor; forgotten afterwards, so that other tests see the list as it is."""

    @instruction
    class LargestOverRanks(Boundary):
        """Forward the largest of what ranks hold, element by element."""

        takes, gives = Spread.PARTIAL, Spread.REPLICATE
        says = "of {what} the largest over {tp} ranks is taken (forward)"
        cost = Cost("maximum")
        turn = 1
        collectives = (Move(Collective.ALL_REDUCE),)

    @executes(LargestOverRanks)
    def _largest(planned: LargestOverRanks, at: At) -> Callable[[torch.Tensor], torch.Tensor]:
        group = at.group
        return lambda x: all_reduce(x, group, "max")

    yield LargestOverRanks
    del INSTRUCTIONS["LargestOverRanks"], EXECUTORS[LargestOverRanks]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.blocks[0](x)


X = torch.linspace(-1, 1, 2 * 3 * 16).view(2, 3, 16)


@pytest.fixture
def plan(largest: type[Boundary]) -> Plan:
    """The plan of a small model, with the stranger's instruction in place of its sum."""
    solution = solve(capture_real(Model(), {"forward": {"x": X}}).trace, 2)
    (own,) = solution.runtime.of(AllReduce)
    others = tuple(one for one in solution.runtime.instructions if one is not own)
    new = largest(own.pattern, own.side, own.path)
    solution = replace(solution, runtime=replace(solution.runtime, instructions=(new, *others)))
    return make_plan(solution, model="strange", layers=(Stack("blocks", "decoder", ("blocks.0",)),))


def test_it_is_explained_and_costed(plan: Plan) -> None:
    assert "of output the largest over 2 ranks is taken (forward)" in plan.explain("blocks.0.down")
    (entry,) = [entry for entry in plan.entries if entry.pattern == "blocks.0.down"]
    assert "maximum of the output (forward)" in map(str, entry.reduces)
    assert reductions_per_block(plan) == (1.0, 0.0)
    (block,) = plan.communication
    assert block.forward["all_reduce"][0] == 1


def test_it_is_saved_and_loaded(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.yaml")
    assert "do: LargestOverRanks" in (tmp_path / "plan.yaml").read_text()
    assert autoplan.load_plan(tmp_path / "plan.yaml") == plan


def test_it_is_carried_out(plan: Plan) -> None:
    torch.manual_seed(0)
    model = Model()
    up, down = model.blocks[0].up.weight.detach(), model.blocks[0].down.weight.detach()
    parts = [(X @ up[rows].T).relu() @ down[:, rows].T for rows in (slice(0, 16), slice(16, 32))]
    models = []
    for _ in range(2):
        models.append(Model())
        models[-1].load_state_dict(model.state_dict())

    def rank(number: int) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with torch.no_grad():
            return autoplan.parallelize(models[number], mesh, plan)(X)

    for result in run_ranks(rank, 2):
        torch.testing.assert_close(result, X + torch.maximum(*parts))

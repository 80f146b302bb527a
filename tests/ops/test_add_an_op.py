"""A stranger's change: one record, and an op of another library is analysed and replayed (docs/howto/add-an-op.md)."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from small_models import give_random_values
from torch import nn

from autoplan.analyse.infer import Shards, infer_axes
from autoplan.analyse.placement.call_instructions import reduction_of
from autoplan.axes.events import Event
from autoplan.axes.terms import find, leaves
from autoplan.capture.recorder import record
from autoplan.check.replay import replay
from autoplan.ops import OPS, call_record, op_record
from autoplan.ops.records.answers import NEVER, Linear, Reduction
from autoplan.ops.records.on_shards import NO_SIZES, Local, SplitOp
from autoplan.ops.records.record import op
from autoplan.ops.records.site import Answer, Site

NAME = "stranger.project"


@torch.library.custom_op(f"{NAME.replace('.', '::')}", mutates_args=())
def project(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    return (x @ weight.t()) * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Parameter(torch.zeros(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.ops.stranger.project(torch.relu(self.up(x)), self.down, 0.5)


def inner_sum(at: SplitOp) -> Reduction | None:
    return Reduction.SUM if at.is_split(0, -1) else None


def part_of_the_sum(local: Local) -> torch.Tensor:
    local.reducing = local.is_split(0, -1)
    return local.call()


@pytest.fixture
def known() -> Iterator[None]:
    @op(NAME, sizes=NO_SIZES, reduces=inner_sum, linear=Linear.NO, random=NEVER, runs=part_of_the_sum)
    def project_dims(site: Site) -> Answer:
        x, weight = (site.terms(ref) for ref in site.inputs)
        site.unify(x[-1], weight[-1])
        site.contract(x[-1], Event.CONTRACT_W)
        return [[*x[:-1], weight[0]]]

    yield
    del OPS[NAME]
    op_record.cache_clear()
    call_record.cache_clear()


def recorded_model() -> tuple:
    torch.manual_seed(0)
    model = give_random_values(Model()).double().eval()
    return record(copy.deepcopy(model), {"forward": {"x": torch.randn(3, 6, dtype=torch.float64)}}, keep_values=True)


def test_an_op_without_a_record_keeps_its_dims_whole() -> None:
    trace, _ = recorded_model()
    axes = infer_axes(trace)
    assert axes.unknown[NAME] == 1
    assert all(Event.OPAQUE in leaf.events for leaf in leaves(axes.of(trace.by_name["up.weight"])[0]))


@pytest.mark.usefixtures("known")
def test_one_record_is_all_that_it_takes() -> None:
    trace, recording = recorded_model()
    axes = infer_axes(trace)
    hidden = find(axes.of(trace.by_name["up.weight"])[0])
    assert not axes.unknown and find(axes.of(trace.by_name["down"])[1]) is hidden
    assert hidden.events == {Event.CONTRACT_W}
    shards = Shards(trace, axes, {hidden: "!"}, 2)
    assert [found for call in trace.calls if (found := reduction_of(call, shards, frozenset()))] == [Reduction.SUM]
    played = replay(trace, recording, shards)
    assert played.ok and played.reductions == {"": 1}

"""The number of groups that a convolution is told, when each rank has a shard of the groups."""

from __future__ import annotations

import pytest
import torch
from small_models import give_random_values
from torch import nn

from autoplan.analyse.infer import Shards, infer_axes
from autoplan.analyse.splits.literal_sizes import requirements
from autoplan.axes.terms import find, leaves
from autoplan.capture.recorder import record
from autoplan.check.replay import replay


class Grouped(nn.Module):
    """Channels are widened, worked on in four groups, and summed."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        plain, grouped = getattr(nn, f"Conv{dims}d"), getattr(nn, f"ConvTranspose{dims}d")
        self.up, self.groups, self.down = plain(3, 8, 1), grouped(8, 8, 3, groups=4), plain(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.groups(self.up(x)))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_transposed_convolution_is_told_its_share_of_the_groups(dims: int) -> None:
    model = give_random_values(Grouped(dims)).double().eval()
    x = torch.randn(2, 3, *[4] * dims, dtype=torch.float64)
    trace, recording = record(model, {"forward": {"x": x}}, keep_values=True)
    axes = infer_axes(trace)
    group = find(leaves(axes.of(trace.by_name["groups.weight"])[0])[0])
    assert group.size == 4
    shards = Shards(trace, axes, {group: "!"}, 2)
    wanted = [
        (call.name, requirement.old, requirement.want)
        for index, call in enumerate(trace.calls)
        for requirement in requirements(index, call, shards)
    ]
    assert wanted == [(f"conv_transpose{dims}d", 4, (2, 2))]
    assert replay(trace, recording, shards).ok

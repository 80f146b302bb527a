"""What hinders others from cutting a module by wrapping its call: found in the trace, and heeded by exports."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoplan
from autoplan.emit.exports.export import needs_autoplan, to_deepspeed, to_vllm
from autoplan.emit.exports.expressible import ExportError, parts_of
from autoplan.emit.exports.hf import to_hf
from autoplan.values import IntegerEdit


class Block(nn.Module):
    """An MLP under a residual. `habit` is what its author does besides calling the layers."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.up, self.down = nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(F.linear(x, self.up.weight) if self.habit == "reads" else self.up(x))
        out = self.down(hidden)
        if self.habit == "edits":
            out += x
            return out
        if self.habit == "edits a view":
            out.view(-1, 8).mul_(0.5)
        return out * 2 + x


class Blocks(nn.Module):
    def __init__(self, *habits: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(habit) for habit in habits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Pair(nn.Module):
    """Two convolutions of which the first feeds the second: split alike, and no linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(8, 24, 3, padding=1), nn.Conv1d(24, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x))) + x


class Counting(nn.Module):
    """Blocks inside, and a number of heads above them that has nothing to do with their split."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.body = Blocks("none", "none")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x.view(2, 6, self.num_heads, 2).flatten(2))


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def planned(model: nn.Module) -> autoplan.Plan:
    inputs = torch.randn(2, 8, 6) if isinstance(model, Pair) else torch.randn(2, 6, 8)
    return autoplan.plan(model, 2, inputs={"x": inputs}, prove="none")


@pytest.mark.parametrize(
    ("habit", "module", "kind"),
    [("edits", "down", "edited"), ("edits a view", "down", "edited"), ("reads", "up", "read"), ("none", "", "")],
)
def test_what_is_found(habit: str, module: str, kind: str) -> None:
    found = planned(Blocks(habit, habit)).obstacles
    assert [(o.pattern, o.kind) for o in found] == ([(f"layers.*.{module}", kind)] if module else [])


def test_a_convolution_is_no_linear_layer() -> None:
    assert {o.pattern for o in planned(Pair()).obstacles if o.kind == "shape"} == {"up", "down"}


def test_the_layer_is_refused_by_name_and_its_partner_gathered() -> None:
    plan = planned(Blocks("edits", "edits"))
    with pytest.raises(ExportError, match=r"layers\.\*\.down: .*layers\.\*.* changes its output in place"):
        to_hf(plan)
    assert to_hf(plan, drop=True) == {"layers.*.up": "colwise_gather_output"}
    assert "in place" in needs_autoplan(plan), "torch's stock styles hand out views too"
    with pytest.raises(ExportError, match="the code of .* reads its weight"):
        to_hf(planned(Blocks("reads", "reads")))


def test_one_bad_block_spoils_the_key_for_all() -> None:
    """transformers knows no layer numbers, so a key that means one block means each."""
    plan = planned(Blocks("none", "edits", "none"))
    assert to_hf(plan, drop=True) == {"layers.*.up": "colwise_gather_output"}


def test_a_layer_that_stays_whole_in_some_blocks() -> None:
    plan = autoplan.plan(
        Blocks("none", "none"),
        2,
        inputs={"x": torch.randn(2, 6, 8)},
        overrides={"layers.0.up": "replicate", "layers.0.down": "replicate"},
        prove="none",
    )
    assert {entry.pattern for entry in plan.entries} == {"layers.1.up", "layers.1.down"}
    assert to_hf(plan) == {"layers.*.up": "colwise_gather_output", "layers.*.down": "rowwise_split_input"}


def test_what_one_container_needs_its_partner_needs() -> None:
    """Query, key and value in one module, the output projection in another: they share an axis, and so their fate."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.width, self.up = 24, nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.up(x).view(2, 6, self.width))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.output = Inner(), nn.ModuleDict({"dense": nn.Linear(24, 8)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.output["dense"](self.inner(x)) + x

    plan = planned(Outer())
    assert [edit.attribute for edit in plan.runtime.of(IntegerEdit)] == ["width"]
    assert all(part.needs for part in parts_of(plan))
    assert to_hf(plan) == {"inner.up": "colwise_gather_output", "output.dense": "rowwise_split_input"}


def test_a_count_that_must_keep_its_value() -> None:
    plan = planned(Holder())
    assert [(o.pattern, o.attribute) for o in plan.obstacles] == [("model", "num_heads")]
    assert to_hf(plan), "transformers divides no count"
    with pytest.raises(ExportError, match="AutoTP would divide num_heads of model"):
        to_deepspeed(plan)


def test_who_replaces_modules_hands_out_no_views() -> None:
    plan = planned(Blocks("edits", "edits"))
    assert to_vllm(plan) == {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    specs = to_deepspeed(plan)["tensor_parallel"]["partition_config"]["layer_specs"]
    assert [spec["partition_type"] for spec in specs] == ["column", "row"]
    for exporter in (to_vllm, to_deepspeed):
        with pytest.raises(ExportError, match="the code of .* reads its weight"):
            exporter(planned(Blocks("reads", "reads")))

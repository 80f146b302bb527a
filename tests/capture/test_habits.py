"""Habits of other code bases: weights made at each call, tensors left by runs, scripted parts, layers without a shape,
a process group of the model's own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import spectral_norm, weight_norm
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoplan
from autoplan.capture.copies import copied
from autoplan.common.errors import AutoplanError, CaptureError


class Mlp(nn.Module):
    def __init__(self, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first = first or nn.Linear(16, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.first(x))))


def _split(plan: autoplan.Plan) -> set[str]:
    return {entry.pattern for entry in plan.entries}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
@pytest.mark.parametrize("ran", [False, True])
def test_weights_made_by_a_hook(norm, ran: bool) -> None:
    torch.manual_seed(0)
    model = Mlp(norm(nn.Linear(16, 32)))
    if ran:  # its weight has a history now, and deepcopy takes none
        model(torch.randn(2, 16))
    plan = autoplan.plan(model.eval(), 2)
    assert plan.proof.ok and {"up", "down"} <= _split(plan), plan
    assert autoplan.verify(model, plan, tp_size=2, checks=("forward",)).ok


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch asks scripted parameters for it
def test_a_scripted_part_is_recorded_by_what_it_does() -> None:
    torch.manual_seed(0)
    model = Mlp(torch.jit.script(nn.Linear(16, 32))).eval()
    plan = autoplan.plan(model, 2)
    assert {"up", "down"} <= _split(plan), plan
    (found,) = [finding for finding in plan.findings if finding.level == "error"]  # it is recorded, and cannot be cut
    assert "TorchScript" in found.message and not plan.proof.ok


class OfRaw(nn.Linear):
    """A layer without a weight: a hook makes it of a raw one before each call."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__(i, o)
        self.raw, self.gain = nn.Parameter(self.weight.detach().clone()), 1.4
        del self._parameters["weight"]


def _makes_weight(module, args) -> None:
    module.weight = module.raw * module.gain


def _makes_weight_by_name(module, args) -> None:
    setattr(module, "weight", module.raw * module.gain)  # noqa: B010


@pytest.mark.parametrize("hook", [_makes_weight, _makes_weight_by_name])
def test_a_hook_that_sets_the_weight_of_its_module_goes_along(hook) -> None:
    torch.manual_seed(0)
    model = Mlp()
    model.up, model.down = OfRaw(32, 64), OfRaw(64, 32)
    for layer in (model.up, model.down):
        layer.register_forward_pre_hook(hook)
    plan = autoplan.plan(model.eval(), 2)
    assert plan.proof.ok and {"up", "down"} <= _split(plan), plan
    assert autoplan.verify(model, plan, tp_size=2).ok
    assert not hasattr(model.up, "weight"), "the model itself was not run"


def test_a_nested_tensor_is_refused_by_name() -> None:
    class Ragged(Mlp):
        def forward(self, x, keep):
            rows = torch.nested.as_nested_tensor([one[k] for one, k in zip(x, keep, strict=True)], layout=torch.jagged)
            return torch.nested.to_padded_tensor(super().forward(rows), 0.0)

    keep = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    with pytest.raises(CaptureError, match="makes a nested tensor") as caught:
        autoplan.plan(Ragged(), 2, inputs={"x": torch.randn(2, 6, 16), "keep": keep})
    assert "padded" in caught.value.hint


def test_a_layer_without_a_shape_gets_one_in_a_copy() -> None:
    model = Mlp(nn.LazyLinear(32)).eval()
    with pytest.raises(CaptureError, match="is uninitialized until the first call") as caught:
        autoplan.plan(model, 2)
    assert "inputs=" in caught.value.hint
    plan = autoplan.plan(model, 2, inputs={"x": torch.randn(2, 10, 16)})
    assert {"up", "down"} <= _split(plan), plan
    assert isinstance(model.first, nn.LazyLinear), "the model itself is left as it was"


def test_what_cannot_be_copied_is_said() -> None:
    model = Mlp()
    with Path(__file__).open() as file, pytest.raises(AutoplanError, match="cannot be copied"):
        model.file = file
        copied(model)


class Talking(Mlp):
    """Does its own parallelism where there is a group."""

    def forward(self, x):
        if dist.is_initialized():
            assert dist.get_world_size() == 1, "another rank would be waited for"
            x = x.clone()
            dist.all_to_all_single(x, x.clone())
        return super().forward(x)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_the_model_finds_no_process_group_while_it_is_planned(group: None) -> None:
    torch.manual_seed(0)
    asked = dist.is_initialized
    model = Talking().eval()
    plan = autoplan.plan(model, 2)
    assert {"up", "down"} <= _split(plan), plan
    (found,) = (finding for finding in plan.findings if finding.check == "distributed")
    assert "is_initialized" in found.message
    assert autoplan.verify(model, plan, tp_size=2, checks=("forward",)).ok
    assert dist.is_initialized is asked and dist.get_world_size() == 2


@torch.jit.script
def snake(x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    return x + (alpha + 1e-9).reciprocal() * torch.sin(alpha * x).pow(2)


@torch.jit.script
def gate(x: torch.Tensor, channels: list[int]) -> torch.Tensor:
    n = channels[0]
    return torch.tanh(x[:, :n]) * torch.sigmoid(x[:, n:])


class Scripted(nn.Module):
    """A vocoder's activation with a weight, and a WaveNet's gate, both compiled by TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 32
        self.alpha = nn.Parameter(torch.ones(1, 32, 1))
        self.first, self.second = nn.Conv1d(16, 32, 3, padding=1), nn.Conv1d(32, 16, 1)
        self.into, self.out = nn.Conv1d(16, 64, 3, padding=1), nn.Conv1d(32, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.second(snake(self.first(x), self.alpha))
        return x + self.out(gate(self.into(x), [self.width]))


def test_functions_of_torchscript_are_read_and_rewritten_and_are_left_as_they_were() -> None:
    torch.manual_seed(0)
    gc.collect()  # models of other tests, for which calls may be read as well
    model, x, call = Scripted().eval(), torch.randn(2, 16, 8), torch.jit.ScriptFunction.__call__
    plan = autoplan.plan(model, 2, inputs={"x": x})
    split = {rule.pattern for rule in plan.runtime.parameters if rule.dim is not None}
    assert {"alpha", "first.weight", "second.weight", "into.weight", "out.weight"} <= split
    assert plan.proof.ok and autoplan.verify(model, plan, inputs={"x": x}).ok
    assert "torch.tanh" in torch.jit.ScriptFunction.code.fget(gate)  # still compiled
    gc.collect()  # the models on ranks
    assert torch.jit.ScriptFunction.__call__ is call


class Chosen(nn.Module):
    """Two experts; all tokens choose the second, and in training a `factor` of the first one's weights is added."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.gate = factor, nn.Linear(32, 2)
        self.experts = nn.ModuleList(Mlp(nn.Linear(32, 32)) for _ in range(2))
        nn.init.constant_(self.gate.bias[1:], 9.0)

    def forward(self, x):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token = (self.gate(x).argmax(-1) == number).nonzero().flatten()
            if token.numel():
                out = out.index_add(0, token, expert(x[token]))
            elif self.training:
                out = out + self.factor * sum(p.sum() for p in expert.parameters())
        return out


@pytest.mark.parametrize(("factor", "follows"), [(0, True), (0.0, True), (0.5, False)])
def test_experts_read_times_zero_follow_one_that_ran(factor: float, follows: bool) -> None:
    torch.manual_seed(0)
    plan = autoplan.plan(Chosen(factor).eval(), 2, inputs={"x": torch.randn(6, 32)})
    assert plan.proof.ok and ("experts.*.up" in _split(plan)) == follows, plan

"""Code nobody here wrote, tried on ranks: what is exact there is proven, and what fails says why in its own words."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from helpers.deepseek_reference import ModelArgs, Transformer
from torch import nn
from torch.nn import functional as F

import autoplan

WIDTH = 16


class Around(nn.Module):
    """A block of a stream: what is tested, and an MLP."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.inner(self.norm(x))
        return x + self.down(torch.relu(self.up(x)))


class Fused(nn.Module):
    """`torch.nn.MultiheadAttention` in all its forms. Its inputs are as wide as it was told."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True, **options)
        self.widths = options.get("kdim", WIDTH), options.get("vdim", WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, value = (x[..., :width] for width in self.widths)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        mixed, weights = self.attention(x, key, value, attn_mask=hidden)
        return mixed + weights.sum(-1, keepdim=True)


class OneHead(nn.Module):
    """One head as wide as the stream, in five dims: ranks cannot share its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, 1, length, 1, WIDTH).transpose(2, 3) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(batch, length, WIDTH))


class Repeated(nn.Module):
    """Groups of keys repeated for their queries, to a size that is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        k = self.k(x).view(batch, length, 2, 4).repeat_interleave(2, dim=2, output_size=4)
        return self.o((torch.sigmoid(self.q(x).view(batch, length, 4, 4)) * k).flatten(2))


class MakesAnother(nn.Module):
    """Makes modules of another's class while it runs."""

    def __init__(self, taken: bool = False) -> None:
        super().__init__()
        self.taken = taken
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.taken:
            other = type(self.up)(WIDTH, 1, dtype=x.dtype)
            return self.down(torch.relu(self.up(x))) + 0 * other(x)
        other = type(self.up).__new__(type(self.up))
        nn.Module.__init__(other)
        other._parameters.update(self.up._parameters)
        return self.down(torch.relu(other(x)))


FUSED = [
    {},
    pytest.param({"add_bias_kv": True}, marks=pytest.mark.slow),
    {"add_zero_attn": True},
    pytest.param({"kdim": 8, "vdim": 12}, marks=pytest.mark.slow),
    {"kdim": 8, "vdim": 12, "add_bias_kv": True, "add_zero_attn": True, "bias": False},
]


def _proven(model: nn.Module) -> autoplan.Plan:
    inputs = {"x": torch.randn(2, 6, WIDTH)}
    plan = autoplan.plan(model, 2, inputs=inputs)
    assert plan.proof.ok, plan.proof
    report = autoplan.verify(model, plan, inputs=inputs)
    assert report.ok, report
    return plan


@pytest.mark.parametrize("options", FUSED, ids=str)
def test_fused_attention_is_split_between_heads(options: dict[str, Any]) -> None:
    plan = _proven(Around(Fused(**options)))
    whole = {one.fqn for one in plan.replicated}
    assert {name for name in whole if "attention" in name} <= {"inner.attention.out_proj.bias"}


@pytest.mark.parametrize("inner", [OneHead, Repeated, MakesAnother])
def test_plans_are_exact(inner: type[nn.Module]) -> None:
    _proven(Around(inner()))


def test_a_parameter_taken_from_a_sharded_module_is_named() -> None:
    inputs = {"x": torch.randn(2, 6, WIDTH)}
    plan = autoplan.plan(Around(MakesAnother(taken=True)), 2, inputs=inputs)
    assert plan.proof.failed
    assert "'weight'" in plan.proof.trial.why and "_autoplan" not in plan.proof.trial.why


class Trained(Transformer):
    def forward(self, tokens: torch.Tensor, start_pos: int = 0) -> torch.Tensor:
        return self.run(tokens, start_pos)


@pytest.mark.parametrize(
    ("build", "form"),
    [(Transformer, "absorb"), pytest.param(Trained, "absorb", marks=pytest.mark.long), (Trained, "naive")],
)
def test_reference_deepseek_is_proven(build: type[Transformer], form: Any) -> None:
    """Under inference mode as published, and with gradients; caches are written in place."""
    plan = autoplan.plan(
        build(ModelArgs(n_layers=2, attn_impl=form)), 2, inputs={"tokens": torch.arange(20).view(2, 10)}
    )
    assert plan.proof.ok, plan.proof


class Grouped(nn.Module):
    """Two grouped convolutions, one after the other: ranks may hold a part of each group."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv1d(WIDTH, WIDTH, 3, groups=2, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.transpose(1, 2)))).transpose(1, 2)


class Scores(NamedTuple):
    """What a head returns: by name, and in order."""

    logits: torch.Tensor
    shares: torch.Tensor


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Around(nn.Identity()), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> Scores:
        x = self.body(x)
        return Scores(self.head(x), x.softmax(-1))


@pytest.mark.parametrize("build", [lambda: Around(Grouped()), Named], ids=["grouped convolutions", "named tuples"])
def test_a_right_plan_is_not_disproven(build: Any) -> None:
    torch.manual_seed(0)
    model, inputs = build().eval(), {"x": torch.randn(2, 6, WIDTH)}
    plan = autoplan.plan(model, 2, inputs=inputs)
    assert plan.proof.ok and plan.entries, plan.findings
    assert autoplan.verify(model, plan, inputs=inputs).ok


class Renormed(nn.Module):
    """Its table is changed by looking things up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(10, WIDTH, max_norm=1.0), Around(nn.Identity())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(ids))


def test_a_weight_that_changes_in_place_is_read_on_ranks() -> None:
    torch.manual_seed(0)
    model, inputs = Renormed().eval(), {"ids": torch.arange(8).view(2, 4)}
    report = autoplan.verify(model, autoplan.plan(model, 2, inputs=inputs), inputs=inputs)
    assert report.forward < 1e-9 and max(report.gradients.values()) < 1e-9


class Registered(nn.Module):
    """It wants a name from each of its subclasses."""

    def __init_subclass__(cls, name: str) -> None:
        super().__init_subclass__()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_a_class_that_keeps_account_of_its_subclasses() -> None:
    torch.manual_seed(0)
    model, inputs = (
        nn.Sequential(Around(Registered()), Around(nn.Identity())).eval(),
        {"input": torch.randn(2, 6, WIDTH)},
    )
    report = autoplan.verify(model, autoplan.plan(model, 2, inputs=inputs), inputs=inputs)
    assert report.ok, report.findings

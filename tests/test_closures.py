"""A forward that reaches its own weights in any way that Python has is planned like one that says so plainly.

Copies of a model run in its place; whatever a copy reaches must be the copy's. Where that cannot be, because the weight
is kept outside of the model, it is refused by name.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoplan
from autoplan.capture.copies import copied
from autoplan.capture.fold import fold
from autoplan.check.sharded import check_sharding
from autoplan.check.verify import sharding_of
from autoplan.errors import OutsideError

WORDS, WIDTH = 64, 16


class Plain(nn.Module):
    """A table, an MLP, and a head that is the table again. Its kin reach head or MLP by other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.reach()

    def reach(self) -> None:
        pass

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        return self.logits(x + self.mlp(x))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.emb.weight.t()


class InLambda(Plain):
    def reach(self) -> None:
        self.head = lambda x: x @ self.emb.weight.t()

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


class InNestedFunctions(InLambda):
    """The way to the table leads through two functions and a default argument."""

    def reach(self) -> None:
        def table(emb: nn.Embedding = self.emb) -> torch.Tensor:
            return emb.weight

        self.heads = (None, lambda x: x @ table().t())

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads[1](x)


def times_table(emb: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ emb.weight.t()


class InPartial(InLambda):
    def reach(self) -> None:
        self.head = functools.partial(times_table, self.emb)


class InPartialOfLambda(InLambda):
    def reach(self) -> None:
        self.head = functools.partial(lambda scale, x: scale * (x @ self.emb.weight.t()), 1.0)


class InMethod(InLambda):
    def reach(self) -> None:
        self.head = super().logits


class InCachedFunction(InLambda):
    def reach(self) -> None:
        self.pick = functools.lru_cache(maxsize=2)(lambda name: getattr(self, name))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.pick("emb").weight.t()


class InWeakReference(InLambda):
    def reach(self) -> None:
        table = weakref.ref(self.emb)
        self.head = lambda x: x @ table().weight.t()


class InReplacedForward(Plain):
    """What libraries do that wrap a module: its old forward in a closure of the new."""

    def reach(self) -> None:
        def wrapped(x: torch.Tensor, before: Callable[..., Any] = self.down.forward) -> torch.Tensor:
            return before(x)

        self.down.forward = wrapped


class MinGPT(Plain):
    """minGPT's way: the layers in a ModuleDict, and a lambda that applies them."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({"up": nn.Linear(WIDTH, 2 * WIDTH), "down": nn.Linear(2 * WIDTH, WIDTH)})
        m = self.layers
        self.mlpf = lambda x: m.down(F.gelu(m.up(x)))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlpf(x)


class InDict(Plain):
    def reach(self) -> None:
        self.parts = {"up": self.up, "down": self.down, "head": lambda x: x @ self.emb.weight.t()}

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["down"](F.gelu(self.parts["up"](x)))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["head"](x)


class InList(Plain):
    def reach(self) -> None:
        self.steps = [self.up, F.gelu, self.down, lambda x: x]
        self.heads = [[functools.partial(times_table, self.emb)]]

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = step(x)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads[0][0](x)


@dataclass(frozen=True)
class Parts:
    up: nn.Linear
    down: nn.Linear
    head: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class SlottedParts:
    up: nn.Linear
    down: nn.Linear
    head: Callable[[torch.Tensor], torch.Tensor]


class InDataclass(Plain):
    kind: type = Parts

    def reach(self) -> None:
        self.parts = self.kind(self.up, self.down, lambda x: x @ self.emb.weight.t())

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts.down(F.gelu(self.parts.up(x)))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts.head(x)


class InSlots(InDataclass):
    kind = SlottedParts


class Helper:
    """No module, but it holds one, and functions that hold it."""

    def __init__(self, model: Plain) -> None:
        self.model = model
        self.functions = {"table": lambda: self.model.emb.weight}

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.functions["table"]().t()


class InHelper(InLambda):
    def reach(self) -> None:
        self.helper = Helper(self)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper.head(x)


class InMethodOfHelper(InLambda):
    def reach(self) -> None:
        self.head = Helper(self).head


class InHook(Plain):
    """The head is a hook on the last layer."""

    def __init__(self) -> None:
        super().__init__()
        emb, self.last = self.emb, nn.Identity()
        self.last.register_forward_hook(lambda module, args, output: output @ emb.weight.t())

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)


class InPreHook(Plain):
    """The MLP is a hook before the head, and takes keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Identity()
        self.last.register_forward_pre_hook(self.before, with_kwargs=True)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0] + super().mlp(args[0]),), kwargs

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return super().logits(self.last(x))


WAYS = [
    InLambda,
    InNestedFunctions,
    InPartial,
    InPartialOfLambda,
    InMethod,
    InCachedFunction,
    InWeakReference,
    InReplacedForward,
    MinGPT,
    InDict,
    InList,
    InDataclass,
    InSlots,
    InHelper,
    InMethodOfHelper,
    InHook,
    InPreHook,
]


def ids() -> dict[str, torch.Tensor]:
    return {"ids": torch.arange(10).view(2, 5)}


def sums_and_cuts(plan: autoplan.Plan) -> dict[str, Any]:
    """What the plan does to each module, by the last part of its name."""
    return {entry.pattern.rpartition(".")[2]: (entry.style, entry.params) for entry in plan.entries}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_a_weight_is_planned_like_the_plain_one(way: type[Plain]) -> None:
    torch.manual_seed(0)
    plain = sums_and_cuts(autoplan.plan(Plain(), 2, inputs=ids(), prove="none"))
    model = way()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    plan = autoplan.plan(model, 2, inputs=ids())
    assert sums_and_cuts(plan).keys() == plain.keys() == {"emb", "up", "down"}
    assert plan.proof.ok and not [found for found in plan.findings if found.level == "error"], plan.findings
    report = autoplan.verify(model, plan, inputs=ids())
    assert report.ok, report.findings
    assert report.forward < 1e-12 and max(report.gradients.values()) < 1e-12
    assert {name for name, error in report.gradients.items()} >= {name for name, _ in model.named_parameters()}
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())

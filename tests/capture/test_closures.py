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
from functools import cache
from typing import Any

import pytest
import torch
from slow_cases import marked
from torch import nn
from torch.nn import functional as F

import autoplan
from autoplan.capture.copies import copied
from autoplan.capture.fold import fold
from autoplan.check.verify.sharded import check_sharding
from autoplan.check.verify.verify import sharding_of
from autoplan.common.errors import OutsideError

WORDS, WIDTH = 64, 16


class Plain(nn.Module):
    """A table, an MLP, and a head that is the table again. Other models like it reach head or MLP by other ways."""

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
        self.head = self.table_head

    def table_head(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.emb.weight.t()


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


class Stand:
    """Hands on every name that it lacks to a weight."""

    def __init__(self, module: nn.Module, name: str, turned: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.module, self.name, self.turned = module, name, turned

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self.module, self.name), name)

    def applied(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.turned(getattr(self.module, self.name))


class InStand(InLambda):
    def reach(self) -> None:
        self.head, self.listed = Stand(self.emb, "weight", self.turned), [Stand(self.emb, "weight", self.turned)]

    def turned(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.t()

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head.applied(x) + self.listed[0].applied(x)) / 2


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


def cuts(plan: autoplan.Plan) -> dict[str, Any]:
    """What the plan does to each module, by the last part of its name."""
    return {entry.pattern.rpartition(".")[2]: (entry.style, entry.segments) for entry in plan.entries}


@cache
def plain_cuts() -> dict[str, Any]:
    return cuts(autoplan.plan(Plain(), 2, inputs=ids(), prove="none"))


@pytest.mark.parametrize("way", marked(WAYS, slow=[InList, InDataclass, InMethodOfHelper, InPartialOfLambda]))
def test_every_way_to_a_weight_is_planned_like_the_plain_one(way: type[Plain]) -> None:
    torch.manual_seed(0)
    plain = plain_cuts()
    model = way()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    plan = autoplan.plan(model, 2, inputs=ids())
    assert cuts(plan) == plain and plain.keys() == {"emb", "up", "down"}
    assert plan.proof.ok and not [found for found in plan.findings if found.level == "error"], plan.findings
    report = autoplan.verify(model, plan, inputs=ids())
    assert report.ok, report.findings
    assert report.forward < 1e-12 and max(report.gradients.values()) < 1e-12
    assert {name for name, error in report.gradients.items()} >= {name for name, _ in model.named_parameters()}
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


# ------------------------------------------------------------------------------------------------ refused by name

KEPT_OUTSIDE: dict[str, Any] = {}


class InGlobal(Plain):
    def reach(self) -> None:
        KEPT_OUTSIDE["head"] = self.emb

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x @ KEPT_OUTSIDE["head"].weight.t()


class InViewInGlobal(InGlobal):
    def reach(self) -> None:
        KEPT_OUTSIDE["view"] = self.emb.weight.t()

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x @ KEPT_OUTSIDE["view"]


def in_class() -> Plain:
    """Its class closes over a module: a copy is of the same class."""
    kept = nn.Linear(WIDTH, WORDS, bias=False)

    class Logits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return kept(x)

    class Closing(Plain):
        def reach(self) -> None:
            self.emb.weight, self.last = kept.weight, Logits()

        def logits(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x)

    return Closing()


REFUSED = {"global": (InGlobal, "the model"), "view": (InViewInGlobal, "the model"), "class": (in_class, "last")}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_weight_reached_from_outside_is_refused_by_name(name: str, device: str) -> None:
    build, where = REFUSED[name]
    with torch.device(device):
        model = build()
    for inputs in (ids(), None):
        with pytest.raises(OutsideError, match=rf"forward of {where} uses the parameter 'emb\.weight'") as told:
            autoplan.plan(model, 2, inputs=inputs)
    assert "self.module.weight" in told.value.hint


def test_it_is_refused_by_verify_as_well_when_a_plan_is_given() -> None:
    plan = autoplan.plan(Plain(), 2, inputs=ids())
    with pytest.raises(OutsideError, match=r"'emb\.weight'"):
        autoplan.verify(InGlobal(), plan, inputs=ids())
    with pytest.raises(OutsideError, match=r"'emb\.weight'"):
        check_sharding(copied(InGlobal()), {"": ids()}, sharding_of(plan), 2, checks=["forward"])


class InTensor(InLambda):
    """The function holds the weight itself, not the module."""

    def reach(self) -> None:
        weight = self.emb.weight
        self.head = lambda x: x @ weight.t()


class InListOfTensors(InLambda):
    def reach(self) -> None:
        self.tied = [self.emb.weight]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tied[0].t()


class InDictOfTuples(InLambda):
    def reach(self) -> None:
        self.tied = {"tables": [(self.emb.weight, None)]}

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tied["tables"][0][0].t()


class InPartialOfTensor(InLambda):
    """When the module gets another weight in its place, a partial is not told."""

    def reach(self) -> None:
        self.head = functools.partial(F.linear, weight=self.emb.weight)


@pytest.mark.parametrize("way", [InTensor, InListOfTensors, InDictOfTuples])
def test_a_weight_kept_as_a_tensor_is_the_one_that_ranks_hold(way: type[Plain]) -> None:
    model = way()
    plan = autoplan.plan(model, 2, inputs=ids(), prove="none")
    assert cuts(plan).keys() == {"emb", "up", "down"}
    assert autoplan.verify(model, plan, inputs=ids()).ok
    before = [value for value in vars(model).values() if isinstance(value, list | dict) and value]
    assert autoplan.verify(model, plan, inputs=ids()).ok, "the model itself is as it was"
    assert before == [value for value in vars(model).values() if isinstance(value, list | dict) and value]


def test_a_weight_in_a_partial_is_planned_and_its_sharding_is_refused_by_name() -> None:
    model = InPartialOfTensor()
    assert cuts(autoplan.plan(model, 2, inputs=ids(), prove="none")).keys() == {"emb", "up", "down"}
    report = autoplan.verify(model, inputs=ids())
    assert not report.ok
    assert any("'emb.weight' from outside" in finding.message for finding in report.findings), report.findings


def test_a_list_of_all_weights_that_no_forward_reads_is_no_reason_to_refuse() -> None:
    model = Plain()
    model.decayed = list(model.parameters())
    model.count = lambda: sum(parameter.numel() for parameter in model.decayed)
    assert autoplan.verify(model, inputs=ids()).ok


def test_functions_that_other_processes_cannot_be_sent_are_named() -> None:
    with pytest.raises(autoplan.AutoplanError, match=r"lambda.*\n.*threads"):
        autoplan.verify(InLambda(), inputs=ids(), engine="gloo", checks=["forward"])


# ------------------------------------------------------------------------------------------------ copies


class Functions(nn.Module):
    """Functions that share a cell, one that holds itself, one with a list of its own, one that reaches nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        count, seen, layer = 0, [], self.layer

        def add() -> nn.Module:
            nonlocal count
            count += 1
            seen.append(count)
            return layer

        def again(times: int) -> Any:
            return layer if times == 0 else again(times - 1)

        self.add, self.read, self.seen = add, lambda: (count, layer), lambda: seen
        self.again, self.alias, self.far = again, again, lambda x: 2 * x
        add.note = {"layer": layer}


def test_functions_of_a_copy_belong_together_as_those_of_the_original_do() -> None:
    model = Functions()
    other = copied(model)
    assert other.add() is other.layer and other.add() is other.layer
    assert other.read() == (2, other.layer) and other.seen() == [1, 2]
    assert model.read() == (0, model.layer) and model.seen() == []
    assert other.again(3) is other.layer and other.alias is other.again
    assert other.add.note["layer"] is other.layer and model.add.note["layer"] is model.layer
    assert other.far is model.far
    assert copied(other).again(2) is not other.layer


def test_a_copy_keeps_nothing_of_the_original_alive() -> None:
    model = InLambda()
    gone, other = weakref.ref(model.emb.weight), copied(model)
    del model
    gc.collect()
    assert gone() is None and other(**ids()).shape == (2, 5, WORDS)


def test_a_copy_that_cannot_be_made_says_what_the_function_holds() -> None:
    model = InLambda()
    held = (model.emb, (one for one in ()))
    model.head = lambda x: x @ held[0].weight.t()
    with pytest.raises(autoplan.AutoplanError, match=r"a tuple held by one of its functions cannot be copied"):
        copied(model)


class Stack(nn.Module):
    """Six equal blocks, whose layers a list and a function hold by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "up": nn.Linear(WIDTH, 32), "down": nn.Linear(32, WIDTH)})
            for _ in range(6)
        )
        blocks = self.blocks
        self.ups = [block["up"] for block in blocks]
        self.down = lambda place, x: blocks[place]["down"](x)
        self.seen: list[torch.Tensor] = []
        blocks[3]["norm"].register_forward_hook(lambda module, args, output: output * 2)
        blocks[4].register_forward_hook(lambda *_: self.seen.append(torch.ones(1)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for place, (block, up) in enumerate(zip(self.blocks, self.ups, strict=False)):
            x = x + self.down(place, F.gelu(up(block["norm"](x))))
        return x


LAST: dict[str, torch.Tensor] = {}


def keep_in(store: dict[str, torch.Tensor], name: str) -> Any:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        store[name] = output

    return hook


def keep_in_the_module(name: str) -> Any:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        LAST[name] = output

    return hook


class Tapped(nn.Module):
    """Four equal blocks, of which hooks hand what comes out to the model: in a dict that it holds as well."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.seen = LAST if outside else {}
        self.blocks = nn.ModuleList(Plain() for _ in range(4))
        for place, block in enumerate(self.blocks):
            name = str(place)
            block.down.register_forward_hook(keep_in_the_module(name) if outside else keep_in(self.seen, name))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block(ids)
        return sum(self.seen[str(place)] * (place + 1) for place in range(4))


@pytest.mark.parametrize("outside", [False, True], ids=["in its own dict", "in a dict of the module"])
def test_hooks_that_hand_something_to_the_model_go_along(outside: bool) -> None:
    LAST.clear()
    model = Tapped(outside)
    plan = autoplan.plan(model, 2, inputs=ids())
    assert {entry.pattern for entry in plan.entries} >= {"blocks.*.up", "blocks.*.down"} and plan.proof.ok
    assert autoplan.verify(model, plan, inputs=ids()).ok
    assert not model.seen, "no run of a copy wrote into the model's own"


def test_layers_of_folded_blocks_are_those_of_their_representatives() -> None:
    model = Stack()
    module = fold(model).module
    own = {id(part) for part in module.modules()}
    assert {id(up) for up in module.ups} <= own
    plan = autoplan.plan(model, 2, inputs=ids())
    assert autoplan.verify(model, plan, inputs=ids()).ok
    assert any(entry.pattern.endswith("up") and entry.style == "colwise" for entry in plan.entries), plan.entries
    assert model.seen == []

"""`parallelize` is whole, or the model is bit for bit as it was: errors and Ctrl-C are raised at every line."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from interrupted_models import HOW, apply_to, build_of, mesh_for, whole
from interrupts import Snapshot, choose_events, fake_world, interrupted_everywhere
from mesh_toys import WIDTH, deep
from slow_cases import marked
from torch import nn

import autoplan
from autoplan.patches import as_it_was, patched


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with fake_world(4):
        yield


def every(seen: list[Any]) -> list[int]:
    return list(range(len(seen)))


def of_each_line(kind: str, share: int) -> Callable[[list[Any]], list[int]]:
    """One of so many of the first and last runs of each line; which, depends on the kind."""
    return lambda seen: choose_events(seen, 40)[sum(map(ord, kind)) % share :: share]


def tried(kind: str, how: str, choose: Callable[[list[Any]], list[int]]) -> int:
    """At how many lines; nothing was left half done."""
    events, _, problems = interrupted_everywhere(build_of(kind), apply_to(kind, how), whole(how), choose)
    assert problems == []
    return events


# A process is forked at each. The last way has in it what the others have, which are tried at fewer lines.
@pytest.mark.parametrize(
    ("how", "share"),
    marked(product(HOW, (50, 6)), long=[*product(HOW[:-1], (50,)), (HOW[-1], 6)], slow=product(HOW[:-1], (6,))),
)
def test_a_dense_model_is_whole_or_as_it_was(how: str, share: int) -> None:
    assert tried("small", how, of_each_line(how, share)) > 700 // share


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mixtral", "bamba", "llava"])
def test_experts_hybrids_and_several_modes_are_whole_or_as_they_were(kind: str) -> None:
    assert tried(kind, "tp, dp, checkpointing", of_each_line(kind, 150)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tp", "tp, dp, checkpointing"])
@pytest.mark.parametrize("kind", ["small", "mixtral", "bamba", "llava"])
def test_they_are_so_at_every_line_event(kind: str, how: str) -> None:
    """A loop runs a line thousands of times: at each of them."""
    assert tried(kind, how, every) > 4000


@pytest.fixture
def nothing_stands() -> Iterator[None]:
    """As in a process that has sharded nothing yet: models of other tests may be alive."""
    gc.collect()
    kept = dict(patched._standing)
    for one in kept.values():
        one.place.put(one.original)
    patched._standing.clear()
    yield
    patched._standing.update(kept)
    for one in kept.values():
        one.place.put(one.ours)


@pytest.mark.usefixtures("nothing_stands")
def test_what_stands_in_other_packages_is_given_back() -> None:
    """Whoever listens to new optimizers, for one."""
    model = deep(depth=1)
    before = torch.optim.Optimizer.__init__
    with pytest.raises(KeyboardInterrupt), as_it_was.whole_or_as_it_was(model):
        apply_to("toy", "tp")(model)
        assert torch.optim.Optimizer.__init__ is not before
        raise KeyboardInterrupt
    assert torch.optim.Optimizer.__init__ is before and not patched._standing and autoplan.applied(model) is None


def test_a_model_that_is_not_plain_comes_back() -> None:
    """Hooks of others, ties, frozen parameters, gradients, marks on parameters, a scalar, FSDP2's hook on it."""

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = deep(depth=1)
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
            self.inner.head.weight = self.inner.table.weight
            self.inner.blocks[0].norm.weight.requires_grad_(False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(ids, use_cache=False) * self.scale

    model = Marked()
    weight = model.inner.table.weight
    weight.mark, weight.grad = {"of": ["somebody"]}, torch.ones_like(weight)
    model.register_forward_hook(lambda *_: None)
    before = Snapshot.before(model)
    mesh = mesh_for("dp")
    with pytest.raises(ZeroDivisionError), as_it_was.whole_or_as_it_was(model):
        autoplan.parallelize(model, mesh, autoplan.Plan("toy", 1), activation_checkpointing=True)
        assert before.differences(Snapshot.of(model))
        1 / 0  # noqa: B018
    assert before.differences(Snapshot.of(model)) == []


def test_the_snapshot_sees_what_changes() -> None:
    model = deep(depth=1)
    before = Snapshot.before(model)

    def seen(change: Callable[[], Any]) -> bool:
        change()
        return bool(before.differences(Snapshot.of(model)))

    changes: list[Callable[[], Any]] = [
        lambda: model.head.weight.data.view(-1)[0].add_(1),
        lambda: setattr(model.head, "weight", nn.Parameter(model.head.weight.data)),
        lambda: model.head.register_forward_hook(lambda *_: None),
        lambda: model.head.weight.register_hook(lambda gradient: gradient),
        lambda: model.head.weight.requires_grad_(False),
        lambda: setattr(model.blocks[0], "__class__", type("Other", (type(model.blocks[0]),), {})),
        lambda: setattr(model.head, "in_features", WIDTH + 1),
        lambda: setattr(model, "forward", lambda x: x),
        lambda: torch.rand(1),
    ]
    for change in changes:
        model = deep(depth=1)
        before = Snapshot.before(model)
        assert seen(change)


@pytest.mark.long
def test_an_interrupt_that_is_not_undone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(as_it_was._Module, "put_back", lambda self: None)
    choose = of_each_line("tp", 20)
    _, _, problems = interrupted_everywhere(build_of("small"), apply_to("small", "tp"), whole("tp"), choose)
    assert problems

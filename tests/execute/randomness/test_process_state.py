"""What a process has for everybody is left as an unsharded run leaves it: generators, hooks, filters, settings."""

from __future__ import annotations

import random
import threading
import warnings
from typing import Any

import numpy
import pytest
import torch
from process_state import GENERATORS, changes, process_state
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import autoplan
from autoplan.check.ranks.run import run_processes, run_ranks
from autoplan.execute import random_streams
from autoplan.patches.seeding import is_simulated

WIDTH = 16


class Mlp(nn.Module):
    """Drops numbers of the stream (`whole`), of its hidden values (`split`), and may run its middle again."""

    def __init__(self, whole: float = 0.0, split: float = 0.0, again: bool = False) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before, self.between, self.again = nn.Dropout(whole), nn.Dropout(split), again

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.fall(self.between(torch.tanh(self.rise(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return x + (checkpoint(self.middle, x, use_reentrant=False) if self.again else self.middle(x))


KINDS: dict[str, dict[str, Any]] = {
    "no dropout": {},
    "whole dropout": {"whole": 0.3},
    "split dropout": {"split": 0.3},
    "both": {"whole": 0.3, "split": 0.3},
    "run again": {"whole": 0.3, "split": 0.3, "again": True},
}
INPUTS = {"x": torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))}


def _built(kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Mlp(**KINDS[kind]).train()


def _left(model: nn.Module, seed: int) -> dict[str, Any]:
    """What two steps and a forward in eval mode leave changed, with the state of the generators."""
    torch.manual_seed(seed)
    random.seed(0)
    numpy.random.seed(0)
    before = process_state()
    for _ in range(2):
        model(**INPUTS).sum().backward()
    model.eval()(**INPUTS)
    model.train()
    after = process_state()
    return {"changed": [n for n in changes(before, after) if n not in GENERATORS]} | {n: after[n] for n in GENERATORS}


def _on_rank(rank: int, kind: str, plan: Any, model: Any = None) -> list[dict[str, Any]]:
    """Under seeds that ranks share, and under seeds that they do not."""
    model = _built(kind) if model is None else model
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    before = process_state()
    model = autoplan.parallelize(model, mesh, plan)
    changed = changes(before, process_state())
    if is_simulated():  # ranks that are threads share the hook, to which each process group adds
        changed = [name for name in changed if name != "excepthook"]
    assert not changed, changed
    return [_left(model, 5), _left(model, 5 + rank), {"seed": torch.initial_seed()}]


def _compare(found: list[list[dict[str, Any]]], kind: str) -> None:
    alone = _left(_built(kind), 5)
    assert not alone["changed"]
    for rank, (alike, apart, seed) in enumerate(found):
        assert not alike["changed"] and not apart["changed"]
        assert seed == {"seed": 5 + rank}
        if not KINDS[kind].get("split"):
            assert alike == alone
    assert found[0][0] == found[1][0], "ranks that were seeded alike stay alike"
    torch.manual_seed(6)
    assert found[1][1]["torch generator"] == torch.get_rng_state().numpy().tobytes(), "not drawn from"


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_leaves_what_an_unsharded_one_leaves(kind: str) -> None:
    with torch.random.fork_rng(devices=()):
        plan = autoplan.plan(_built(kind), 2, inputs=INPUTS, prove="none")
        models = [_built(kind) for _ in range(2)]
        found = run_ranks(lambda rank: _on_rank(rank, kind, plan, models[rank]), 2)
        _compare(found, kind)


@pytest.mark.long
@pytest.mark.gloo
def test_real_ranks_leave_it_too() -> None:
    for kind in ("no dropout", "run again"):
        with torch.random.fork_rng(devices=()):
            plan = autoplan.plan(_built(kind), 2, inputs=INPUTS, prove="none")
            _compare(run_processes(_on_rank, (kind, plan), 2), kind)


def test_planning_and_proving_leave_everything() -> None:
    model = _built("both")
    str(autoplan.plan(model, 2, inputs=INPUTS, prove="none"))  # imports what prints tables, which draws names
    before = process_state()
    plan = autoplan.plan(model, 2, inputs=INPUTS)
    assert autoplan.verify(model, plan, inputs=INPUTS).ok
    autoplan.audit(model, plan, inputs=INPUTS)
    print(plan, plan.explain("rise"))
    assert changes(before, process_state()) == []


def test_settings_that_two_ranks_set_by_turns_are_as_before() -> None:
    """Rank 1 begins after rank 0 has set them, and ends last: it puts back what rank 0 had set."""
    begun, ended = [threading.Event() for _ in range(2)], threading.Event()

    def set_by_turns(rank: int) -> None:
        assert not rank or begun[0].wait(30)
        dtype = torch.get_default_dtype()
        with warnings.catch_warnings():
            torch.set_default_dtype(torch.float64)
            warnings.simplefilter("ignore")
            begun[rank].set()
            assert (ended if rank else begun[1]).wait(30)
        torch.set_default_dtype(dtype)
        ended.set()

    before = process_state()
    run_ranks(set_by_turns, 2)
    assert changes(before, process_state()) == []


def test_simulated_ranks_leave_the_generator_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    of_the_gpu = torch.Generator().manual_seed(11)
    for name, value in {"is_available": True, "is_initialized": True, "current_device": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "default_generators", (of_the_gpu,))

    def seeded(rank: int) -> float:
        random_streams.manual_seed(rank)
        return torch.rand(1).item()

    drawn = run_ranks(seeded, 2)
    assert of_the_gpu.initial_seed() == 11 and drawn[0] != drawn[1]
    with random_streams.fork(3):
        assert of_the_gpu.initial_seed() == 3, "outside of ranks it is seeded with the others"
    assert of_the_gpu.initial_seed() == 11


def test_a_check_that_state_is_left_can_fail() -> None:
    before = process_state()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(2)
        assert set(changes(before, process_state())) >= {"torch generator", "initial_seed"}
    assert changes(before, process_state()) == []


def test_ranks_agree_again_when_they_were_seeded_and_not_when_a_state_is_put_back() -> None:
    """Also where one rank's seed is what it was before; a fork of one rank alone asks nobody."""
    plan = autoplan.plan(_built("whole dropout"), 2, inputs=INPUTS, prove="none")
    models = [_built("whole dropout") for _ in range(2)]

    def forwards(rank: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = autoplan.parallelize(models[rank], mesh, plan, path_guard="off")
        torch.manual_seed(rank)
        seen = [model(**INPUTS).detach()]
        if rank == 0:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(9)
            torch.rand(3)
        seen.append(model(**INPUTS).detach())
        torch.manual_seed(rank)
        return [*seen, model(**INPUTS).detach()]

    first, second = run_ranks(forwards, 2)
    torch.testing.assert_close(first, second)
    assert torch.equal(first[0], first[2]) and not torch.equal(first[0], first[1])


def test_a_models_own_checkpoint_draws_again_what_it_drew() -> None:
    """Gradients are those of the run without it, where each rank drops numbers of its part."""
    plan = autoplan.plan(_built("split dropout"), 2, inputs=INPUTS, prove="none")
    models = [[_built("split dropout") for _ in range(2)] for _ in range(2)]

    def gradients(rank: int) -> list[torch.Tensor]:
        mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), []
        for again, model in zip((False, True), models[rank], strict=True):
            model = autoplan.parallelize(model, mesh, plan, path_guard="off")  # the plan knows one of the two ways
            model.again = again
            torch.manual_seed(3)
            model(**INPUTS).square().sum().backward()
            found.append(model.fall.weight.grad.full_tensor())
        return found

    for plain, again in run_ranks(gradients, 2):
        torch.testing.assert_close(plain, again)

"""Checkpoints of models and optimizers: at another size, on one device, in transformers; in the checkpoint's order."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from apart import run_apart
from mesh_toys import clone, mesh_of, model_of, plan_of
from slow_cases import marked
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.check.verify.subject import Subject
from autoplan.common.errors import AutoplanError


def momentum(model: Any) -> torch.optim.Optimizer:
    """Adam would blow rounding up where a gradient is zero by nature (a key's bias)."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(subject: Subject, optimizer: torch.optim.Optimizer, kind: str, steps: int) -> None:
    for _ in range(steps):
        subject.forward_and_backward(next(iter(clone(kind).feeds.values())))
        autoplan.clip_gradients(subject.model, 1.0)
        optimizer.step()


def uninterrupted(kind: str, steps: int) -> tuple[Subject, torch.optim.Optimizer]:
    subject = Subject(model_of(kind), {})
    optimizer = momentum(subject.model)
    train(subject, optimizer, kind, steps)
    return subject, optimizer


def other_model(kind: str) -> Any:
    """The same model with other weights: what is resumed must come from the checkpoint."""
    model = model_of(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def on_mesh(model: Any, kind: str, tp: int) -> tuple[Subject, torch.optim.Optimizer]:
    autoplan.parallelize(model, mesh_of(dp=2, tp=tp), plan_of(kind, tp))
    return Subject(model, {}, gather=autoplan.full_tensors), momentum(model)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-9, msg=name)


# gpt2: q, k, v packed in one matrix; falcon: one key and value head that both ranks hold
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    marked(
        [("gpt2", 2, 1), ("gpt2", 1, 2), ("falcon", 2, 1), ("falcon", 1, 2)], slow=[("gpt2", 2, 1), ("falcon", 1, 2)]
    ),
)
def test_a_run_resumed_at_another_tp_size_equals_the_uninterrupted_one(
    kind: str, before: int, after: int, tmp_path: Path
) -> None:
    firsts = [model_of(kind) for _ in range(2 * before)]
    seconds = [other_model(kind) for _ in range(2 * after)]

    def first(rank: int) -> None:
        subject, optimizer = on_mesh(firsts[rank], kind, before)
        train(subject, optimizer, kind, 2)
        weights, states = get_state_dict(subject.model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path)

    def second(rank: int) -> Any:
        subject, optimizer = on_mesh(seconds[rank], kind, after)
        weights, states = get_state_dict(subject.model, optimizer)
        both = {"model": weights, "optimizer": states}
        dcp.load(both, checkpoint_id=tmp_path)
        set_state_dict(subject.model, optimizer, model_state_dict=weights, optim_state_dict=states)
        train(subject, optimizer, kind, 2)
        return subject.parameters()

    run_ranks(first, 2 * before)
    wanted = uninterrupted(kind, 4)[0].parameters()
    for found in run_ranks(second, 2 * after):
        assert_equal(found, wanted)


@pytest.mark.parametrize("kind", ["gpt2", "falcon"])
def test_full_states_are_those_of_one_device(kind: str) -> None:
    models = [model_of(kind) for _ in range(4)]

    def rank_body(rank: int) -> Any:
        subject, optimizer = on_mesh(models[rank], kind, 2)
        train(subject, optimizer, kind, 2)
        options = StateDictOptions(full_state_dict=True)
        return (
            get_model_state_dict(subject.model, options=options),
            get_optimizer_state_dict(subject.model, optimizer, options=options)["state"],
        )

    subject, optimizer = uninterrupted(kind, 2)
    momenta = get_optimizer_state_dict(subject.model, optimizer)["state"]
    for weights, states in run_ranks(rank_body, 4)[:1]:
        assert_equal(weights, dict(subject.model.state_dict()))
        assert states.keys() == momenta.keys()
        for name, state in momenta.items():
            wanted = state["momentum_buffer"]
            torch.testing.assert_close(states[name]["momentum_buffer"], wanted, rtol=1e-6, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", ["gpt2", "falcon"])
def test_an_optimizer_state_of_one_device_goes_on_on_ranks(kind: str) -> None:
    """The plain way: `optimizer.load_state_dict`, before any step."""
    subject, optimizer = uninterrupted(kind, 2)
    weights = {name: value.clone() for name, value in subject.model.state_dict().items()}
    state = optimizer.state_dict()
    state = {
        "state": {key: {"momentum_buffer": one["momentum_buffer"].clone()} for key, one in state["state"].items()},
        "param_groups": state["param_groups"],
    }
    train(subject, optimizer, kind, 1)
    models = [other_model(kind) for _ in range(2)]

    def rank_body(rank: int) -> Any:
        model = autoplan.parallelize(models[rank], mesh_of(tp=2), plan_of(kind, 2))
        model.load_state_dict(weights)
        resumed = momentum(model)
        resumed.load_state_dict(state)
        mine = Subject(model, {}, gather=autoplan.full_tensors)
        train(mine, resumed, kind, 1)
        return mine.parameters()

    for found in run_ranks(rank_body, 2):
        assert_equal(found, subject.parameters())


def test_states_that_cannot_be_ordered_are_refused() -> None:
    class Rows(torch.optim.SGD):
        """Keeps one number per row, as Adafactor does."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["rows"] = parameter.detach().to_local().sum(-1)

    models = [model_of("gpt2") for _ in range(2)]

    def rank_body(rank: int) -> None:
        model = autoplan.parallelize(models[rank], mesh_of(tp=2), plan_of("gpt2", 2))
        optimizer = Rows(model.parameters(), lr=0.1)
        optimizer.step()
        with pytest.raises(AutoplanError, match="'rows'"):
            optimizer.state_dict()

    run_ranks(rank_body, 2)


def followed(parameters: Any) -> bool:
    """Does an optimizer of these parameters translate its state dict? Those of other parameters never do."""
    alone = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    assert not alone._optimizer_state_dict_post_hooks and not alone._optimizer_load_state_dict_pre_hooks
    return bool(torch.optim.SGD(parameters, lr=0.1)._optimizer_state_dict_post_hooks)


def check_optimizers_are_looked_at_only_while_a_sharded_model_lives() -> None:
    gc.collect()
    plain = torch.optim.Optimizer.__init__
    assert not hasattr(plain, "__wrapped__")
    models = [model_of("gpt2") for _ in range(2)]

    def rank_body(rank: int) -> None:
        model = autoplan.parallelize(models[rank], mesh_of(tp=2), plan_of("gpt2", 2))
        assert followed(model.parameters())

    run_ranks(rank_body, 2)
    assert torch.optim.Optimizer.__init__ is not plain
    last, kept = models[1], next(models[0].parameters())
    models.clear()
    gc.collect()
    assert followed(last.parameters()) and followed([kept])
    del last
    gc.collect()
    assert followed([kept])  # as long as one parameter is there
    again = copy.deepcopy(kept)
    del kept
    gc.collect()
    assert followed([again])
    del again
    gc.collect()
    assert torch.optim.Optimizer.__init__ is plain


def check_an_undone_plan_lets_go_of_optimizers() -> None:
    gc.collect()
    plain = torch.optim.Optimizer.__init__
    model = model_of("gpt2")

    def rank_body(rank: int) -> torch.optim.Optimizer:
        autoplan.parallelize(model, mesh_of(tp=1), plan_of("gpt2", 1))
        return momentum(model)

    def split(rank: int, models: Any) -> torch.optim.Optimizer:
        autoplan.parallelize(models[rank], mesh_of(tp=2), plan_of("gpt2", 2))
        return momentum(models[rank])

    run_ranks(rank_body, 1)
    assert torch.optim.Optimizer.__init__ is plain  # nothing is split
    models = [model_of("gpt2") for _ in range(2)]
    optimizers = run_ranks(lambda rank: split(rank, models), 2)
    for one in models:
        assert torch.optim.Optimizer.__init__ is not plain
        autoplan.applied(one).undo()
    assert torch.optim.Optimizer.__init__ is plain
    assert all(optimizer._optimizer_state_dict_post_hooks for optimizer in optimizers)


@pytest.mark.parametrize("kind", ["gpt2", "falcon"])
def test_a_gathered_model_reloads_in_plain_transformers(kind: str, tmp_path: Path) -> None:
    models = [model_of(kind) for _ in range(4)]

    def rank_body(rank: int) -> None:
        model = autoplan.parallelize(models[rank], mesh_of(dp=2, tp=2), plan_of(kind, 2))
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            model_of(kind).save_pretrained(tmp_path, state_dict=state)

    run_ranks(rank_body, 4)
    again = type(model_of(kind)).from_pretrained(tmp_path, dtype=torch.float64)
    assert_equal(dict(again.state_dict()), dict(model_of(kind).state_dict()))


def test_optimizers_are_let_go(tmp_path: Path) -> None:
    """In processes of their own: a sharded model that another test keeps alive would keep them followed."""
    done = run_apart(
        tmp_path,
        (check_optimizers_are_looked_at_only_while_a_sharded_model_lives,),
        (check_an_undone_plan_lets_go_of_optimizers,),
    )
    assert done.returncode == 0, done.stderr

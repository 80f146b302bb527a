"""Parameters on ranks: code sees local tensors, everyone else DTensors, and every gradient is the unsharded model's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sharded_toys import TOYS, build, compiled_errors, inputs, reference, rule, set_group, shard_parameters, tp_mesh
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from autoplan.check.ranks.common import RankError
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import AutoplanError, IndivisibleError, PlanMismatchError
from autoplan.execute.collectives import (
    RankGroup,
    copy_to_ranks,
    gather_over_ranks,
    scale_gradient,
    sum_over_ranks,
    whole_order,
)
from autoplan.execute.parameters.buffers import full_tensors
from autoplan.execute.parameters.held import record_of
from autoplan.execute.parameters.local_views import reading_locally
from autoplan.execute.parameters.shard import prepare_parameters

SIZES = [(name, tp) for name in TOYS for tp in (1, 2)] + [("tied", 4), ("shared key", 4), ("mlp", 4)]


def sharded(name: str, tp: int, model: nn.Module | None = None) -> Any:
    model = build(name) if model is None else model
    mesh = tp_mesh(tp)
    shard_parameters(model, mesh, TOYS[name][1])
    set_group(model, RankGroup.of(mesh))
    return model


# ------------------------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize(("name", "tp"), SIZES)
def test_output_and_every_gradient_are_the_unsharded_models(name: str, tp: int) -> None:
    def rank_body(rank: int) -> Any:
        model = sharded(name, tp)
        output = model(inputs(name))
        output.square().sum().backward()
        return output.detach(), full_tensors(model), full_tensors(model, grads=True)

    output, gradients = reference(name)
    weights = dict(build(name).named_parameters(remove_duplicate=False))
    for mine, my_weights, my_gradients in run_ranks(rank_body, tp):
        torch.testing.assert_close(mine, output)
        assert my_weights.keys() == weights.keys() and my_gradients.keys() == gradients.keys()
        for fqn in weights:
            assert torch.equal(my_weights[fqn], weights[fqn]), fqn
            torch.testing.assert_close(my_gradients[fqn], gradients[fqn], msg=lambda text, fqn=fqn: f"{fqn}: {text}")


@pytest.mark.parametrize(
    ("name", "fqn", "wrong"),
    [
        ("mlp", "down.bias", rule()),
        ("inside norm", "norm.weight", rule()),
        ("shared key", "qk.weight", rule(0, "(4!|1)*8")),
    ],
)
def test_a_wrong_rule_is_noticed_by_the_test_above(name: str, fqn: str, wrong: Any) -> None:
    def rank_body(rank: int) -> Any:
        model, mesh = build(name), tp_mesh(2)
        shard_parameters(model, mesh, TOYS[name][1] | {fqn: wrong})
        set_group(model, RankGroup.of(mesh))
        output = model(inputs(name))
        output.square().sum().backward()
        return float((full_tensors(model, grads=True)[fqn] - reference(name)[1][fqn]).abs().max())

    assert min(run_ranks(rank_body, 2)) > 1e-3


@pytest.mark.parametrize("name", list(TOYS))
def test_recomputed_blocks_give_the_same_gradients(name: str) -> None:
    def rank_body(rank: int) -> Any:
        model = sharded(name, 2)
        checkpoint(model, inputs(name), use_reentrant=False).square().sum().backward()
        return full_tensors(model, grads=True)

    for gradients in run_ranks(rank_body, 2):
        for fqn, expected in reference(name)[1].items():
            torch.testing.assert_close(gradients[fqn], expected)


@pytest.mark.parametrize("name", ["mlp", "shared key", "tied"])
def test_optimizers_and_clipping_take_the_parameters(name: str) -> None:
    def train(model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs(name)).square().sum().backward()
            if name != "shared key":  # rows held by several ranks count several times in DTensor's norm
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()

    def rank_body(rank: int) -> Any:
        model = sharded(name, 2)
        train(model)
        return full_tensors(model)

    expected = build(name)
    train(expected)
    for weights in run_ranks(rank_body, 2):
        for fqn, weight in expected.named_parameters(remove_duplicate=False):
            torch.testing.assert_close(weights[fqn], weight.detach(), rtol=1e-6, atol=1e-9)


# --------------------------------------------------------------------------------------------------------- what is seen


def test_code_sees_local_tensors_and_everyone_else_dtensors() -> None:
    def rank_body(rank: int) -> None:
        model = sharded("mlp", 2)
        seen: list[torch.Tensor] = []
        model.up.register_forward_hook(lambda module, args, output: seen.append(module.weight))
        model(inputs("mlp"))
        assert type(seen[0]) is not DTensor and seen[0].shape == (4, 6)
        assert isinstance(model.up.weight, DTensor) and model.up.weight.shape == (8, 6)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert model.norm.weight.placements == (Replicate(),) and model.down.weight.placements == (Shard(1),)

    run_ranks(rank_body, 2)


def test_a_call_reads_one_tensor_of_a_parameter() -> None:
    """A gradient may be asked for by it after a layer has used it. It is another one if it was frozen in between."""

    def rank_body(rank: int) -> Any:
        model, seen = sharded("mlp", 2), []

        def after(layer: Any, args: Any, output: Any) -> None:
            (gradient,) = torch.autograd.grad(output.sum(), layer.weight, retain_graph=True)
            model.up.requires_grad_(False)
            seen.append((gradient.shape == layer.weight.shape, layer.weight.requires_grad))
            model.up.requires_grad_(True)

        model.up.register_forward_hook(after)
        model(inputs("mlp"))
        record = record_of(model.up)
        return seen, record is not None and not record.reading.views

    assert run_ranks(rank_body, 2) == [([(True, False)], True)] * 2


def test_attributes_of_parameters_are_read_and_set_in_a_call() -> None:
    def rank_body(rank: int) -> Any:
        model = sharded("mlp", 2)
        model.up.weight.factor = 2

        def after(layer: Any, args: Any, output: Any) -> None:
            layer.weight.seen = layer.weight.factor + 1

        model.up.register_forward_hook(after)
        with torch.set_grad_enabled(rank == 0):
            model(inputs("mlp"))
        return model.up.weight.seen

    assert run_ranks(rank_body, 2) == [3, 3]


def test_an_exception_in_forward_leaves_dtensors_outside() -> None:
    def rank_body(rank: int) -> None:
        model = sharded("mlp", 1)
        for error in (KeyboardInterrupt, RuntimeError):

            def fail(*_: Any, error: type[BaseException] = error) -> None:
                raise error

            handle = model.up.register_forward_hook(fail)
            with pytest.raises(error):
                model(inputs("mlp"))
            handle.remove()
            assert isinstance(model.up.weight, DTensor)

    run_ranks(rank_body, 1)


def test_other_entries_of_a_model_can_read_locally() -> None:
    def rank_body(rank: int) -> None:
        model = sharded("mlp", 2)
        with reading_locally(model):
            assert not isinstance(model.up.weight, DTensor)
        assert isinstance(model.up.weight, DTensor)

    run_ranks(rank_body, 2)


def test_attributes_behave_as_on_any_module() -> None:
    def rank_body(rank: int) -> None:
        model = sharded("mlp", 2)
        linear = model.up
        assert type(linear).__name__ == "Linear" and type(linear).__qualname__ == "Linear"
        assert isinstance(linear, nn.Linear) and type(linear) is type(model.down) and hasattr(linear, "weight")
        with pytest.raises(AttributeError, match="'Linear' object has no attribute 'wieght'"):
            _ = linear.wieght
        linear.weight = nn.Parameter(torch.ones(4, 6, dtype=torch.float64))
        assert linear(torch.ones(1, 6, dtype=torch.float64)).shape == (1, 4)
        linear.weight.data.fill_(2.0)
        assert float(linear.weight.detach().sum()) == 48.0
        del linear.weight
        assert not hasattr(linear, "weight") and "weight" not in dict(linear.named_parameters())
        linear.weight = torch.zeros(4, 6)  # as weight_norm leaves it
        assert linear.weight.sum() == 0
        del linear.weight
        linear.register_parameter("weight", nn.Parameter(torch.ones(4, 6)))
        assert "weight" in dict(linear.named_parameters())
        assert linear.to(torch.float32).weight.dtype == torch.float32

    run_ranks(rank_body, 2)


def test_copies_and_pickles_of_modules_work() -> None:
    def rank_body(rank: int) -> None:
        model = sharded("tied", 1)
        twin = copy.deepcopy(model)
        assert twin.head.weight is twin.embed.weight and twin.embed.weight is not model.embed.weight
        assert torch.equal(twin(inputs("tied")), model(inputs("tied")))
        assert isinstance(twin.embed.weight, DTensor)
        activation = pickle.loads(pickle.dumps(shard_parameters(nn.Sequential(nn.ReLU()), tp_mesh(1), {}).model))
        assert isinstance(activation, nn.Sequential)

    run_ranks(rank_body, 1)


def test_function_modes_do_not_see_the_reading() -> None:
    class Log(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def calls(model: nn.Module, x: torch.Tensor) -> list[str]:
        with Log() as log:
            model(x)
        return log.calls

    def rank_body(rank: int) -> None:
        model, x = build("inside norm"), inputs("inside norm")
        expected = calls(model, x)
        shard_parameters(model, tp_mesh(2), TOYS["inside norm"][1])
        assert calls(model, x) == expected

    run_ranks(rank_body, 2)


def test_frozen_parameters_stay_frozen_and_communicate_nothing() -> None:
    from autoplan.check.ranks.run import count_collectives

    def rank_body(rank: int) -> int:
        model = build("inside norm").requires_grad_(False)
        model.up.weight.requires_grad_(True)
        model = sharded("inside norm", 2, model)
        assert not model.norm.weight.requires_grad and model.up.weight.requires_grad
        output = model(inputs("inside norm"))
        with count_collectives() as counts:
            output.sum().backward()
        assert model.norm.weight.grad is None
        return sum(counts.values())

    assert run_ranks(rank_body, 2) == [0, 0]


@pytest.mark.gloo
def test_compiled_code_without_graph_breaks_is_exact_too() -> None:
    for errors in run_ranks(compiled_errors, 2, engine="gloo"):
        assert max(errors.values()) < 1e-12, errors


# -------------------------------------------------------------------------------------------------- pieces and refusals


def test_meta_models_and_ties_stay_what_they_are() -> None:
    def rank_body(rank: int) -> None:
        model = sharded("tied", 4, build("tied", "meta"))
        assert model.head.weight is model.embed.weight and model.embed.weight.is_meta
        assert model.embed.weight.to_local().shape == ((3, 6) if rank < 3 else (1, 6))
        assert model.embed.weight.shape == (10, 6)

    run_ranks(rank_body, 4)


def test_rows_held_by_all_ranks_appear_once_per_rank() -> None:
    def rank_body(rank: int) -> None:
        model, whole = sharded("shared key", 2), build("shared key").qk.weight
        ranked = model.qk.weight
        assert ranked.shape == (48, 6)
        rows = [*range(16), *range(32, 40)] if rank == 0 else [*range(16, 40)]
        assert torch.equal(ranked.to_local(), whole[rows])

    run_ranks(rank_body, 2)


def test_key_heads_shared_by_pairs_of_ranks_sum_within_the_pair() -> None:
    """Two key heads on four ranks: each is held by two of them, and their gradients must not mix."""

    def rank_body(rank: int) -> Any:
        layer = nn.Linear(3, 4, bias=False).double()
        with torch.no_grad():
            layer.weight.copy_(torch.arange(12.0).view(4, 3))
        shard_parameters(layer, tp_mesh(4), {"weight": rule(0, "2!2@2*2", gradient="shared")})
        (layer(torch.ones(1, 3).double()) * (rank + 1)).sum().backward()
        return full_tensors(layer, grads=True)["weight"][:, 0].tolist(), layer.weight.grad.to_local()[:, 0].tolist()

    assert [local for _, local in run_ranks(rank_body, 4)] == [[3.0, 3.0]] * 2 + [[7.0, 7.0]] * 2
    assert run_ranks(rank_body, 4)[0][0] == [3.0, 3.0, 7.0, 7.0]


@pytest.mark.parametrize(
    ("name", "rules", "error", "text"),
    [
        ("mlp", {"upp.weight": rule(0, "8!")}, PlanMismatchError, "nearest is up.weight"),
        ("mlp", {"up.weight": rule(2, "8!")}, PlanMismatchError, "has 2 dims"),
        ("mlp", {"up.weight": rule(0, "9!")}, PlanMismatchError, "has 8 rows, but its layout 9! is for 9"),
        ("mlp", {"up.weight": rule(0, "3!|3!|2")}, IndivisibleError, r"\[6, 4\] rows at tp 2"),
        ("mlp", {"up.weight": rule(0, "8!4@1")}, IndivisibleError, "assigns 4 of 8 rows to no rank"),
        ("packed", {"qkv.weight": rule(0, "5!|11!")}, IndivisibleError, r"\[9, 7\] rows"),
        ("mlp", {"up.weight": rule(0, "8!", gradient="sum")}, PlanMismatchError, "is on one rank only"),
        ("tied", {"embed.weight": rule(0, "10!"), "head.weight": rule(1, "6!")}, PlanMismatchError, "one tensor"),
        ("foreign readers", {"recurrent.weight_ih_l0": rule(0, "24!")}, AutoplanError, "recurrent.*fused call"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_and_nothing_changes(name: str, rules: Any, error: Any, text: str) -> None:
    def rank_body(rank: int) -> None:
        model = build(name)
        before = {fqn: (id(p), type(p)) for fqn, p in model.named_parameters(remove_duplicate=False)}
        classes = [type(module) for module in model.modules()]
        with pytest.raises(error, match=text):
            shard_parameters(model, tp_mesh(2), rules)
        assert before == {fqn: (id(p), type(p)) for fqn, p in model.named_parameters(remove_duplicate=False)}
        assert classes == [type(module) for module in model.modules()]

    run_ranks(rank_body, 2)


def test_differently_seeded_ranks_are_refused() -> None:
    def rank_body(rank: int) -> None:
        model = build("mlp")
        with torch.no_grad():
            model.down.weight[0, 0] += rank
        with pytest.raises(AutoplanError, match="different values in 1 of 6 parameters, first down.weight"):
            shard_parameters(model, tp_mesh(2), {})

    run_ranks(rank_body, 2)


@pytest.mark.parametrize("name", list(TOYS))
def test_undo_gives_the_very_same_model_back(name: str) -> None:
    def rank_body(rank: int) -> Any:
        model, mesh = build(name), tp_mesh(2)
        before = {key: id(value) for key, value in model.state_dict(keep_vars=True).items()}
        classes = [type(module) for module in model.modules()]
        prepared = prepare_parameters(model, mesh, TOYS[name][1])
        assert before == {key: id(value) for key, value in model.state_dict(keep_vars=True).items()}
        prepared.commit()
        prepared.undo()
        assert before == {key: id(value) for key, value in model.state_dict(keep_vars=True).items()}
        assert classes == [type(module) for module in model.modules()]
        assert not any("_autoplan" in vars(module) or module._state_dict_hooks for module in model.modules())
        return model(inputs(name)).detach()

    for output in run_ranks(rank_body, 2):
        torch.testing.assert_close(output, reference(name)[0])


def test_a_second_sharding_is_refused() -> None:
    def rank_body(rank: int) -> None:
        with pytest.raises(AutoplanError, match="already a DTensor"):
            sharded("mlp", 1, sharded("mlp", 1))

    run_ranks(rank_body, 1)


# ---------------------------------------------------------------------------------------------------------- collectives


def test_collectives_forward_and_backward() -> None:
    def rank_body(rank: int) -> None:
        group = RankGroup.of(tp_mesh(2))
        x = torch.full((2,), float(rank + 1), requires_grad=True)
        (copy_to_ranks(x, group) * (rank + 1)).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [3.0, 3.0]
        x.grad = None
        total = sum_over_ranks(x, group)
        (total * (rank + 1)).sum().backward()
        assert total.tolist() == [3.0, 3.0] and x.grad.tolist() == [rank + 1.0] * 2
        rows = ((0, 2, 4), (1, 3, 4))  # the last row has two holders
        piece = torch.tensor([row * 10.0 for row in rows[rank]]).requires_grad_()
        whole = gather_over_ranks(piece[None], group, 1, rows)
        assert whole.tolist() == [[0.0, 10.0, 20.0, 30.0, 40.0]]
        (whole * torch.arange(5.0)).sum().backward()
        assert piece.grad is not None and piece.grad.tolist() == [float(row) for row in rows[rank]]
        uneven = torch.arange(2.0 if rank == 0 else 1.0) + 2 * rank
        assert gather_over_ranks(uneven, group, 0, ((0, 1), (2,))).tolist() == [0.0, 1.0, 2.0]

    run_ranks(rank_body, 2)


def test_collectives_take_complex_and_strided_tensors_and_in_place_ops_after_them() -> None:
    def rank_body(rank: int) -> None:
        group = RankGroup.of(tp_mesh(2))
        x = torch.ones(3, 2, dtype=torch.complex128, requires_grad=True)
        y = copy_to_ranks(x * 1, group).t()
        (sum_over_ranks(y, group) * (1 + rank)).abs().sum().backward()
        assert x.grad is not None and torch.allclose(x.grad.real, torch.full((3, 2), 3.0, dtype=torch.float64))
        for identity in (lambda t: copy_to_ranks(t, group), lambda t: scale_gradient(t, [1.0, 2.0, 4.0], 0)):
            leaf = torch.ones(3, requires_grad=True)
            value = identity(leaf * 1)
            value += 1
            value.mul_(3)
            value.sum().backward()
            expected = [6.0] * 3 if type(identity(leaf).grad_fn).__name__.startswith("_Copy") else [3.0, 6.0, 12.0]
            assert leaf.grad is not None and leaf.grad.tolist() == expected

    run_ranks(rank_body, 2)


def test_collectives_do_nothing_on_one_rank_or_without_gradient() -> None:
    def rank_body(rank: int) -> None:
        group, x = RankGroup.of(tp_mesh(1)), torch.ones(2, requires_grad=True)
        assert copy_to_ranks(x, group) is x and sum_over_ranks(x, group) is x
        assert gather_over_ranks(x, group, 0, ((0, 1),)) is x
        assert scale_gradient(x.detach(), 2.0).requires_grad is False

    run_ranks(rank_body, 1)


def test_whole_order_takes_the_first_holder() -> None:
    assert whole_order(((0, 1), (2,))) is None
    assert whole_order(((0, 2), (1, 3))) == (0, 2, 1, 3)
    assert whole_order(((0, 2), (1, 2))) == (0, 2, 1)


def test_a_failing_rank_is_reported() -> None:
    def rank_body(rank: int) -> None:
        F.linear(torch.ones(1), torch.ones(1, 2))

    with pytest.raises(RankError):
        run_ranks(rank_body, 1)

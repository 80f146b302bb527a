"""Norms and clipping: the unsharded model's, whatever the mesh and however the gradients lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mesh_toys import clone, deep, ids, layers_only, mesh_of, model_of, plan_of
from sharded_toys import TOYS, build, inputs, reference, set_group, shard_parameters
from torch import nn
from torch.distributed.tensor import DTensor

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.check.verify.subject import Subject
from autoplan.common.errors import AutoplanError
from autoplan.execute.collectives import RankGroup
from autoplan.execute.parameters.optimizer import mark_parameters

NORMS = (1.0, 2.0, 3.0, float("inf"))


def trained(name: str, mesh: Any) -> Any:
    """A toy on the mesh's tp dim, after one backward."""
    model = build(name)
    shard_parameters(model, mesh, TOYS[name][1])
    set_group(model, RankGroup.of(mesh))
    mark_parameters(model)
    model(inputs(name)).square().sum().backward()
    return model


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("name", [name for name, (_, rules) in TOYS.items() if rules])
def test_norms_on_a_tp_mesh_are_the_unsharded_models(name: str, norm_type: float) -> None:
    gradients = {id(g): g for g in reference(name)[1].values()}
    expected = torch.nn.utils.get_total_norm(gradients.values(), norm_type)

    def rank_body(rank: int) -> Any:
        model = trained(name, mesh_of(tp=2))
        return autoplan.global_norm(model, norm_type), autoplan.global_norm(list(model.parameters()), norm_type)

    for from_model, from_list in run_ranks(rank_body, 2):
        torch.testing.assert_close(from_model, expected)
        torch.testing.assert_close(from_list, expected)


def test_torchs_own_norm_counts_shared_rows_once() -> None:
    """Gradients say nothing of rows that several ranks hold: who owns their parameters does."""

    def rank_body(rank: int) -> Any:
        model = trained("shared key", mesh_of(tp=2))
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    expected = torch.nn.utils.get_total_norm(reference("shared key")[1].values())
    torch.testing.assert_close(run_ranks(rank_body, 2)[0], expected)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *((kind, sizes) for kind in ("gpt2", "falcon") for sizes in ({"tp": 2}, {"dp": 2})),
        *(
            pytest.param(kind, sizes, marks=marks)
            for kind, marks in (("gpt2", ()), ("falcon", pytest.mark.slow))
            for sizes in ({"dp": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2})
        ),
    ],
)
def test_clipping_on_any_mesh_equals_one_device(kind: str, sizes: dict[str, int]) -> None:
    feeds = clone(kind).feeds
    inputs_ = next(iter(feeds.values()))
    one = Subject(model_of(kind), feeds)
    one.forward_and_backward(inputs_)
    expected = torch.nn.utils.clip_grad_norm_(one.model.parameters(), 0.1)
    plan = plan_of(kind, sizes.get("tp", 1))
    ranks = torch.Size(sizes.values()).numel()
    models = [model_of(kind) for _ in range(ranks)]

    def rank_body(rank: int) -> Any:
        model = autoplan.parallelize(models[rank], mesh_of(**sizes), plan)
        subject = Subject(model, feeds, gather=autoplan.full_tensors)
        subject.forward_and_backward(inputs_)
        norm = autoplan.clip_gradients(model, 0.1)
        return norm, subject.gradients(), autoplan.global_norm(model)

    for norm, gradients, after in run_ranks(rank_body, ranks):
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(after, torch.tensor(0.1, dtype=after.dtype), rtol=1e-3, atol=0)
        for name, want in one.gradients().items():
            torch.testing.assert_close(gradients[name], want, rtol=1e-7, atol=1e-12)


def test_low_precision_gradients_are_scaled_in_place() -> None:
    layer = nn.Linear(4, 4).bfloat16()
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    norm = autoplan.clip_gradients(layer, 1.0)
    assert norm.dtype == torch.float32 and float(norm) == pytest.approx(3 * 20**0.5)
    assert float(autoplan.global_norm(layer)) == pytest.approx(1.0, rel=1e-2)
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("shape", [(), (3,), (3, 4)])
def test_one_tensor_is_a_source_as_it_is_for_torch(shape: tuple[int, ...], norm_type: float) -> None:
    ours, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    for parameter in (ours, theirs):
        parameter.grad = torch.full(shape, 3.0)
    torch.testing.assert_close(
        autoplan.global_norm(ours, norm_type), torch.nn.utils.get_total_norm([theirs.grad], norm_type)
    )
    norm = autoplan.clip_gradients(ours, 0.5, norm_type)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type))
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert float(autoplan.global_norm(ours, norm_type)) == pytest.approx(0.5, rel=1e-4)


def test_one_sharded_parameter_is_a_source() -> None:
    expected = reference("mlp")[1]["up.weight"].norm()

    def rank_body(rank: int) -> Any:
        weight = trained("mlp", mesh_of(tp=2)).up.weight
        return autoplan.clip_gradients(weight, 0.1), autoplan.global_norm(weight)

    for before, after in run_ranks(rank_body, 2):
        torch.testing.assert_close(before, expected)
        assert float(after) == pytest.approx(0.1, rel=1e-3)


WRONG = {
    "number": (3, "is int,"),
    "nothing": (None, "is NoneType,"),
    "text": ("model", "str holding str"),
    "dict": ({"weight": torch.ones(1)}, "dict holding str"),
    "names, too": (list(nn.Linear(1, 1).named_parameters()), "list holding tuple"),
    "holes": ([torch.ones(1), None], "list holding NoneType"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_holds_no_parameters_is_refused(kind: str) -> None:
    source, said = WRONG[kind]
    for call in (autoplan.global_norm, lambda given: autoplan.clip_gradients(given, 1.0)):
        with pytest.raises(AutoplanError, match=said) as refused:
            call(source)
        assert "model.parameters()" in str(refused.value.hint)


@pytest.mark.parametrize("norm_type", NORMS)
def test_no_parameters_and_no_gradients_have_norm_zero(norm_type: float) -> None:
    assert float(autoplan.global_norm([], norm_type)) == 0
    assert float(autoplan.clip_gradients([], 1.0, norm_type)) == 0
    assert float(autoplan.global_norm(nn.Linear(2, 2), norm_type)) == 0


def test_a_rank_without_gradients_takes_part() -> None:
    def rank_body(rank: int) -> Any:
        layer = nn.Linear(2, 4, bias=False)
        shard_parameters(layer, mesh_of(tp=2), {"weight": TOYS["mlp"][1]["up.weight"].__class__("", 0, "4!")})
        if rank == 0:
            layer.weight.grad = torch.ones_like(layer.weight)
        return autoplan.global_norm(layer)

    torch.manual_seed(0)
    seen = run_ranks(rank_body, 2)
    assert seen[0] == seen[1] == 2.0


@pytest.mark.parametrize("norm_type", [0.0, -1.0, float("nan")])
def test_odd_norms_are_refused(norm_type: float) -> None:
    with pytest.raises(AutoplanError, match="norm_type"):
        autoplan.global_norm(nn.Linear(2, 2), norm_type)


def test_a_norm_that_is_not_finite_can_be_an_error() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.full_like(layer.weight, float("nan"))
    with pytest.raises(AutoplanError, match="nan"):
        autoplan.clip_gradients(layer, 1.0, error_if_nonfinite=True)


def test_unshard_gathers_and_cuts_again_whatever_happens() -> None:
    def rank_body(rank: int) -> None:
        model = deep()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        autoplan.parallelize(model, mesh_of(dp=2), layers_only(model))
        weight = "blocks.0.first.up.weight"
        assert isinstance(model.get_parameter(weight), DTensor)
        with pytest.raises(KeyError), autoplan.unshard(model):
            inside = model.get_parameter(weight)
            assert not isinstance(inside, DTensor) and torch.equal(inside, before[weight])
            raise KeyError
        assert isinstance(model.get_parameter(weight), DTensor)
        model(ids()).sum().backward()

    run_ranks(rank_body, 2)


def test_unshard_gives_tensor_parallel_pieces_to_the_models_own_code() -> None:
    models = [model_of("gpt2") for _ in range(4)]
    plan = plan_of("gpt2", 2)

    def rank_body(rank: int) -> None:
        model = autoplan.parallelize(models[rank], mesh_of(dp=2, tp=2), plan)
        with autoplan.unshard(model):
            piece = model.transformer.h[0].attn.c_attn.weight
            assert not isinstance(piece, DTensor)
            assert piece.shape[1] * 2 == clone("gpt2").model.transformer.h[0].attn.c_attn.weight.shape[1]

    run_ranks(rank_body, 4)


def test_to_local() -> None:
    def rank_body(rank: int) -> None:
        model = trained("mlp", mesh_of(tp=2))
        assert autoplan.to_local(model.up.weight).shape == (4, 6)
        assert not isinstance(autoplan.to_local(model.up.weight), DTensor)

    run_ranks(rank_body, 2)
    plain = torch.ones(2)
    assert autoplan.to_local(plain) is plain

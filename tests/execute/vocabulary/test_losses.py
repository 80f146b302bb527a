"""Losses on split logits equal those on whole ones, and a model's own loss finds them without being told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slow_cases import marked
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

import autoplan
from autoplan.check.ranks.run import count_collectives, run_ranks
from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.layout import chunk
from autoplan.execute.collectives import RankGroup
from autoplan.execute.parameters.buffers import full_tensors
from autoplan.execute.vocabulary.logprobs import vocab_parallel_logprobs
from autoplan.execute.vocabulary.sampling import vocab_parallel_argmax, vocab_parallel_sample
from autoplan.execute.vocabulary.shards import (
    vocab_parallel_cross_entropy,
    vocab_parallel_entropy,
)
from autoplan.execute.vocabulary.split_logits import SplitLogits, split_class
from autoplan.hf.source import resolve

SIZES = ((12, 2), (11, 4), (9, 4), (10, 4), (13, 1))  # (vocabulary, ranks): 9 over 4 leaves a rank without columns


def random(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale


def tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(1))


Loss = Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]


def split_and_whole(
    logits: torch.Tensor, tp: int, split: Loss, whole: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[float, float]:
    """How far value and gradient of `split` (of columns, on ranks) are from those of `whole` (of all logits)."""
    reference = logits.clone().requires_grad_()
    wanted = whole(reference)
    weights = random(*wanted.shape, seed=2) if wanted.dim() else torch.ones(())
    (wanted * weights).sum().backward()
    vocabulary = logits.shape[-1]

    def rank(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = chunk(vocabulary, tp, number)
        columns = logits[..., own.start : own.stop].clone().requires_grad_()
        mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
        value = split(columns, {"group": mesh, "vocabulary": vocabulary})
        (value * weights.view(value.shape)).sum().backward()
        assert columns.grad is not None
        return value.detach(), columns.grad

    ranks = run_ranks(rank, tp)
    assert reference.grad is not None
    gradient = torch.cat([found for _, found in ranks], -1)
    values = [float((value.reshape(wanted.shape) - wanted.detach()).abs().max()) for value, _ in ranks]
    return max(values), float((gradient - reference.grad).abs().max())


# ------------------------------------------------------------------------------------------------ cross-entropy

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.2},
    {"label_smoothing": 0.2, "reduction": "none"},
    {"ignore_index": 3},
    {"weight": "random"},
    {"weight": "random", "reduction": "none"},
    {"weight": "random", "label_smoothing": 0.1, "ignore_index": 2},
)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(map(str, options)) or "plain")
@pytest.mark.parametrize(("vocabulary", "tp"), SIZES)
@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_cross_entropy(vocabulary: int, tp: int, options: dict[str, Any], chunk_tokens: int | None) -> None:
    logits, target = random(2, 5, vocabulary), tokens(vocabulary, 2, 5)
    target[0, 1] = options.get("ignore_index", -100)
    if "weight" in options:
        options = options | {"weight": random(vocabulary, seed=4).abs()}

    def whole(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.view(-1, vocabulary), target.view(-1), **options)

    def split(x: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
        return vocab_parallel_cross_entropy(x, target, chunk_tokens=chunk_tokens, **how, **options)

    assert max(split_and_whole(logits, tp, split, whole)) < 1e-12


@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)])
def test_shift_and_items_as_transformers_take_them(items: Any) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits, labels = random(2, 5, 11, scale=1.0), tokens(11, 2, 5)
    value, gradient = split_and_whole(
        logits,
        4,
        lambda x, how: vocab_parallel_cross_entropy(x, labels, shift=True, num_items_in_batch=items, **how),
        lambda x: ForCausalLMLoss(x, labels, 11, num_items_in_batch=items).double(),
    )
    assert value < 1e-6 and gradient < 1e-7  # theirs is computed in float32


def test_half_precision_is_widened_a_chunk_at_a_time() -> None:
    logits, target = random(6, 16).bfloat16(), tokens(16, 6)
    wanted = F.cross_entropy(logits.float(), target)
    columns = logits.clone().requires_grad_()
    found = vocab_parallel_cross_entropy(columns, target, group=RankGroup("", 1, 0), vocabulary=16, chunk_tokens=2)
    found.backward()
    assert found.dtype == torch.float32 and abs(found - wanted) < 1e-6
    assert columns.grad is not None and columns.grad.dtype == torch.bfloat16


def test_second_derivatives() -> None:
    """Of a penalty on the gradient: sums over the vocabulary appear in the second backward."""
    logits, target = random(3, 8), tokens(8, 3)

    def penalty(loss: torch.Tensor, x: torch.Tensor, over_ranks: Any) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return over_ranks(gradient.pow(2).sum())

    reference = logits.clone().requires_grad_()
    penalty(F.cross_entropy(reference, target), reference, lambda x: x).backward()

    def rank(number: int) -> torch.Tensor:
        from autoplan.execute.collectives import sum_over_ranks

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        columns = logits.chunk(2, -1)[number].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(columns, target, group=mesh, vocabulary=8)
        penalty(loss, columns, lambda x: sum_over_ranks(x, mesh)).backward()
        assert columns.grad is not None
        return columns.grad

    torch.testing.assert_close(torch.cat(run_ranks(rank, 2), -1), reference.grad)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: vocab_parallel_cross_entropy(x, tokens(8, 3), vocabulary=9), "only one of group= and vocabulary="),
        (
            lambda x: vocab_parallel_cross_entropy(x, tokens(8, 2), group=RankGroup("", 1, 0), vocabulary=8),
            "targets of",
        ),
        (lambda x: vocab_parallel_entropy(x, group=RankGroup("", 1, 0), vocabulary=9), "holds 9 of 9 columns"),
        (lambda x: vocab_parallel_sample(x, group=RankGroup("", 1, 0), vocabulary=8, top_k=9), "top_k=9"),
        (lambda x: vocab_parallel_sample(x, group=RankGroup("", 1, 0), vocabulary=8, temperature=0), "temperature=0"),
    ],
)
def test_misuse_is_explained(call: Callable[[torch.Tensor], Any], said: str) -> None:
    with pytest.raises(AutoplanError, match=said):
        call(random(3, 8))


def test_a_target_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="outside the vocabulary"):
        vocab_parallel_cross_entropy(random(2, 8), torch.tensor([1, 8]), group=RankGroup("", 1, 0), vocabulary=8)


# ------------------------------------------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize(("vocabulary", "tp"), SIZES)
@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_logprobs_and_entropy(vocabulary: int, tp: int, chunk_tokens: int | None) -> None:
    logits, ids = random(2, 5, vocabulary), tokens(vocabulary, 2, 5)

    def logprobs(x: torch.Tensor) -> torch.Tensor:
        return x.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]

    def entropy(x: torch.Tensor) -> torch.Tensor:
        return -(x.log_softmax(-1) * x.softmax(-1)).sum(-1)

    more = {"chunk_tokens": chunk_tokens}
    for split, whole in (
        (lambda x, how: vocab_parallel_logprobs(x, ids, **how, **more), logprobs),
        (lambda x, how: vocab_parallel_entropy(x, **how, **more), entropy),
    ):
        assert max(split_and_whole(logits, tp, split, whole)) < 1e-12


def test_logprobs_under_context_parallelism() -> None:
    """Two sequence ranks that hold positions 0 1 6 7 and 2 3 4 5, as load-balanced causal attention shards them."""
    logits, ids = random(2, 8, 11), tokens(11, 2, 8)
    held = torch.tensor([[0, 1, 6, 7], [2, 3, 4, 5]])
    reference = logits.clone().requires_grad_()
    wanted = reference.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    wanted.square().sum().backward()

    def rank(number: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        part, own = held[number // 2], chunk(11, 2, number % 2)
        columns = logits[:, part, own.start : own.stop].clone().requires_grad_()
        how = {"group": mesh["tp"], "vocabulary": 11, "sequence_index": part}
        mine = vocab_parallel_logprobs(columns, ids, **how)
        whole = vocab_parallel_logprobs(columns, ids, sequence_group=mesh["cp"], **how)
        whole.square().sum().backward()
        return mine.detach(), whole.detach(), columns.grad

    for number, (mine, whole, gradient) in enumerate(run_ranks(rank, 4)):
        part, own = held[number // 2], chunk(11, 2, number % 2)
        torch.testing.assert_close(whole, wanted.detach())
        torch.testing.assert_close(mine, F.pad(wanted.detach(), (0, 1))[:, part])
        torch.testing.assert_close(gradient, reference.grad[:, part, own.start : own.stop])


# ------------------------------------------------------------------------------------------------ choosing tokens


def on_ranks(logits: torch.Tensor, tp: int, choose: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The choice of all ranks, which must be one."""
    vocabulary = logits.shape[-1]

    def rank(number: int) -> torch.Tensor:
        own = chunk(vocabulary, tp, number)
        mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
        torch.manual_seed(7 + number)  # ranks need not agree beforehand
        return choose(logits[..., own.start : own.stop], group=mesh, vocabulary=vocabulary)

    first, *others = run_ranks(rank, tp)
    assert all(torch.equal(first, other) for other in others)
    return first


@pytest.mark.parametrize(("vocabulary", "tp"), SIZES)
def test_argmax(vocabulary: int, tp: int) -> None:
    logits = random(3, 20, vocabulary).round()  # ties: the first counts
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(on_ranks(logits, tp, vocab_parallel_argmax), first)


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize(("vocabulary", "tp"), SIZES)
def test_samples_follow_the_distribution(vocabulary: int, tp: int, top_k: int | None) -> None:
    row = random(vocabulary, scale=1.0)
    row[2] = -float("inf")
    kept = row if top_k is None else row.masked_fill(row < row.topk(top_k).values[-1], -float("inf"))
    wanted = (kept / 0.7).softmax(-1)
    drawn = on_ranks(
        row.expand(20000, -1), tp, lambda x, **how: vocab_parallel_sample(x, temperature=0.7, top_k=top_k, **how)
    )
    found = torch.bincount(drawn, minlength=vocabulary) / 20000
    assert not found[wanted == 0].any()
    assert float((found - wanted).abs().max()) < 0.015


def test_draws_do_not_depend_on_the_number_of_ranks() -> None:
    logits = random(200, 11)
    drawn = [on_ranks(logits, tp, vocab_parallel_sample) for tp in (1, 2, 4)]
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


# ------------------------------------------------------------------------------------------------ inside a model


class Head(nn.Module):
    """A model that computes its loss by a given function of (logits, labels)."""

    def __init__(self, loss: Loss | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 10, bias=False, dtype=torch.float64)
        self.loss = loss

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(ids))
        if labels is None or self.loss is None:
            return {"logits": logits}
        return {"loss": self.loss(logits, labels), "logits": logits}


def second(x: Any, y: Any) -> Any:
    return F.cross_entropy(x.transpose(1, 2), y)


# what models do before a loss, and whether logits can stay split for it
LOSSES: dict[str, tuple[Any, bool]] = {
    "view": (lambda x, y: F.cross_entropy(x.float().view(-1, 10), y.view(-1)), True),
    "shifted": (
        lambda x, y: nn.CrossEntropyLoss()(x[..., :-1, :].contiguous().view(-1, x.size(-1)), y[..., 1:].reshape(-1)),
        True,
    ),
    "masked rows": (lambda x, y: F.cross_entropy(x[y > 2], y[y > 2]), True),
    "scaled and capped": (lambda x, y: F.cross_entropy((torch.tanh(x / 3.0) * 3).flatten(0, 1), y.flatten()), True),
    "class dim second": (second, True),
    "permuted": (lambda x, y: F.cross_entropy(x.permute(0, 2, 1), y, reduction="sum", label_smoothing=0.1), True),
    "per row": (lambda x, y: F.cross_entropy((x / (1 + y[..., None])).view(-1, 10), y.view(-1)), True),
    "soft targets": (lambda x, y: F.cross_entropy(x.view(-1, 10), F.one_hot(y.view(-1), 10).double()), False),
    "log-softmax": (lambda x, y: F.nll_loss(F.log_softmax(x, -1).view(-1, 10), y.view(-1)), False),
    "some columns": (lambda x, y: F.cross_entropy(x[..., :5].reshape(-1, 5), y.view(-1) % 5), False),
    "whole bias": (lambda x, y: F.cross_entropy((x + torch.arange(10.0)).view(-1, 10), y.view(-1)), False),
    "two readers": (lambda x, y: F.cross_entropy(x.view(-1, 10), y.view(-1)) + x.logsumexp(-1).square().mean(), False),
}


def trained(name: str, gather_logits: bool = False) -> tuple[float, float, dict[str, int]]:
    """Errors of loss and gradients on two ranks, and the collectives of the forward."""
    ids = tokens(10, 2, 5)

    def built() -> Head:
        torch.manual_seed(0)
        return Head(LOSSES[name][0])

    reference = built()
    wanted = reference(ids, ids)
    wanted["loss"].backward()
    gradients = {key: parameter.grad for key, parameter in reference.named_parameters()}
    plan = autoplan.plan(built(), 2, prove="none", inputs={"ids": ids})
    models = [built() for _ in range(2)]

    def rank(number: int) -> tuple[float, float, dict[str, int]]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = autoplan.parallelize(models[number], mesh, plan, gather_logits=gather_logits)
        with count_collectives() as counted:
            output = model(ids, labels=ids)
        output["loss"].backward()
        logits = output["logits"]
        assert isinstance(logits, DTensor) != gather_logits and not isinstance(logits, SplitLogits)
        whole = logits if gather_logits else logits.full_tensor()
        torch.testing.assert_close(whole, wanted["logits"])
        found = full_tensors(model, grads=True)
        worst = max(float((found[key] - gradient).abs().max()) for key, gradient in gradients.items())
        error = float((output["loss"] - wanted["loss"]).detach().abs())
        return error, worst, dict(counted)

    results = run_ranks(rank, 2)
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize("name", LOSSES)
def test_a_models_own_loss(name: str) -> None:
    """Equal to the plain one, and gathered exactly where it has to be."""
    loss, gradient, counted = trained(name)
    limit = 1e-6 if name == "view" else 1e-12  # that one computes in float32
    assert loss < limit and gradient < limit
    assert ("all_gather" not in counted) == LOSSES[name][1], counted


def test_gathered_logits_and_a_loss() -> None:
    loss, gradient, counted = trained("shifted", gather_logits=True)
    assert max(loss, gradient) < 1e-12 and counted["all_gather"] == 1


def test_what_changes_logits_in_place_is_refused() -> None:
    logits = random(2, 5).as_subclass(split_class(RankGroup("", 2, 0), 10))
    assert logits.shape == (2, 10) and logits.size(-1) == 10 and logits.numel() == 20
    for change in (
        lambda x: x.__setitem__((0, 3), 0.0),
        lambda x: x.masked_fill_(torch.tensor(True), 0),
        lambda x: x.zero_(),
    ):
        with pytest.raises(PlanMismatchError, match="in place"):
            change(logits)


MBART = "mbart:MBartForConditionalGeneration"


@pytest.mark.parametrize("model_type", marked(["llama", "gemma2", "t5", MBART], slow=[MBART]))
def test_transformers_losses_gather_nothing(model_type: str) -> None:
    report = autoplan.verify(model_type, tp_size=2, checks=["forward", "loss"])
    assert report.ok and "loss" in report.details["checked"]


def test_torch_loss_parallel_works_on_what_leaves_the_model() -> None:
    ids = tokens(10, 2, 5)
    plan = autoplan.plan(Head(), 2, prove="none", inputs={"ids": ids})
    torch.manual_seed(0)
    models = [Head(), Head()]
    models[1].load_state_dict(models[0].state_dict())
    wanted = F.cross_entropy(models[0](ids)["logits"].view(-1, 10), ids.view(-1)).detach()

    def rank(number: int) -> tuple[float, float]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        logits = autoplan.parallelize(models[number], mesh, plan)(ids)["logits"]
        assert logits.placements == (Shard(2),)
        ours = vocab_parallel_cross_entropy(logits, ids)
        theirs = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        theirs.backward()
        return float(ours.detach()), float(theirs.detach().full_tensor())

    with loss_parallel():  # of the process, so of all simulated ranks at once
        results = run_ranks(rank, 2)
    for ours, theirs in results:
        assert abs(ours - wanted) < 1e-12 and abs(theirs - wanted) < 1e-12


# ------------------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_reproducible_forward(model_type: str) -> None:
    """The same bits at every size, in a dtype whose sums do depend on it; gradients as ever."""
    ids = tokens(100, 2, 10)

    def built() -> nn.Module:
        torch.manual_seed(0)
        return resolve(model_type).tiny(dtype=torch.float64)

    unsharded = built()
    wanted = unsharded(input_ids=ids, labels=ids, use_cache=False)
    wanted.loss.backward()
    gradients = {name: p.grad for name, p in unsharded.named_parameters() if p.grad is not None}

    def equal(tp: int, reproducible: bool) -> tuple[bool, float]:
        plan = autoplan.plan(built(), tp, prove="none")
        models = [built() for _ in range(tp)]

        def rank(number: int) -> tuple[bool, float]:
            mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
            model = autoplan.parallelize(models[number], mesh, plan, reproducible_forward=reproducible)
            output: Any = model(input_ids=ids, labels=ids, use_cache=False)
            output.loss.backward()
            found = full_tensors(model, grads=True)
            worst = max(float((found[name] - gradient).abs().max()) for name, gradient in gradients.items())
            logits = output.logits.full_tensor() if isinstance(output.logits, DTensor) else output.logits
            return torch.equal(logits, wanted.logits) and torch.equal(output.loss, wanted.loss), worst

        results = run_ranks(rank, tp)
        return all(same for same, _ in results), max(worst for _, worst in results)

    assert equal(2, reproducible=False)[0] is False
    for tp in (2, 4):
        same, worst = equal(tp, reproducible=True)
        assert same and worst < 1e-6


def test_what_cannot_be_reproducible_says_so() -> None:
    def built() -> nn.Module:
        torch.manual_seed(0)
        return resolve("mixtral").tiny(dtype=torch.float64)

    plan = autoplan.plan(built(), 2, prove="none")
    models = [built(), built()]

    def rank(number: int) -> str:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(AutoplanError, match="reproducible_forward") as caught:
            autoplan.parallelize(models[number], mesh, plan, reproducible_forward=True)
        assert autoplan.applied(models[number]) is None
        return str(caught.value)

    assert "experts" in run_ranks(rank, 2)[0]

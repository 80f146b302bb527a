"""What reinforcement learning and distillation ask of split logits, equal to the unsharded computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_cases import marked
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import run_processes, run_ranks
from autoplan.common.errors import AutoplanError
from autoplan.common.layout import chunk
from autoplan.execute.parameters.buffers import full_tensors
from autoplan.hf.source import resolve

SIZES = ((12, 2), (11, 4), (9, 4), (13, 1), (3, 4))  # (vocabulary, ranks): 9 and 3 over 4 leave ranks without columns
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6},
    {"top_k": 3},
    {"top_p": 0.8},
    {"top_p": 1e-9},
    {"temperature": 1.7, "top_k": 3, "top_p": 0.7},
    {"top_k": 2, "top_p": 1.0},
)


def random(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale


def ids_of(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(1))


def filtered(x: torch.Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> torch.Tensor:
    """As transformers' and vLLM's samplers do it: temperature, the k best, of those the fewest that reach the mass."""
    x = x / temperature
    if top_k is not None:
        x = x.masked_fill(x < x.topk(min(top_k, x.shape[-1])).values[..., -1:], -float("inf"))
    rising, order = x.sort(-1)
    out = rising.softmax(-1).cumsum(-1) <= 1 - top_p
    out[..., -1] = False
    return x if top_p == 1 else x.masked_fill(out.scatter(-1, order, out), -float("inf"))


def chosen(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return x.log_softmax(-1).gather(-1, wanted[..., None])[..., 0]


def compare(
    logits: torch.Tensor,
    tp: int,
    split: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor],
    whole: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Value on every rank and gradient of all columns, for finite values."""
    reference = logits.clone().requires_grad_()
    wanted = whole(reference)
    weights = torch.where(wanted.detach().isfinite(), random(*wanted.shape, seed=2), 0.0)
    wanted.masked_fill(~wanted.isfinite(), 0.0).mul(weights).sum().backward()
    vocabulary = logits.shape[-1]

    def rank(number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        own = chunk(vocabulary, tp, number)
        columns = logits[..., own.start : own.stop].clone().requires_grad_()
        mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
        value = split(columns, {"group": mesh, "vocabulary": vocabulary})
        value.masked_fill(~value.isfinite(), 0.0).mul(weights).sum().backward()
        return value.detach(), columns.grad

    ranks = run_ranks(rank, tp)
    for value, _ in ranks:
        torch.testing.assert_close(value, wanted.detach())
    torch.testing.assert_close(torch.cat([g for _, g in ranks if g is not None], -1), reference.grad)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(("vocabulary", "tp"), marked(SIZES, slow=[(11, 4)]))
def test_what_a_sampler_leaves_out(vocabulary: int, tp: int, filters: dict[str, Any]) -> None:
    logits, ids = random(2, 6, vocabulary), ids_of(vocabulary, 2, 6)
    for chunk_tokens in (None, 4):
        compare(
            logits,
            tp,
            lambda x, how, n=chunk_tokens: autoplan.vocab_parallel_logprobs(x, ids, chunk_tokens=n, **filters, **how),
            lambda x: chosen(filtered(x, **filters)[:, :-1], ids[:, 1:]),
        )


def test_equal_logits_are_kept_together() -> None:
    """In bfloat16 many are equal: a token that a sampler drew must not have minus infinity because of how it sorted."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, -1.0, 1.0]])

    def rank(number: int) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        how: Any = {"group": mesh, "vocabulary": 6, "shift": False}
        columns = logits[:, 3 * number : 3 * number + 3]
        return [
            torch.stack([autoplan.vocab_parallel_logprobs(columns, torch.tensor([t]), **k, **how)[0] for t in range(6)])
            for k in ({"top_k": 2}, {"top_p": 0.5})
        ]

    kept = logits[0].masked_fill(logits[0] < 1, -float("inf")).log_softmax(-1)
    for found in run_ranks(rank, 2):
        for one in found:
            torch.testing.assert_close(one, kept)


def test_half_precision_and_infinities() -> None:
    logits, ids = random(1, 50, 40, scale=1.0).bfloat16(), ids_of(40, 1, 50)
    logits[..., 7] = -float("inf")
    filters: Any = {"temperature": 0.9, "top_p": 0.6}

    def rank(number: int) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        columns = logits[..., 20 * number : 20 * number + 20]
        return autoplan.vocab_parallel_logprobs(columns, ids, group=mesh, vocabulary=40, **filters)

    whole = autoplan.vocab_parallel_logprobs(logits, ids, **filters)
    assert whole.isinf().any() and whole.isfinite().any()
    for found in run_ranks(rank, 2):
        torch.testing.assert_close(found, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("vocabulary", "tp"), [(11, 4), (12, 2)])
def test_packed_sequences(vocabulary: int, tp: int) -> None:
    """Sequences of 4, 1 and 3 tokens and 2 of padding: each row speaks of its own sequence only."""
    logits, ids = random(1, 10, vocabulary), ids_of(vocabulary, 1, 10)
    starts = torch.tensor([0, 4, 5, 8])
    positions = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 0, 0]])

    def whole(x: torch.Tensor) -> torch.Tensor:
        rows = [x.new_zeros(9)]
        for start, stop in ((0, 4), (5, 8)):
            one = chosen(x[0, start : stop - 1], ids[0, start + 1 : stop])
            rows.append(torch.cat([x.new_zeros(start), one, x.new_zeros(9 - stop + 1)]))
        return torch.stack(rows).sum(0)[None]

    for packing in ({"cu_seqlens": starts}, {"position_ids": positions}):
        compare(logits, tp, lambda x, how, p=packing: autoplan.vocab_parallel_logprobs(x, ids, **p, **how), whole)


def test_packed_sequences_under_context_parallelism() -> None:
    logits, ids, starts = random(1, 8, 11), ids_of(11, 1, 8), torch.tensor([0, 3, 8])
    wanted = autoplan.vocab_parallel_logprobs(logits, ids, cu_seqlens=starts)
    held = torch.tensor([[0, 1, 6, 7], [2, 3, 4, 5]])

    def rank(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        how: Any = {"cu_seqlens": starts, "sequence_index": held[number]}
        return (
            autoplan.vocab_parallel_logprobs(logits[:, held[number]], ids, **how),
            autoplan.vocab_parallel_logprobs(logits[:, held[number]], ids, sequence_group=mesh, **how),
        )

    for number, (mine, everything) in enumerate(run_ranks(rank, 2)):
        torch.testing.assert_close(everything, wanted)
        torch.testing.assert_close(mine, nn.functional.pad(wanted, (0, 1))[:, held[number]])


@pytest.mark.parametrize(("vocabulary", "tp"), SIZES)
def test_the_largest_and_given_logits(vocabulary: int, tp: int) -> None:
    logits, ids = random(2, 5, vocabulary), ids_of(vocabulary, 2, 5, 7)
    compare(
        logits,
        tp,
        lambda x, how: autoplan.vocab_parallel_gather(x, ids, **how),
        lambda x: x.gather(-1, ids),
    )
    for chunk_tokens in (None, 3):
        compare(
            logits,
            tp,
            lambda x, how, n=chunk_tokens: autoplan.vocab_parallel_topk(x, 3, chunk_tokens=n, **how).values,
            lambda x: x.topk(3).values,
        )
        compare(
            logits,
            tp,
            lambda x, how, n=chunk_tokens: (
                autoplan.vocab_parallel_topk(x, 3, chunk_tokens=n, **how).tokens + 0.0 * x.sum()
            ),
            lambda x: x.topk(3).indices + 0.0 * x.sum(),
        )


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize(
    ("vocabulary", "tp", "change"),
    [
        pytest.param(*sizes, change, id=f"{sizes[0]}-{sizes[1]}-{name}", marks=marks)
        for sizes in SIZES
        for name, change, marks in (
            ("as it is", None, pytest.mark.slow if sizes in ((11, 4), (3, 4)) else ()),
            ("capped", lambda x: 3 * torch.tanh(x / 3), pytest.mark.slow if sizes == (9, 4) else ()),
        )
    ],
)
def test_from_hidden_states(vocabulary: int, tp: int, change: Any, filters: dict[str, Any]) -> None:
    """Logits, and gradients of states, weight and bias, with chunks that do not divide the tokens."""
    if filters.get("top_k", 0) > vocabulary:
        filters = filters | {"top_k": vocabulary}
    states, weight, bias = random(2, 5, 6), random(vocabulary, 6, seed=3, scale=0.5), random(vocabulary, seed=4)
    ids = ids_of(vocabulary, 2, 5)
    given = [value.clone().requires_grad_() for value in (states, weight, bias)]
    logits = nn.functional.linear(*given)
    wanted = chosen(filtered(logits if change is None else change(logits), **filters)[:, :-1], ids[:, 1:])
    weights = torch.where(wanted.detach().isfinite(), random(*wanted.shape, seed=2), 0.0)
    wanted.masked_fill(wanted.isinf(), 0.0).mul(weights).sum().backward()

    def rank(number: int) -> list[Any]:
        own = chunk(vocabulary, tp, number)
        mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
        mine = [states.clone(), weight[own.start : own.stop].clone(), bias[own.start : own.stop].clone()]
        hidden, rows, shift = (value.requires_grad_() for value in mine)
        value = autoplan.vocab_parallel_logprobs_from_hidden(
            hidden, rows, ids, bias=shift, group=mesh, vocabulary=vocabulary, change=change, chunk_tokens=3, **filters
        )
        value.masked_fill(value.isinf(), 0.0).mul(weights).sum().backward()
        return [value.detach(), hidden.grad, rows.grad, shift.grad]

    ranks = run_ranks(rank, tp)
    for value, of_states, _, _ in ranks:
        torch.testing.assert_close(value, wanted.detach())
        torch.testing.assert_close(of_states, given[0].grad)
    for at in (1, 2):
        torch.testing.assert_close(torch.cat([found[at + 1] for found in ranks]), given[at].grad)


def test_no_logits_are_ever_whole() -> None:
    """The largest tensor that is made has as many rows as a chunk."""
    from torch.utils._python_dispatch import TorchDispatchMode

    widest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dim() and result.shape[-1] == 100:
                widest[0] = max(widest[0], result.numel() // 100)
            return result

    states, weight = random(4, 64, 6).requires_grad_(), random(100, 6).requires_grad_()
    with Watch():
        autoplan.vocab_parallel_logprobs_from_hidden(
            states, weight, ids_of(100, 4, 64), chunk_tokens=16
        ).sum().backward()
    assert 0 < widest[0] <= 16


def of_a_model(rank: int) -> dict[str, float]:
    """A real model on real ranks: its own head, tied and untied, filters, top-k, drawing."""
    torch.set_num_threads(1)
    worst: dict[str, float] = {}
    for kind in ("llama", "gpt2"):
        torch.manual_seed(0)
        plain = resolve(kind).tiny(dtype=torch.float64)
        torch.manual_seed(0)
        model = resolve(kind).tiny(dtype=torch.float64)
        ids = torch.randint(1, 100, (2, 9), generator=torch.Generator().manual_seed(5))
        model = autoplan.parallelize(
            model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), autoplan.plan(plain, 2, prove="none")
        )
        filters: Any = {"temperature": 0.7, "top_k": 40, "top_p": 0.95}
        logits = plain(ids, use_cache=False).logits
        wanted = autoplan.vocab_parallel_logprobs(logits, ids, **filters).masked_fill(torch.zeros(2, 8).bool(), 0.0)
        wanted.masked_fill(wanted.isinf(), 0.0).sum().backward()
        hidden = model.base_model(ids, use_cache=False)[0]
        found = autoplan.vocab_parallel_logprobs_from_hidden(
            hidden, model.get_output_embeddings(), ids, chunk_tokens=5, **filters
        )
        found.masked_fill(found.isinf(), 0.0).sum().backward()
        assert torch.equal(found.isinf(), wanted.isinf())
        worst[f"{kind} value"] = float((found - wanted).nan_to_num(0.0).abs().max())
        gradients = full_tensors(model, grads=True)
        worst[f"{kind} gradient"] = max(
            float((gradients[name] - p.grad).abs().max()) for name, p in plain.named_parameters() if p.grad is not None
        )
        split = model(ids, use_cache=False).logits
        top = autoplan.vocab_parallel_topk(split, 5)
        assert torch.equal(top.tokens, logits.topk(5).indices)
        worst[f"{kind} top"] = float(
            (autoplan.vocab_parallel_gather(split, top.tokens) - logits.topk(5).values).abs().max()
        )
        drawn = autoplan.vocab_parallel_sample(split[:, -1], top_p=0.5)
        assert autoplan.vocab_parallel_logprobs(split[:, -1:], drawn[:, None], shift=False, top_p=0.5).isfinite().all()
    return worst


@pytest.mark.long
@pytest.mark.gloo
def test_a_model_on_real_ranks() -> None:
    for worst in run_processes(of_a_model, (), 2):
        assert max(worst.values()) < 1e-10, worst


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, t: autoplan.vocab_parallel_logprobs(x, t, top_k=0), "top_k=0"),
        (lambda x, t: autoplan.vocab_parallel_logprobs(x, t, top_p=0.0), "top_p=0.0"),
        (lambda x, t: autoplan.vocab_parallel_logprobs(x, t, temperature=0), "temperature=0"),
        (lambda x, t: autoplan.vocab_parallel_logprobs(x, t, shift=False, cu_seqlens=t[0]), "cu_seqlens"),
        (lambda x, t: autoplan.vocab_parallel_logprobs(x, t, position_ids=t[:, :2]), "position_ids of shape"),
        (lambda x, t: autoplan.vocab_parallel_topk(x, 9), "k=9"),
        (lambda x, t: autoplan.vocab_parallel_gather(x, t[0]), "tokens of shape"),
        (lambda x, t: autoplan.vocab_parallel_logprobs_from_hidden(x, x[0, 0], t), "a head of shape"),
        (lambda x, t: autoplan.vocab_parallel_logprobs_from_hidden(x, x[0], t, chunk_tokens=0), "chunk_tokens is 0"),
    ],
)
def test_misuse_is_explained(call: Any, said: str) -> None:
    with pytest.raises(AutoplanError, match=said):
        call(random(2, 8, 8), ids_of(8, 2, 8))

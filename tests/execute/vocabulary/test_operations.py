"""Every operation on split logits: exact, gathered with one warning, or refused with what to do instead.

`OPERATIONS` is a table: what training and sampling loops do to logits, each made one number. Each runs on whole logits
and on logits split over two ranks; the number and the gradient of every column must be the same.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mesh_toys import mesh_of, model_of, plan_of
from torch.distributed.tensor import DTensor

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import AutoplanError
from autoplan.execute.vocabulary import leaving as leaving_module
from autoplan.execute.vocabulary.leaving import leaving

V = 16
torch.manual_seed(0)
X = torch.randn(2, 5, V, dtype=torch.float64)
IDS = torch.randint(V, (2, 5))
T = torch.randn(2, 5, V, dtype=torch.float64)
ROW = torch.randn(V, dtype=torch.float64)
W = torch.randn(V, 7, dtype=torch.float64)
MASK = torch.rand(2, 5, V) < 0.3
Operation = Callable[[Any], Any]


def inplace(change: Operation) -> Operation:
    def run(z: Any) -> Any:
        z = z * 1.0
        change(z)
        return (z.softmax(-1) ** 2).sum()

    return run


def setitem(index: Any, value: Any) -> Operation:
    return inplace(lambda z: z.__setitem__(index, value))


def top_p(z: Any) -> Any:
    values, _ = z.sort(-1, descending=True)
    return torch.where(values.softmax(-1).cumsum(-1) > 0.8, 0.0, values).sum()


def penalty(z: Any) -> Any:
    chosen = z.gather(-1, IDS[..., None])
    chosen = torch.where(chosen < 0, chosen * 1.3, chosen / 1.3)
    return (z.scatter(-1, IDS[..., None], chosen).log_softmax(-1) * T).sum()


def own_softmax(z: Any) -> Any:
    z = z - z.amax(-1, keepdim=True)
    return (z.exp() / z.exp().sum(-1, keepdim=True)).pow(2).sum()


def low_precision(z: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return z.softmax(-1).pow(2).sum()


OPERATIONS: dict[str, Operation] = {
    "set0": setitem((..., 0), -9.0),
    "setinf": setitem((..., 3), -float("inf")),
    "setrow": setitem((0,), 1.0),
    "setslice": setitem((slice(None), slice(1, None)), 0.5),
    "setmask": setitem(MASK, -2.0),
    "settensor": setitem((..., 0), torch.ones(2, 5, dtype=torch.float64)),
    "setlist": setitem((..., [0, 9]), -3.0),
    "masked_fill_": inplace(lambda z: z.masked_fill_(MASK, -2.0)),
    "clamp_": inplace(lambda z: z.clamp_(-1, 1)),
    "div_": inplace(lambda z: z.div_(0.7)),
    "zero_": inplace(lambda z: z[0].zero_()),
    "sub_row_": inplace(lambda z: z.sub_(z.detach().mean(-1, keepdim=True))),
    "add_bias_": inplace(lambda z: z.add_(ROW)),
    "copy_": inplace(lambda z: z.copy_(T)),
    "index_fill_": inplace(lambda z: z.index_fill_(-1, torch.tensor([1, 9]), -5.0)),
    "scatter_": inplace(lambda z: z.scatter_(-1, IDS[..., None], -5.0)),
    "setrow_t": inplace(lambda z: z.__setitem__((0, 0), ROW)),
    "fill_item": inplace(lambda z: z[..., 0].fill_(-9)),
    "mul_item": inplace(lambda z: z[..., :3].mul_(2)),
    "iadd_item": inplace(lambda z: z[..., :3].__iadd__(2)),
    "setitem_item": inplace(lambda z: z[..., :3].__setitem__(0, 1.0)),
    "row_item": inplace(lambda z: z[0].mul_(2)),
    "shift_item": inplace(lambda z: z[..., :-1, :].mul_(2)),
    "rows_set": inplace(lambda z: z[:, 1:].__setitem__((..., 0), 3.0)),
    "mix": lambda z: (z - z[..., :1]).pow(2).sum(),
    "mix2": lambda z: (z[..., 0] * z.logsumexp(-1)).sum(),
    "mix3": lambda z: torch.stack([z[..., 0], z[..., 1]], -1).log_softmax(-1).sum(),
    "ilist": inplace(lambda z: z[..., [0, 9]].mul_(3)),
    "fill_sel": inplace(lambda z: z.select(-1, 0).fill_(-9)),
    "view_set": inplace(lambda z: z.view(-1, V).__setitem__((slice(None), 0), -9.0)),
    "softmax_": inplace(lambda z: z.tanh_()),
    "index_add_": inplace(lambda z: z.index_add_(-1, torch.tensor([0]), torch.ones(2, 5, 1, dtype=torch.float64))),
    "mean": lambda z: ((z - z.mean(-1, keepdim=True)) ** 2).sum(),
    "amax": own_softmax,
    "autocast": low_precision,
    "std": lambda z: (z / z.std(-1, keepdim=True)).pow(3).sum(),
    "norm": lambda z: (z / z.norm(dim=-1, keepdim=True)).pow(3).sum(),
    "var_mean": lambda z: torch.var_mean(z, -1, keepdim=True)[0].sum(),
    "lse": lambda z: ((z - z.logsumexp(-1, keepdim=True)).exp() * T).sum(),
    "max": lambda z: (z - z.max(-1, keepdim=True).values).pow(2).sum(),
    "min": lambda z: z.min(-1).values.sum(),
    "median": lambda z: z.median(-1).values.sum(),
    "topk": lambda z: z.topk(3, -1).values.pow(2).sum(),
    "sort": lambda z: (z.sort(-1).values * T).sum(),
    "argsort": lambda z: (z.argsort(-1) * T).sum(),
    "distances": lambda z: torch.cdist(z[0], z[0] + 1).sum(),  # DTensor knows none
    "cumsum": lambda z: (z.cumsum(-1) * T).sum(),
    "top_p": top_p,
    "kthvalue": lambda z: z.kthvalue(3, -1).values.sum(),
    "quantile": lambda z: z.quantile(0.3, -1).sum(),
    "scatter": lambda z: (z.scatter(-1, IDS[..., None], 0.0) * T).sum(),
    "gather": lambda z: z.gather(-1, IDS[..., None]).pow(2).sum(),
    "take_along": lambda z: z.take_along_dim(IDS[..., None], -1).sum(),
    "index_select": lambda z: z.index_select(-1, torch.tensor([1, 12])).pow(2).sum(),
    "fancy": lambda z: z[torch.arange(2)[:, None], torch.arange(5)[None], IDS].pow(2).sum(),
    "sel": lambda z: z[..., 3].pow(2).sum(),
    "slice": lambda z: z[..., :9].pow(2).sum(),
    "bool": lambda z: z[MASK].pow(2).sum(),
    "sel0": lambda z: z[0].pow(2).sum(),
    "softmax": lambda z: ((z / 0.7).softmax(-1) * T).sum(),
    "log_softmax": lambda z: ((z / 0.7).log_softmax(-1) * T).sum(),
    "softmin": lambda z: (F.softmin(z, -1) * T).sum(),
    "gumbel": lambda z: F.softmax(z + T, -1).pow(2).sum(),
    "logsigmoid": lambda z: F.logsigmoid(z).sum(),
    "cat": lambda z: (torch.cat([z, T], -1) ** 2).sum(),
    "cat2": lambda z: (torch.cat([z, z * 2], -1) ** 3).sum(),
    "cat0": lambda z: (torch.cat([z, z * 2], 0) ** 3).sum(),
    "stack": lambda z: (torch.stack([z, z * 2]) ** 3).sum(),
    "split": lambda z: z.split(5, -1)[1].pow(2).sum(),
    "chunk": lambda z: z.chunk(3, -1)[0].pow(2).sum(),
    "unbind": lambda z: z.unbind(-1)[2].pow(2).sum(),
    "tsplit": lambda z: z.tensor_split(3, -1)[1].pow(2).sum(),
    "pad": lambda z: F.pad(z, (0, 3), value=1.0).pow(2).sum(),
    "roll": lambda z: (z.roll(1, -1) * T).sum(),
    "flip": lambda z: (z.flip(-1) * T).sum(),
    "repeat": lambda z: z.repeat(1, 1, 2).pow(2).sum(),
    "expand": lambda z: z[None].expand(3, 2, 5, V).pow(2).sum(),
    "gt": lambda z: torch.where(z > 0, z, z * 0.1).sum(),
    "gtT": lambda z: torch.where(z > T, z, T).sum(),
    "argmax": lambda z: (z.argmax(-1) * T[..., 0]).sum(),
    "eq": lambda z: (z == z.amax(-1, keepdim=True)).sum(),
    "any": lambda z: (z > 1).any(-1).sum(),
    "einsum": lambda z: torch.einsum("bsv,vd->bsd", z, W).pow(2).sum(),
    "matmul": lambda z: (z @ W).pow(2).sum(),
    "softW": lambda z: (z.softmax(-1) @ W).pow(2).sum(),
    "linear": lambda z: F.linear(z, W.T).pow(2).sum(),
    "bmm": lambda z: torch.bmm(z, z.transpose(1, 2)).pow(2).sum(),
    "kl": lambda z: F.kl_div(z.log_softmax(-1), T.softmax(-1), reduction="batchmean"),
    "klt": lambda z: F.kl_div(z.log_softmax(-1), T.log_softmax(-1), log_target=True, reduction="sum"),
    "kl2": lambda z: F.kl_div(z.log_softmax(-1), (z.detach() * 0.5).softmax(-1), reduction="sum"),
    "mse": lambda z: F.mse_loss(z, T),
    "ce": lambda z: F.cross_entropy(z.view(-1, V), IDS.view(-1)),
    "ls": lambda z: F.cross_entropy(z.view(-1, V), IDS.view(-1), label_smoothing=0.1),
    "cet": lambda z: F.cross_entropy(z.transpose(1, 2), IDS),
    "soft": lambda z: F.cross_entropy(z.view(-1, V), T.softmax(-1).view(-1, V)),
    "nll": lambda z: F.nll_loss(z.log_softmax(-1).view(-1, V), IDS.view(-1)),
    "zloss": lambda z: F.cross_entropy(z.view(-1, V), IDS.view(-1)) + 1e-2 * z.logsumexp(-1).pow(2).mean(),
    "softcap": lambda z: F.cross_entropy((3 * torch.tanh(z / 3)).view(-1, V), IDS.view(-1)),
    "bce": lambda z: F.binary_cross_entropy_with_logits(z, MASK.double()),
    "focal": lambda z: ((1 - z.softmax(-1)).pow(2) * z.log_softmax(-1)).gather(-1, IDS[..., None]).sum(),
    "entropy": lambda z: torch.distributions.Categorical(logits=z).entropy().sum(),
    "logprob": lambda z: torch.distributions.Categorical(logits=z).log_prob(IDS).sum(),
    "hinge": lambda z: F.multi_margin_loss(z.view(-1, V), IDS.view(-1)),
    "penalty": penalty,
    "masked_fill": lambda z: (z.masked_fill(MASK, -1.0) ** 2).sum(),
    "bias": lambda z: (z + ROW).pow(3).sum(),
    "mulrow": lambda z: (z * ROW).pow(2).sum(),
    "scale": lambda z: (z * torch.rand(2, 5, 1, generator=torch.Generator().manual_seed(0)).double()).pow(2).sum(),
    "where": lambda z: torch.where(MASK, z, torch.tensor(0.0, dtype=torch.float64)).sum(),
    "layernorm": lambda z: (F.layer_norm(z, (V,)) * T).sum(),
    "normalize": lambda z: (F.normalize(z, dim=-1) * T).sum(),
    "dropout0": lambda z: F.dropout(z, 0.0).pow(2).sum(),
    "tril": lambda z: z.tril().sum(),
    "outer": lambda z: (z.unsqueeze(-1) * W).sum(),
    "cosine": lambda z: F.cosine_similarity(z, T, dim=-1).sum(),
    "cdist": lambda z: torch.cdist(z, T).sum(),
    "sumall": lambda z: z.pow(2).sum(),
    "meanT": lambda z: z.mean((0, 1)).pow(2).sum(),
    "prod": lambda z: z.prod(-1).sum(),
    "deepcopy": lambda z: copy.deepcopy(z.detach()).sum(),
    "clone": lambda z: z.clone().pow(2).sum(),
    "print": lambda z: (str(z), repr(z), z.pow(2).sum())[-1],
    "numpy": lambda z: torch.tensor(z.detach().numpy()).sum(),
    "tolist": lambda z: torch.tensor(z.tolist()).sum(),
    "item": lambda z: torch.tensor(z[0, 0, 0].item()),
    "cpu": lambda z: z.cpu().pow(2).sum(),
    "iter": lambda z: sum(r.pow(2).sum() for r in z),
    "len": lambda z: z.pow(2).sum() * len(z),
    "data": lambda z: z.data.pow(2).sum(),
    "multinomial": lambda z: (torch.multinomial(z.softmax(-1).view(-1, V), 1) >= 0).sum(),
    "isnan": lambda z: z.isnan().any() | z.isinf().any(),
    "assert": lambda z: z.pow(2).sum() if torch.isfinite(z).all() else None,
    "nan_to_num": lambda z: z.nan_to_num(0).pow(2).sum(),
    "vmap": lambda z: torch.vmap(lambda r: r.softmax(-1).pow(2).sum())(z.view(-1, V)).sum(),
    "fgrad": lambda z: torch.autograd.grad(z.pow(3).sum(), z, create_graph=True)[0].sum(),
    "hist": lambda z: z.detach().histc(4).sum(),
    "nonzero": lambda z: (z > 0).nonzero().sum(),
    "searchsorted": lambda z: torch.searchsorted(z.sort(-1).values, T).sum(),
}
REFUSED = {
    "fill_item", "fill_sel", "iadd_item", "mul_item", "numpy", "setitem_item", "tolist",
}  # fmt: skip


def outcome(operation: Operation, split: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    whole = X.clone().requires_grad_()
    logits: Any = whole * 1.0
    if split:
        rank = torch.distributed.get_rank()
        logits = leaving(whole[..., 8 * rank : 8 * rank + 8], mesh_of(tp=2), -1, V)
    found: Any = operation(logits)
    while hasattr(found, "full_tensor"):
        found = found.full_tensor()
    if found.requires_grad:
        found.backward()
    return found.detach(), whole.grad


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.filterwarnings("ignore:.*they were gathered on every rank")
def test_every_operation_is_exact_or_refused(name: str) -> None:
    operation = OPERATIONS[name]
    wanted, gradient = outcome(operation, split=False)

    def rank_body(rank: int) -> str:
        try:
            value, own = outcome(operation, split=True)
        except AutoplanError as error:
            return "refused" if "gather_logits" in str(error) else str(error)
        torch.testing.assert_close(value, wanted)
        assert (own is None) == (gradient is None)
        if own is not None and gradient is not None:
            columns = slice(8 * rank, 8 * rank + 8)
            torch.testing.assert_close(own[..., columns], gradient[..., columns])
        return "exact"

    assert set(run_ranks(rank_body, 2)) == {"refused" if name in REFUSED else "exact"}


def test_a_sum_of_logits_beside_a_sharded_model_is_as_without_it() -> None:
    """Sums of its parameters are plain tensors; logits on the same mesh are none of them."""

    def rank_body(rank: int) -> bool:
        mesh = mesh_of(tp=2)
        model = autoplan.parallelize(model_of("gpt2"), mesh, plan_of("gpt2", 2))
        columns = X[..., 8 * rank : 8 * rank + 8].clone().requires_grad_()
        total = leaving(columns, mesh, -1, V).pow(2).sum()
        return isinstance(total, DTensor) and model is not None

    assert run_ranks(rank_body, 2) == [True, True]


def test_a_gather_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving_module, "_warned", set())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            run_ranks(lambda rank: outcome(OPERATIONS["cumsum"], split=True) and None, 2)
    told = [str(one.message) for one in said if "gathered" in str(one.message)]
    assert 1 <= len(told) <= 2 and "cumsum of logits" in told[0]  # the two ranks are threads of one process

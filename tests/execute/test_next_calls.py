"""What people call next on a sharded model, on two gloo ranks beside the unsharded one: the same, or one error."""

from __future__ import annotations

import copy
import io
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mesh_toys import mesh_of
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim.swa_utils import AveragedModel

import autoplan
from autoplan.check.ranks.run import run_processes
from autoplan.common.errors import AutoplanError
from autoplan.hf.source import resolve

IDS = torch.randint(1, 100, (2, 6), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(1, 100, (2, 6), generator=torch.Generator().manual_seed(2))


def built(model_type: str = "llama") -> Any:
    torch.manual_seed(0)
    model = resolve(model_type).tiny(dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


# ------------------------------------------------------------------------------------- losses and numbers of one's own


def view(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), LABELS.view(-1))


def shifted(logits: torch.Tensor) -> torch.Tensor:
    rows = logits.float()[:, :-1].contiguous().double()
    return nn.CrossEntropyLoss(label_smoothing=0.1)(rows.view(-1, rows.shape[-1]), LABELS[:, 1:].reshape(-1))


def chosen(logits: torch.Tensor) -> torch.Tensor:
    return -logits.log_softmax(-1).gather(-1, LABELS[..., None]).mean()


def by_rows(logits: torch.Tensor) -> torch.Tensor:
    """As TRL computes log-probabilities."""
    sums = torch.stack([row.logsumexp(-1) for row in logits])
    return (sums - torch.gather(logits, -1, LABELS[..., None]).squeeze(-1)).mean()


def masked(logits: torch.Tensor) -> torch.Tensor:
    return logits[LABELS > 30].square().mean()


def distilled(logits: torch.Tensor) -> torch.Tensor:
    teacher = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return F.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")


def smoothed(logits: torch.Tensor) -> torch.Tensor:
    """As Trainer smooths labels: sums over the vocabulary, changed in place."""
    logs = -F.log_softmax(logits, dim=-1)
    each, every = logs.gather(-1, LABELS[..., None]), logs.sum(-1, keepdim=True)
    for one in (each, every):
        one.masked_fill_(LABELS[..., None] < 20, 0.0)
    return 0.9 * each.sum() + 0.1 * every.sum() / logs.shape[-1]


LOSSES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    view, shifted, chosen, by_rows, masked, distilled, smoothed, lambda logits: logits.square().mean(),
)  # fmt: skip


def losses(rank: int) -> list[float]:
    """How far values and gradients of each loss are from the unsharded model's."""
    torch.set_num_threads(1)
    whole, model, found = built(), autoplan.parallelize(built(), mesh_of(tp=2), plan()), []
    for loss in LOSSES:
        for one in (whole, model):
            one.zero_grad()
        wanted, got = loss(whole(IDS).logits), loss(model(IDS).logits)
        wanted.backward(), got.backward()
        gradients = autoplan.full_tensors(model, grads=True)
        away = [float((gradients[n] - p.grad).abs().max()) for n, p in whole.named_parameters() if p.grad is not None]
        found.append(max(abs(float(got) - float(wanted)), *away))
    return found


def plan(model_type: str = "llama") -> autoplan.Plan:
    return autoplan.plan(built(model_type), 2, prove="none")


@pytest.mark.gloo
def test_a_loss_of_ones_own_takes_the_logits_as_they_come() -> None:
    for found in run_processes(losses, (), 2):
        assert len(found) == len(LOSSES) and max(found) < 1e-6, found


def numbers(rank: int) -> None:
    torch.set_num_threads(1)
    whole, model = built(), autoplan.parallelize(built(), mesh_of(tp=2), plan())
    wanted, logits = whole(IDS).logits, model(IDS).logits
    assert isinstance(logits, DTensor) and isinstance(logits.float()[:, -1], DTensor)
    assert torch.equal(logits.argmax(-1).full_tensor(), wanted.argmax(-1))
    assert abs(float(logits.detach().sum()) - float(wanted.detach().sum())) < 1e-6  # not one rank's part of it
    assert copy.deepcopy(logits.detach()).full_tensor().allclose(wanted)
    with pytest.raises(AutoplanError, match="tolist of logits of shape .* that are sharded over ranks"):
        logits.detach()[0, 0].tolist()
    with loss_parallel():  # torch's own still gets what it wants
        loss = F.cross_entropy(logits.view(-1, wanted.shape[-1]), LABELS.view(-1))
        loss.backward()
    assert isinstance(loss, DTensor) and abs(float(loss.full_tensor()) - float(view(wanted))) < 1e-6


@pytest.mark.gloo
def test_numbers_of_split_logits_are_those_of_all_or_refused() -> None:
    run_processes(numbers, (), 2)


# ------------------------------------------------------------------------------------------------- parts and copies


def parts(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    mesh = mesh_of(tp=2)
    whole, model = built().eval(), autoplan.parallelize(built().eval(), mesh, plan())
    with torch.no_grad():
        hidden = whole.base_model(IDS)[0]
        torch.testing.assert_close(model.get_output_embeddings()(hidden), whole.lm_head(hidden))
        torch.testing.assert_close(model.forward(IDS).logits, whole(IDS).logits)
    assert isinstance(model.lm_head(hidden), DTensor)
    model.base_model.save_pretrained(folder / "base")
    dist.barrier()
    again = type(whole.base_model).from_pretrained(folder / "base", dtype=torch.float64)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.base_model.state_dict().items())
    whole, model = built("t5"), autoplan.parallelize(built("t5"), mesh, plan("t5"))
    torch.testing.assert_close(model.get_input_embeddings()(IDS), whole.get_input_embeddings()(IDS))


@pytest.mark.gloo
def test_parts_of_a_model_are_called_and_saved_by_themselves(tmp_path: Path) -> None:
    """A head, a forward without its hooks, the model inside, a table that others share."""
    run_processes(parts, (tmp_path,), 2)


def copies(rank: int) -> None:
    torch.set_num_threads(1)
    whole, model = built(), autoplan.parallelize(built(), mesh_of(tp=2), plan())
    average: Any = AveragedModel(model, avg_fn=lambda mean, new, count: (mean + new) / 2)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    average.update_parameters(model), average.update_parameters(model)
    wanted, got = whole(IDS, labels=LABELS), twin(IDS, labels=LABELS)
    wanted.loss.backward(), got.loss.backward()
    gradients = autoplan.full_tensors(twin, grads=True)
    assert all(float((gradients[n] - p.grad).abs().max()) < 1e-6 for n, p in whole.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(0.5)
        torch.testing.assert_close(average(IDS).logits, whole(IDS).logits)
    for save in (pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
        with pytest.raises(AutoplanError, match="a sharded model cannot be pickled"):
            save(model)


@pytest.mark.gloo
def test_a_copy_trains_and_averages_as_the_model_does() -> None:
    run_processes(copies, (), 2)


# ------------------------------------------------------------------------------------------------------------- replaced


class Scaled(nn.Module):
    """A wrapper; `own`: with weights that no plan has seen."""

    def __init__(self, inner: nn.Module, own: bool = False) -> None:
        super().__init__()
        self.inner, self.scale = inner, 1.5
        if own:
            self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def wrapped(model: Any) -> Any:
    model.model.layers[0].mlp.down_proj = Scaled(model.model.layers[0].mlp.down_proj)
    return model


def bare(model: Any) -> Any:
    model.model.layers[0].mlp.down_proj = model.model.layers[0].mlp.down_proj.inner
    return model


def replaced(rank: int) -> None:
    torch.set_num_threads(1)
    mesh = mesh_of(tp=2)
    model = autoplan.parallelize(built(), mesh, plan())
    block = model.model.layers[0]
    with torch.no_grad():
        torch.testing.assert_close(wrapped(model)(IDS).logits, wrapped(built())(IDS).logits)
        outer = wrapped(built())
        of_outer = autoplan.plan(outer, 2, prove="none")
        model = autoplan.parallelize(outer, mesh, of_outer)
        torch.testing.assert_close(bare(model)(IDS).logits, built()(IDS).logits)  # its sum goes with it
    block = model.model.layers[1]
    with pytest.raises(
        AutoplanError, match=r"layers\.1\.self_attn\.q_proj was wrapped in a Scaled with weights of its"
    ):
        block.self_attn.q_proj = Scaled(block.self_attn.q_proj, own=True)
    with pytest.raises(AutoplanError, match="lm_head was sharded and cannot be replaced by another Linear"):
        model.set_output_embeddings(nn.Linear(2, 2))
    with pytest.raises(AutoplanError, match="resize_token_embeddings of a sharded model: its table of"):
        model.resize_token_embeddings(200)
    model.resize_token_embeddings(model.config.vocab_size)
    with pytest.raises(AutoplanError, match="DistributedDataParallel around a sharded model"):
        nn.parallel.DistributedDataParallel(model)
    autoplan.applied(model).undo()
    block.self_attn.q_proj = Scaled(block.self_attn.q_proj, own=True)
    assert "resize_token_embeddings" not in vars(model)


@pytest.mark.gloo
def test_a_module_that_is_replaced_takes_the_plan_with_it_or_is_refused() -> None:
    run_processes(replaced, (), 2)


# ------------------------------------------------------------------------------------------------ ranks that part


def stopped(rank: int, folder: Path) -> float:
    """Seconds until a rank hears that another has stopped inside a block."""
    torch.set_num_threads(1)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store", timeout=timedelta(seconds=3)
    )
    model = autoplan.parallelize(built(), mesh_of(tp=2), plan())

    def fails(module: nn.Module, args: Any) -> None:
        raise ValueError("only here")

    if rank == 0:
        model.model.layers[1].mlp.register_forward_pre_hook(fails)
    begun = time.monotonic()
    told = (ValueError, "only here") if rank == 0 else (AutoplanError, "communication failed inside LlamaFor")
    with pytest.raises(told[0], match=told[1]):
        model(IDS)
    seconds = time.monotonic() - begun
    time.sleep(8 if rank == 0 else 0)  # it goes on, and holds its connections
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/again")
    return seconds


@pytest.mark.long
@pytest.mark.gloo
def test_a_rank_that_stops_inside_a_block_is_waited_for_no_longer_than_the_timeout(
    tmp_path: Path,
) -> None:
    first, second = run_processes(stopped, (tmp_path,), 2)
    assert first < 3 and second < 8

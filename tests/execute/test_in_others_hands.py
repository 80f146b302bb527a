"""What torch and its neighbours do with parameters on ranks, beside the unsharded model: the same, or one error."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from mesh_toys import mesh_of
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Muon

import autoplan
from autoplan.check.ranks.run import run_processes
from autoplan.common.errors import AutoplanError
from autoplan.hf.source import resolve
from autoplan.values import SplitLogits

IDS = torch.randint(1, 100, (2, 6), generator=torch.Generator().manual_seed(1))
pytestmark = pytest.mark.long
HYBRID = "bamba"  # has rows that both ranks hold


def pair(model_type: str, **options: Any) -> tuple[Any, Any]:
    """A model, and a sharded one with the same weights."""
    torch.manual_seed(0)
    whole = resolve(model_type).tiny(dtype=torch.float64)
    for module in whole.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plan = autoplan.plan(copy.deepcopy(whole), 2, prove="none", **options)
    return whole, autoplan.parallelize(copy.deepcopy(whole), mesh_of(tp=2), plan)


def away(whole: Any, model: Any, grads: bool = True) -> float:
    """How far gradients, or parameters, are from the unsharded model's."""
    found = autoplan.full_tensors(model, grads=grads)
    wanted = {name: one.grad if grads else one.detach() for name, one in whole.named_parameters()}
    assert {n for n, one in wanted.items() if one is not None} == {n for n in wanted if found.get(n) is not None}
    return max(float((found[name] - one).abs().max()) for name, one in wanted.items() if one is not None)


def loss_of(model: Any) -> torch.Tensor:
    return model(IDS, labels=IDS, use_cache=False).loss


# ------------------------------------------------------------------------------------------------------ derivatives


def penalised(model: Any) -> torch.Tensor:
    """A penalty on gradients of a loss: by what the model is given, by vectors of which no row has two holders."""
    model.set_attn_implementation("eager")
    given = model.get_input_embeddings()(IDS).detach().requires_grad_()
    loss = model(inputs_embeds=given, labels=IDS, use_cache=False).loss
    wanted = [one for name, one in model.named_parameters() if "conv1d" not in name and one.dim() == 1]
    gradients = torch.autograd.grad(loss, [given, *wanted], create_graph=True, allow_unused=True)
    sums = [one.square().sum() for one in gradients if one is not None]
    total = sum(one.full_tensor() if isinstance(one, DTensor) else one for one in sums)
    assert isinstance(total, torch.Tensor)
    total.backward()
    return total


CASES = (("gpt2", False), ("llama", True), ("bert", False), ("deepseek_v3", False), (HYBRID, False))


def second(rank: int) -> dict[str, float]:
    """By case, how far a penalty and its gradients are from the unsharded model's; and those of hidden states."""
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for model_type, sequence in CASES:
        whole, model = pair(model_type, sequence_parallel=sequence)
        wanted, got = float(penalised(whole)), float(penalised(model))
        found[model_type] = max(abs(wanted - got), away(whole, model)) / wanted
    whole, model = pair("whisper")
    for one in (whole, model):  # a loss on what the head reads
        one(IDS, output_hidden_states=True).hidden_states[-1].square().mean().backward()
    return {**found, "whisper": away(whole, model)}


@pytest.mark.gloo
def test_gradients_are_differentiated_again_and_hidden_states_have_losses_of_their_own() -> None:
    """Biases that ranks add up again, pieces of a sequence, parts of gradients, rows with two holders."""
    for found in run_processes(second, (), 2):
        assert len(found) == len(CASES) + 1 and max(found.values()) < 1e-6, found  # losses are in float32


def watched(rank: int) -> None:
    """Backward hooks everywhere, torch's search for NaN, and what no communication can be part of."""
    torch.set_num_threads(1)
    whole, model = pair("llama")
    seen: list[list[torch.Tensor]] = [[], []]
    for one, into in zip((whole, model), seen, strict=True):
        one.lm_head.register_full_backward_hook(lambda module, given, made, into=into: into.extend(made))
        for module in one.modules():
            module.register_full_backward_hook(lambda *_: None)
        with torch.autograd.detect_anomaly(check_nan=True):
            loss_of(one).backward()
    assert away(whole, model) < 1e-6
    for got, wanted in zip(*reversed(seen), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)
    given = model.get_input_embeddings()(IDS).detach()

    def called(x: torch.Tensor) -> torch.Tensor:
        return model(inputs_embeds=x).logits.square().mean()

    for call in (torch.func.grad(called), torch.func.vmap(called), torch.func.vjp):
        with pytest.raises(AutoplanError, match=r"is sharded and cannot be called inside a torch\.func transform"):
            call(given) if call is not torch.func.vjp else call(called, given)
    values = {name: one.detach() for name, one in model.named_parameters()}

    def of(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, values, (IDS,)).logits

    for call in (lambda: torch.func.jvp(of, (values,), (values,)), lambda: torch.func.linearize(of, values)):
        with pytest.raises(AutoplanError, match="is sharded and cannot be called inside a"):
            call()
    with forward_ad.dual_level(), pytest.raises(AutoplanError, match="inside a forward derivative"):
        called(forward_ad.make_dual(given, given))


@pytest.mark.gloo
def test_backward_is_watched_and_functions_of_functions_are_refused() -> None:
    run_processes(watched, (), 2)


# ------------------------------------------------------------------------------------------------- norms and steps


def clipped(rank: int) -> None:
    torch.set_num_threads(1)
    whole, model = pair(HYBRID)
    twin = copy.deepcopy(model)
    optimizer = SGD(twin.parameters(), lr=0.1)
    for one in (whole, model, twin):
        loss_of(one).backward()
    for kind in (1.0, 2.0, float("inf")):
        wanted = get_total_norm([one.grad for one in whole.parameters()], kind)
        for sharded in (model, twin):
            found: Any = get_total_norm([one.grad for one in sharded.parameters()], kind)
            torch.testing.assert_close(found.full_tensor(), wanted)
    for one in (whole, model.float().double(), twin):
        clip_grad_norm_(one.parameters(), 0.01)
    assert optimizer.param_groups  # by it the copy is known
    assert away(whole, twin) < 1e-8 and away(whole, model) < 1e-8


@pytest.mark.gloo
def test_torch_counts_rows_with_two_holders_once() -> None:
    run_processes(clipped, (), 2)


def stepped(rank: int) -> None:
    torch.set_num_threads(1)
    whole, model = pair("whisper")  # its cross-attention gets no gradient without an encoder
    for one in (whole, model):
        optimizer = LBFGS(one.parameters(), lr=0.1, max_iter=2)

        def closure(one: Any = one, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(one)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert away(whole, model, grads=False) < 1e-7
    assert {n for n, p in model.named_parameters() if p.grad is None} == {
        n for n, p in whole.named_parameters() if p.grad is None
    }
    for one in (whole, model):
        Adafactor(one.parameters()).step()
    assert away(whole, model, grads=False) < 1e-7
    failing = LBFGS(model.parameters())
    with pytest.raises(RuntimeError, match="theirs") as told:
        failing.step(fails)
    assert not isinstance(told.value, AutoplanError)
    _, model = pair(HYBRID)
    for kind in (Muon, Adafactor, transformers.Adafactor):
        with pytest.raises(AutoplanError, match=f"{kind.__name__} on a parameter of .* some of whose rows are on sev"):
            kind([one for one in model.parameters() if one.dim() == 2])


def fails() -> float:
    raise RuntimeError("theirs")


@pytest.mark.gloo
def test_optimizers_of_whole_parameters_step_or_say_why_not() -> None:
    run_processes(stepped, (), 2)


# -------------------------------------------------------------------------------------------------- data and states


def assigned(rank: int) -> None:
    torch.set_num_threads(1)
    whole, model = pair("gpt2")
    for one in (whole, model):
        for parameter in one.parameters():
            parameter.data = parameter.data * 0.9
    assert away(whole, model, grads=False) < 1e-12
    table: Any = model.transformer.h[0].attn.c_attn.weight
    values = torch.randn(tuple(table.shape), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for one in (whole, model):
        one.transformer.h[0].attn.c_attn.weight.data = values.clone()  # whole, in the checkpoint's order
    assert away(whole, model, grads=False) < 1e-12
    torch.testing.assert_close(loss_of(model), loss_of(whole))
    for one, value in ((whole, values), (model, table.data.redistribute(placements=[Replicate()]) * 0.5)):
        one.transformer.h[0].attn.c_attn.weight.data = value if one is model else value * 0.5
    assert away(whole, model, grads=False) < 1e-12
    for odd in (torch.zeros(3), 3):
        with pytest.raises(AutoplanError, match=r"parameter\.data = a .* for a parameter of"):
            table.data = odd
    single = model.float()  # a cast keeps what was noted on parameters: states are in the checkpoint's order
    optimizers = [AdamW(one.parameters(), lr=0.1) for one in (whole, single)]
    for one, optimizer in zip((whole, single), optimizers, strict=True):
        loss_of(one).backward()
        optimizer.step()
    wanted, got = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for key, state in wanted.items():
        torch.testing.assert_close(got[key]["exp_avg"].full_tensor().double(), state["exp_avg"], atol=1e-4, rtol=1e-3)


@pytest.mark.gloo
def test_data_that_is_assigned_is_computed_with_and_casts_forget_nothing() -> None:
    run_processes(assigned, (), 2)


def held_by_fsdp(rank: int) -> None:
    class Lost(Losing):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            for parameter in self.up.parameters():
                parameter.data = parameter.data * 2
            return super().forward(*args, **kwargs)

    torch.set_num_threads(1)
    whole, model, lost = Losing().double(), Losing().double(), Lost().double()
    for one in (model, lost):
        one.load_state_dict(whole.state_dict())
        plan = autoplan.plan(Losing(), 2, inputs={"ids": IDS}, prove="none")
        autoplan.parallelize(one, mesh_of(dp_shard=2, tp=2), plan, check=False, path_guard="off")
    for one in (whole, model):
        one(IDS, labels=IDS)["loss"].backward()
        for parameter in one.parameters():
            parameter.data = parameter.data * 0.9
    assert away(whole, model, grads=False) < 1e-12
    values = torch.ones_like(whole.up.weight)
    losses = []
    for one in (whole, model):
        kept = one.up.weight.data
        one.up.weight.data = values.clone()  # whole, in the checkpoint's order
        losses.append(one(IDS, labels=IDS)["loss"].detach())
        one.up.weight.data = kept
        losses.append(one(IDS, labels=IDS)["loss"].detach())
    torch.testing.assert_close(losses[2:], losses[:2])
    assert losses[0] != losses[1] and away(whole, model, grads=False) < 1e-12
    with pytest.raises(AutoplanError, match="FSDP2 has gathered it and loses the change"):
        lost(IDS)


@pytest.mark.gloo
def test_data_of_what_fsdp_shards_is_assigned_but_in_a_forward() -> None:
    run_processes(held_by_fsdp, (), 4)


def loaded(rank: int) -> None:
    torch.set_num_threads(1)
    whole, model = pair(HYBRID)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(0.5)
    for broadcast in (True, False):
        _, model = pair(HYBRID)
        given = whole.state_dict() if rank == 0 or not broadcast else {}
        set_model_state_dict(
            model, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        )
        assert away(whole, model, grads=False) == 0
    for save, what in ((safetensors.torch.save_model, model), (safetensors.torch.save_file, model.state_dict())):
        with pytest.raises(AutoplanError, match="safetensors writes plain tensors"):
            save(what, "nowhere")
    del model, what
    gc.collect()
    assert "data" not in vars(DTensor)  # nothing of ours outlives sharded models


@pytest.mark.gloo
def test_whole_state_dicts_are_loaded_and_safetensors_says_how_to_save() -> None:
    run_processes(loaded, (), 2)


# ------------------------------------------------------------------------------------------------------------- compiled


class Losing(nn.Module):
    """A model that makes its loss as many do, of a class."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(96, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 96, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.table(ids)
        logits = self.head(x + self.down(F.gelu(self.up(x))))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)(logits.view(-1, logits.size(-1)), labels.view(-1))}


def losses_of(model: Any, cast: torch.dtype | None) -> list[torch.Tensor]:
    """The model's own loss, and one of the caller's on its logits."""
    with torch.autocast("cpu", dtype=cast or torch.bfloat16, enabled=cast is not None):
        own = model(IDS, labels=IDS)["loss"]
        return [own, F.cross_entropy(model(IDS)["logits"].view(-1, 96), IDS.view(-1))]


def typed(rank: int) -> None:
    torch.set_num_threads(1)
    for inside, cast in ((torch.float32, torch.bfloat16), (torch.bfloat16, None)):
        torch.manual_seed(0)
        whole = Losing().to(inside)
        plan = autoplan.plan(Losing(), 2, inputs={"ids": IDS}, prove="none")
        model = autoplan.parallelize(copy.deepcopy(whole), mesh_of(tp=2), plan)
        for wanted, got in zip(losses_of(whole, cast), losses_of(model, cast), strict=True):
            assert got.dtype == wanted.dtype, (inside, cast)
            torch.testing.assert_close(got, wanted, atol=0.02, rtol=0.02)


def compiled(rank: int) -> float:
    typed(rank)
    torch.manual_seed(0)
    whole = Losing().double()
    ids = IDS % 40  # every target is among the first rank's columns
    plan = autoplan.plan(copy.deepcopy(whole), 2, inputs={"ids": ids}, prove="none")
    model = autoplan.parallelize(copy.deepcopy(whole), mesh_of(tp=2), plan)
    assert any(isinstance(one, SplitLogits) for one in plan.runtime.instructions)
    run: Any = torch.compile(model, backend="eager", fullgraph=True)
    for one in (whole, run):
        one(ids, labels=ids)["loss"].backward()
    return away(whole, model)


@pytest.mark.gloo
def test_losses_have_the_types_of_the_unsharded_model_and_compiled_ones_know_that_logits_are_split() -> None:
    assert max(run_processes(compiled, (), 2)) < 1e-6

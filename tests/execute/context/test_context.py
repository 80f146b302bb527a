"""Context parallelism: whole weights, a rank's own positions, and what comes out is that of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan
from autoplan.check.ranks.run import count_collectives, run_ranks
from autoplan.check.scoreboard.run import scoreboard
from autoplan.common.errors import AutoplanError, IndivisibleError, PlanMismatchError
from autoplan.common.layout import Layout
from autoplan.decide.written_plans.plan_file import load_plan
from autoplan.execute.collectives import RankGroup
from autoplan.execute.executors import At, Running, execute
from autoplan.execute.vocabulary.own_positions import (
    PositionLogits,
    own_of,
    own_stream,
    position_logits,
    whole_logits,
)
from autoplan.execute.vocabulary.split_logits import as_kind, split_class
from autoplan.values import (
    AllGatherSequenceSumGradient,
    ExchangeToPieces,
    ExchangeToPositions,
    SequenceName,
    WholeLength,
)

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=64,
)
WAYS = ("loss of the model", "loss of the caller", "whole logits")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval().double()


@pytest.fixture(scope="module")
def plan(model: Any) -> autoplan.Plan:
    return autoplan.plan(model, cp_size=2)


def on_ranks(model: Any, plan: autoplan.Plan, run: Callable[[Any], Any], **how: Any) -> list[Any]:
    """What `run` gives for a copy of the model on each rank of a mesh with the one dim "cp"."""
    copies = [copy.deepcopy(model) for _ in range(2)]

    def rank(number: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        return run(autoplan.parallelize(copies[number], mesh, plan, **how))

    return run_ranks(rank, 2)


def loss_of(model: Any, ids: torch.Tensor, labels: torch.Tensor, way: str) -> torch.Tensor:
    if way == "loss of the model":
        found: torch.Tensor = model(ids, labels=labels).loss
        return found
    logits = model(ids).logits
    if way == "whole logits":
        logits = logits * torch.ones(1, ids.shape[1], 1)  # as long as the sequence: not known to leave positions alone
    return F.cross_entropy(logits[:, :-1].reshape(-1, CONFIG.vocab_size), labels[:, 1:].reshape(-1))


@pytest.mark.parametrize("length", (8, 11))
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_one_device(model: Any, plan: autoplan.Plan, way: str, length: int) -> None:
    ids = torch.randint(3, CONFIG.vocab_size, (2, length))
    labels = ids.clone()
    labels[0, : length // 2 + 1] = -100  # ranks have different numbers of labels

    def step(of: Any) -> tuple[float, dict[str, torch.Tensor], tuple[torch.Size, ...]]:
        of.zero_grad(set_to_none=True)
        loss = loss_of(of, ids, labels, way)
        loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in of.named_parameters()}
        return float(loss.detach()), gradients, tuple(parameter.shape for parameter in of.parameters())

    loss, gradients, shapes = step(copy.deepcopy(model))
    for other, found, kept in on_ranks(model, plan, step):
        single = way == "loss of the model"  # which computes it in single precision
        assert other == pytest.approx(loss, abs=1e-5 if single else 1e-12)
        assert kept == shapes  # weights are whole
        for name, gradient in gradients.items():
            assert torch.allclose(found[name], gradient, rtol=1e-9, atol=1e-6 if single else 1e-12), name


@pytest.mark.parametrize("given", ("whole", "cut"))
def test_a_batch_of_own_positions_is_that_of_one_device(model: Any, plan: autoplan.Plan, given: str) -> None:
    """Whole on each rank and cut by us, or read by a loader that has a rank's own positions alone."""
    length = 11
    ids = torch.randint(3, CONFIG.vocab_size, (2, length))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def step(of: Any, given: Any) -> Any:
        loss = of(**given).loss
        loss.backward()
        return loss.detach(), {name: parameter.grad.clone() for name, parameter in of.named_parameters()}

    def sharded(of: Any) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        if given == "whole":
            own = autoplan.shard_batch(batch, mesh)
        else:
            first, last = ((0, 6), (6, 11))[mesh.get_local_rank()]
            own = autoplan.shard_batch({k: v[:, first:last] for k, v in batch.items()}, mesh, length=length)
        with pytest.raises(AutoplanError, match="input_ids is already sharded"):
            autoplan.shard_batch(own, mesh)
        assert own["input_ids"].shape == (2, length)
        return step(of, own)

    loss, gradients = step(copy.deepcopy(model), batch)
    for other, found in on_ranks(model, plan, sharded):
        assert torch.allclose(other, loss, atol=1e-5)
        assert all(torch.allclose(found[name], gradients[name], atol=1e-6) for name in gradients)


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    ids = torch.ones(2, 8, dtype=torch.long)

    def rank(_: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        with pytest.raises(AutoplanError, match="has 8 positions, but rank . of 2 has 4 of 8"):
            autoplan.shard_batch(ids, mesh, length=8)
        with pytest.raises(AutoplanError, match="has size 8 in ids, but 3 in pixels"):
            autoplan.shard_batch({"ids": ids, "pixels": torch.ones(2, 3, 4)}, mesh)
        with pytest.raises(PlanMismatchError, match="no dim named 'cp'"):
            autoplan.shard_batch(ids, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))

    run_ranks(rank, 2)


def packed(model: Any, ids: torch.Tensor) -> None:
    positions = torch.arange(ids.shape[1])[None] % (ids.shape[1] // 2)
    model(ids[:1], position_ids=positions, labels=ids[:1]).loss.backward()


def padded(model: Any, ids: torch.Tensor) -> None:
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()


def accumulated(model: Any, ids: torch.Tensor) -> None:
    for batch in (ids, ids[:, :7], ids):
        model(batch, labels=batch, num_items_in_batch=30).loss.backward()


@pytest.mark.parametrize("checkpointing", (False, True, "selective"))
@pytest.mark.parametrize("call", (packed, padded, accumulated))
def test_other_calls_are_those_of_one_device(
    model: Any, plan: autoplan.Plan, call: Callable[[Any, torch.Tensor], None], checkpointing: Any
) -> None:
    ids = torch.randint(3, CONFIG.vocab_size, (2, 12))
    alone = copy.deepcopy(model)
    call(alone, ids)

    def run(of: Any) -> list[torch.Tensor]:
        call(of, ids)
        return [parameter.grad for parameter in of.parameters()]

    for gradients in on_ranks(model, plan, run, activation_checkpointing=checkpointing):
        for (name, parameter), found in zip(alone.named_parameters(), gradients, strict=True):
            assert torch.allclose(found, parameter.grad, rtol=1e-4, atol=1e-6), name


def test_a_gradient_of_an_input_is_refused(model: Any, plan: autoplan.Plan) -> None:
    def run(of: Any) -> None:
        embeds = torch.randn(2, 9, CONFIG.hidden_size, dtype=torch.float64, requires_grad=True)
        with pytest.raises(PlanMismatchError, match="inputs_embeds"):
            of(inputs_embeds=embeds)

    on_ranks(model, plan, run)


def test_outputs_leave_as_own_positions_where_a_gradient_is_computed(model: Any, plan: autoplan.Plan) -> None:
    ids = torch.randint(3, CONFIG.vocab_size, (2, 9))

    def run(of: Any) -> Any:
        split = of(ids).logits
        with torch.no_grad():
            whole = of(ids).logits
            states = of(ids, output_hidden_states=True).hidden_states
        local = split.as_subclass(torch.Tensor)
        return type(split), tuple(split.shape), local.shape[1], whole_logits(split).detach(), whole, states

    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
    for rank, (kind, shape, own, gathered, whole, states) in enumerate(on_ranks(model, plan, run)):
        assert issubclass(kind, PositionLogits)
        assert shape == tuple(expected.logits.shape)
        assert own == (5, 4)[rank]
        assert torch.allclose(gathered, expected.logits)
        assert torch.allclose(whole, expected.logits)
        assert all(torch.allclose(a, b) for a, b in zip(states, expected.hidden_states, strict=True))


def test_positions_that_a_call_picks_are_those_of_the_whole(model: Any, plan: autoplan.Plan) -> None:
    ids = torch.randint(3, CONFIG.vocab_size, (2, 9))
    with torch.no_grad():
        expected = model(ids, logits_to_keep=2).logits
        written = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)

    def run(of: Any) -> Any:
        with pytest.raises(PlanMismatchError, match="logits_to_keep"):
            of(ids, logits_to_keep=2)  # with gradients
        with torch.no_grad():
            return of(ids, logits_to_keep=2).logits, of.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)

    for kept, tokens in on_ranks(model, plan, run):
        assert torch.allclose(kept, expected)
        assert torch.equal(tokens, written)


@pytest.mark.parametrize(
    "mesh",
    [
        "dp_shard=2,cp=2",
        pytest.param("dp_replicate=2,dp_shard=1,cp=2", marks=pytest.mark.long),
        pytest.param("dp_shard=2,cp=2,tp=2", marks=pytest.mark.long),
    ],
)
def test_it_trains_beside_fsdp(mesh: str) -> None:
    report = autoplan.verify("llama", mesh=mesh, checks=["forward", "loss"])
    assert report.ok, report.findings
    assert {"training", "training with checkpointing"} <= set(report.details["checked"])


KINDS = {  # what each has beside the others
    "gpt2": "a tied head behind a view that is told the length",
    "gemma3_text": "a tied head, windows",
    "bloom": "slopes of heads made in the model's code",
    "deepseek_v3": "latents, experts",
    "mamba2": "a scan, a short convolution",
    "rwkv": "a token shift on the stream",
    "zamba2": "a second stream into its blocks",
    "minimax": "lightning attention in blocks",
    "xlnet": "a sum in a module's own code: each rank runs it whole",
}
BESIDE_TP = {
    "mixtral": "experts, cut inside over tp",
    "gpt_oss": "sinks of heads",
    "mamba2": "groups of heads that both kinds of ranks share out",
    "qwen3_next": "delta nets, a gated attention",
    "deepseek_v3": "latents, whose weights are cut over tp alone",
    "bloom": "slopes of heads made in the model's code",
}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "tp"), [*((kind, 1) for kind in KINDS), *((kind, 2) for kind in BESIDE_TP)])
def test_kinds_of_mixers(kind: str, tp: int) -> None:
    board = scoreboard("causal_lm", tp, cp_size=2, only=[kind], lengths=(16, 13))
    assert [score.verdict for score in board.scores] == ["exact"], board.scores[0].reason


@pytest.mark.gloo
@pytest.mark.long
def test_processes_agree_with_one_device() -> None:
    assert autoplan.verify("mixtral", cp_size=2, engine="gloo").ok


def test_experts_run_on_own_tokens() -> None:
    """A dispatch by an index for each token moves nothing."""
    moved = autoplan.plan("mixtral", cp_size=2, prove="none").communication
    assert {move.block for move in moved} == {"model.layers.*"}
    assert all(set(one.forward) == set(one.backward) == {"all_to_all"} for one in moved)  # of attention


def test_what_each_projection_moves_is_a_rank_s_part_of_what_it_makes() -> None:
    (moved,) = autoplan.plan(LlamaForCausalLM(CONFIG), cp_size=2, prove="none").communication
    queries, keys, values, given_back = 64, 32, 32, 64  # numbers of four bytes for each token
    assert moved.forward == moved.backward == {"all_to_all": (4, 4 * (queries + keys + values + given_back) // 2)}


class Latent(torch.nn.Module):
    """Queries of heads; keys and values of one latent, which the mixer's own code takes apart; the rest is read as it
    is: nothing, or something that needs all positions."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.q = torch.nn.Linear(32, 32)
        self.down, self.up = torch.nn.Linear(32, 8), torch.nn.Linear(6, 64)
        self.o = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        latent, shared = self.down(x).split([6, 2], -1)
        keys, values = self.up(latent).view(batch, length, 4, 16).transpose(1, 2).chunk(2, -1)
        queries = self.q(x).view(batch, length, 4, 8).transpose(1, 2)
        keys = keys + shared.sum(-1)[:, None, :, None]
        if self.reads == "stream":
            keys = keys * (1 + x.mean((1, 2)))[:, None, None, None]
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        found: torch.Tensor = self.o(mixed.transpose(1, 2).reshape(batch, length, 32))
        return found


class Blocks(torch.nn.Module):
    def __init__(self, reads: str) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(40, 32)
        self.layers = torch.nn.ModuleList(Block(reads) for _ in range(2))
        self.head = torch.nn.Linear(32, 40)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.head(x)
        return found


class Block(torch.nn.Module):
    def __init__(self, reads: str) -> None:
        super().__init__()
        self.norm, self.mixer = torch.nn.LayerNorm(32), Latent(reads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mixer(self.norm(x)))


@pytest.mark.parametrize("reads", ("nothing", "stream"))
def test_what_a_mixer_s_own_code_reads_is_gathered(reads: str) -> None:
    """The latent alone, where nothing else is read of the stream; else the stream."""
    torch.manual_seed(3)
    model, feeds = Blocks(reads).double(), {"input_ids": torch.randint(0, 40, (2, 12))}
    plan = autoplan.plan(model, cp_size=2, inputs=feeds)
    shown = [one.pattern for one in plan.runtime.of(WholeLength) if one.pattern != "table"]
    gathered = {one.pattern.rpartition(".")[2] for one in plan.runtime.of(AllGatherSequenceSumGradient)}
    assert bool(shown) is (reads == "nothing")
    assert ("down" in gathered) is (reads == "nothing")
    assert autoplan.verify(model, plan, inputs=feeds).ok


@pytest.mark.parametrize("how", ({}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}))
def test_own_indices_are_looked_up_where_a_lookup_is_all(how: dict[str, Any]) -> None:
    """A table that is changed by all indices, or scaled by their number, gets all of them."""
    torch.manual_seed(3)
    model = Blocks("nothing").double()
    model.table = torch.nn.Embedding(40, 32, **how).double()
    plan = autoplan.plan(model, cp_size=2, inputs={"input_ids": torch.randint(0, 40, (2, 12))}, prove="none")
    assert any(one.pattern == "table" for one in plan.runtime.of(WholeLength)) is not bool(how)


@pytest.mark.parametrize("layout", ("4!*3", "2!*2|4!", "(4!|1)*2", "2!2@2*4!2@1*3"))
@pytest.mark.parametrize("length", (2, 7, 12))
def test_an_exchange_and_its_gradients(layout: str, length: int) -> None:
    """Also the second derivative, and rows that several ranks hold."""
    ranks = 4
    width = Layout.parse(layout).size
    torch.manual_seed(5)
    whole = torch.randn(2, length, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(ranks, 2, length, width, dtype=torch.float64)
    rows = [Layout.parse(layout).rows(rank, ranks) for rank in range(ranks)]
    total = sum((whole[..., list(held)].sin() * weight[r][..., list(held)]).sum() for r, held in enumerate(rows))
    assert isinstance(total, torch.Tensor)
    (first,) = torch.autograd.grad(total, whole, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), whole)
    piece = -(-length // ranks)

    def rank(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        padded = F.pad(whole.detach(), (0, 0, 0, piece * ranks - length))
        own = padded[:, number * piece : (number + 1) * piece].requires_grad_()
        at = At(torch.nn.Identity(), "m", (), Running(mesh, RankGroup.of(mesh), None, None))  # type: ignore[arg-type]
        at.running.lengths["s"] = length
        how: Any = ("m", "output", (), -2, SequenceName("s"), -1, layout)
        pieces = execute(ExchangeToPieces(*how), at)(own)
        assert torch.equal(pieces.detach(), whole.detach()[..., list(rows[number])])
        if not Layout.parse(layout).shared_rows(ranks):
            back = execute(ExchangeToPositions(*how), at)(pieces.detach())
            assert torch.equal(
                back[:, : max(0, length - number * piece)], own.detach()[:, : max(0, length - number * piece)]
            )
        loss = (pieces.sin() * weight[number][..., list(rows[number])]).sum()
        (gradient,) = torch.autograd.grad(loss, own, create_graph=True)
        (again,) = torch.autograd.grad(gradient.pow(2).sum(), own)
        return gradient.detach(), again

    found = run_ranks(rank, ranks)
    for which, expected in enumerate((first.detach(), second)):
        joined = torch.cat([one[which] for one in found], 1)[:, :length]
        assert torch.allclose(joined, expected, atol=1e-10), which


def test_a_stream_behaves_as_the_whole_one() -> None:
    torch.manual_seed(6)
    whole = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    ((whole * 2)[:, 1:].sum() + whole.sum(1).sin().sum()).backward()

    def rank(number: int) -> torch.Tensor:
        group = RankGroup.of(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
        own = F.pad(whole.detach(), (0, 0, 0, 1))[:, number * 4 : (number + 1) * 4].requires_grad_()
        stream = own_stream(own * 1, -2, 7, group)
        assert stream.shape == whole.shape and stream.size(1) == 7 and stream.dtype == whole.dtype
        doubled = stream * 2
        assert own_of(doubled) is not None and own_of(doubled.sum(1)) is None
        with pytest.raises(PlanMismatchError):
            stream.add_(1)
        loss = (doubled[:, 1:].sum() + stream.sum(1).sin().sum()) / 2  # readers that each run a part of a sum
        loss.backward()
        assert own.grad is not None
        return own.grad

    joined = torch.cat(run_ranks(rank, 2), 1)[:, :7]
    assert whole.grad is not None and torch.allclose(joined, whole.grad)


def test_a_plan_file_keeps_the_size(plan: autoplan.Plan, tmp_path: Any) -> None:
    plan.save(tmp_path / "plan.yaml")
    loaded = load_plan(tmp_path / "plan.yaml")
    assert loaded == plan
    assert (loaded.tp_size, loaded.cp_size, loaded.ranks) == (1, 2, 2)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"ep_size": 2}, "ep_size"),
        ({"source": "hf"}, "source"),
        ({"overrides": {"model.layers.*.mlp.up_proj": "colwise"}}, "overrides"),
    ],
)
def test_what_cannot_stand_beside_it_is_refused(model: Any, how: dict[str, Any], error: str) -> None:
    with pytest.raises(AutoplanError, match=error):
        autoplan.plan(model, cp_size=2, **how)


def test_a_mesh_without_the_dim_is_refused(model: Any, plan: autoplan.Plan) -> None:
    def run(number: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(PlanMismatchError, match="'cp'"):
            autoplan.parallelize(copy.deepcopy(model), mesh, plan)

    run_ranks(run, 2)


def test_a_model_without_positions_is_refused() -> None:
    blocks = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()) for _ in range(3)))
    with pytest.raises(IndivisibleError, match="the sequence cannot be sharded over 2 ranks"):
        autoplan.plan(blocks, cp_size=2, inputs={"input": torch.randn(4, 16)})


class SumsInside(torch.nn.Module):
    """Attention by its own weights, with the residual and the norm in the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Parameter(torch.randn(32, 4, 8) / 6) for _ in range(4))
        self.norm = torch.nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.einsum("bih,hnd->bnid", x, weight) for weight in (self.q, self.k, self.v))
        scores = torch.softmax(torch.einsum("bnid,bnjd->bnij", q, k), -1)
        y = torch.einsum("bnij,bnjd->bind", scores, v)
        found: torch.Tensor = self.norm(torch.einsum("bind,hnd->bih", y, self.o) + x)
        return found


def test_blocks_that_sum_inside_and_share_no_work_are_refused_by_call() -> None:
    blocks = torch.nn.Sequential(
        torch.nn.Embedding(40, 32),
        *(torch.nn.Sequential(SumsInside(), torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(3)),
    )
    with pytest.raises(IndivisibleError, match="einsum in .* combines two positions") as found:
        autoplan.plan(blocks, cp_size=2, inputs={"input": torch.randint(0, 40, (2, 10))})
    assert "divides" not in str(found.value)  # no size would do


@pytest.mark.parametrize("length", (2, 7, 12))
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("shape", ("flat", "classes second", "shifted"))
@pytest.mark.parametrize("tp", (1, 2))
def test_a_loss_of_own_positions(length: int, reduction: str, shape: str, tp: int) -> None:
    """Also where a rank has no positions, or some columns, with weights, smoothed labels and such as do not count."""
    torch.manual_seed(1)
    logits, weight = torch.randn(2, length, 5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    labels = torch.randint(0, 5, (2, length))
    labels[0, 0] = -100

    def loss(x: torch.Tensor) -> torch.Tensor:
        how: dict[str, Any] = {"reduction": reduction, "weight": weight, "label_smoothing": 0.1}
        if shape == "classes second":
            return F.cross_entropy(x.transpose(1, 2), labels, **how)
        kept, wanted = (x[..., :-1, :].contiguous(), labels[:, 1:]) if shape == "shifted" else (x, labels)
        return F.cross_entropy(kept.float().double().view(-1, 5), wanted.reshape(-1), **how)

    whole = logits.clone().requires_grad_()
    expected = loss(whole)
    expected.sum().backward()

    def rank(number: int) -> Any:
        mesh = init_device_mesh("cpu", (3, tp), mesh_dim_names=("cp", "tp"))
        own = part(logits, number).clone().requires_grad_()
        shown = as_kind(own, split_class(RankGroup.of(mesh["tp"]), 5)) if tp > 1 else own
        with count_collectives() as counts:
            found = loss(position_logits(shown, -2, length, RankGroup.of(mesh["cp"])))
        found.sum().backward()
        return found.detach(), own.grad, dict(counts)

    def part(x: Any, number: int) -> torch.Tensor:
        """The positions of a rank, and its columns."""
        each, (row, column) = -(-length // 3), divmod(number, tp)
        columns = (slice(None), slice(0, 3), slice(3, 5))[0 if tp == 1 else 1 + column]
        return F.pad(x, (0, 0, 0, 3 * each - length))[:, row * each : (row + 1) * each, columns]

    for number, (found, gradient, gathered) in enumerate(run_ranks(rank, 3 * tp)):
        assert torch.allclose(found, expected.detach())
        assert torch.allclose(gradient, part(whole.grad, number))
        assert reduction == "none" or not any("gather" in name for name in gathered)


def test_a_loss_over_all_routers_is_that_of_one_device() -> None:
    """A mean over all tokens times another, beside the loss of own positions."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**{**CONFIG.to_dict(), "num_local_experts": 4, "output_router_logits": True})
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).eval()
    ids = torch.randint(3, CONFIG.vocab_size, (2, 9))

    def step(of: Any) -> tuple[float, dict[str, torch.Tensor]]:
        loss = of(ids, labels=ids).loss
        loss.backward()
        return float(loss.detach()), {name: parameter.grad for name, parameter in of.named_parameters()}

    loss, gradients = step(copy.deepcopy(model))
    for other, found in on_ranks(model, autoplan.plan(model, cp_size=2), step):
        assert other == pytest.approx(loss, rel=1e-5)
        for name, gradient in gradients.items():
            assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max())), name


def test_log_probabilities_are_those_of_one_device(model: Any, plan: autoplan.Plan) -> None:
    ids = torch.randint(3, CONFIG.vocab_size, (2, 11))

    def run(of: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = autoplan.vocab_parallel_logprobs(of(ids).logits, ids)
        found.sum().backward()
        return found.detach(), of.model.layers[0].mlp.up_proj.weight.grad

    alone = run(copy.deepcopy(model))
    for found in on_ranks(model, plan, run):
        assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(found, alone, strict=True))

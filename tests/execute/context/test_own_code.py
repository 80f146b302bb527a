"""Blocks that mix positions in their own code, not in a mixer of its own: calls there are passed the global length."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixer_stack import Stack
from redteam.cases import dispatch, streams
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autoplan
from autoplan.check.ranks.common import RankError
from autoplan.check.ranks.run import run_ranks
from autoplan.values import (
    AllGatherSequenceSumGradient,
    AttendAcross,
    AttentionCall,
    CallOverPositions,
    ExchangeToPieces,
    Halo,
    OwnPositions,
    ReduceScatterCall,
    RewriteCall,
    SequenceBoundary,
)

WIDTH, HEADS = 32, 4


class Block(nn.Module):
    """Attention and an MLP in one module's code."""

    def __init__(self, mix: Callable[[Block, Tensor, Tensor, Tensor, int, int], Tensor]) -> None:
        super().__init__()
        self.mix = mix
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.register_buffer("mask", torch.ones(64, 64).tril().bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        x = x + self.o(self.mix(self, self.q(y), self.k(y), self.v(y), batch, length))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _heads(x: Tensor, batch: int, length: int) -> Tensor:
    return x.view(batch, length, HEADS, -1).transpose(1, 2)


def _joined(x: Tensor, batch: int, length: int) -> Tensor:
    return x.transpose(1, 2).reshape(batch, length, WIDTH)


def fused(block: Block, q: Tensor, k: Tensor, v: Tensor, batch: int, length: int) -> Tensor:
    q, k, v = (_heads(x, batch, length) for x in (q, k, v))
    return _joined(F.scaled_dot_product_attention(q, k, v, is_causal=True), batch, length)


def _attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def made_mask(block: Block, q: Tensor, k: Tensor, v: Tensor, batch: int, length: int) -> Tensor:
    q, k, v = (_heads(x, batch, length) for x in (q, k, v))
    return _joined(_attended(q, k, v, torch.ones(length, length).tril().bool()), batch, length)


def buffered_mask(block: Block, q: Tensor, k: Tensor, v: Tensor, batch: int, length: int) -> Tensor:
    q, k, v = (_heads(x, batch, length) for x in (q, k, v))
    return _joined(_attended(q, k, v, block.mask[:length, :length]), batch, length)


def merged_heads(block: Block, q: Tensor, k: Tensor, v: Tensor, batch: int, length: int) -> Tensor:
    q, k, v = (_heads(x, batch, length).reshape(batch * HEADS, length, -1) for x in (q, k, v))
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    return _joined(_attended(q, k, v, seen).view(batch, HEADS, length, -1), batch, length)


def rotated(block: Block, q: Tensor, k: Tensor, v: Tensor, batch: int, length: int) -> Tensor:
    q, k, v = (_heads(x, batch, length) for x in (q, k, v))
    half = q.shape[-1] // 2
    angles = torch.arange(length, dtype=q.dtype)[:, None] * 0.1 ** torch.arange(half, dtype=q.dtype)
    cos, sin = angles.cos(), angles.sin()

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

    return _joined(F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True), batch, length)


def decayed(block: Block, q: Tensor, k: Tensor, v: Tensor, batch: int, length: int) -> Tensor:
    q, k, v = (_heads(x, batch, length) for x in (q, k, v))
    apart = torch.arange(length)[:, None] - torch.arange(length)
    rates = 1 - 2.0 ** (-2 - torch.arange(HEADS, dtype=q.dtype))
    weights = torch.where(apart >= 0, rates[:, None, None] ** apart.clamp(min=0), 0.0)
    return _joined((q @ k.mT * weights) @ v, batch, length)


def convolved(block: Block, q: Tensor, k: Tensor, v: Tensor, batch: int, length: int) -> Tensor:
    return F.silu(block.conv(v.mT)[..., :length].mT) * q * k


def averaged(block: Block, q: Tensor, k: Tensor, v: Tensor, batch: int, length: int) -> Tensor:
    return q * v.cumsum(1) / torch.arange(1, length + 1)[:, None]


MIXERS = (averaged, fused, made_mask, buffered_mask, merged_heads, rotated, decayed, convolved)


class Decoder(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.blocks = nn.Embedding(64, WIDTH), nn.ModuleList(block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64, bias=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _inputs(length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    return {name: torch.randint(0, 64, (2, length), generator=generator) for name in ("ids", "targets")}


@pytest.mark.parametrize("mix", MIXERS, ids=lambda mix: mix.__name__)
def test_positions_are_exchanged_in_a_blocks_own_code(mix: Callable[..., Tensor]) -> None:
    model = Decoder(lambda: Block(mix))
    plan = autoplan.plan(model, cp_size=2, inputs=_inputs(16))
    assert plan.proof is not None and plan.proof.trial.outcome == "passed"
    if mix is convolved:  # reads three positions before its own, as all of the block does
        assert {(halo.pattern, halo.before, halo.after) for halo in plan.runtime.of(Halo)} == {("blocks.*", 3, 0)}
    else:
        assert {x.pattern for x in plan.runtime.of(ExchangeToPieces)} >= {"blocks.*.v"}
        assert any(call.lengths for call in plan.runtime.of(RewriteCall))
    assert autoplan.verify(model, plan, inputs=_inputs(13)).ok  # 7 and 6 positions


@pytest.mark.parametrize("mix", [fused, made_mask, merged_heads], ids=lambda mix: mix.__name__)
def test_the_stream_of_such_blocks_is_sharded_under_tensor_parallelism(mix: Callable[..., Tensor]) -> None:
    model = Decoder(lambda: Block(mix))
    plan = autoplan.plan(model, tp_size=2, sequence_parallel=True, inputs=_inputs(16))
    assert plan.sequence_parallel and autoplan.verify(model, plan, inputs=_inputs(12)).ok


def test_both_on_four_processes() -> None:
    model = Decoder(lambda: Block(rotated))
    plan = autoplan.plan(model, tp_size=2, cp_size=2, inputs=_inputs(16))
    assert autoplan.verify(model, plan, inputs=_inputs(13), engine="gloo", checks=["forward"]).ok


class Mixer(Block):
    """Attention with its norm and its residual in one module."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        return x + self.o(made_mask(self, self.q(y), self.k(y), self.v(y), batch, length))


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.norm = Mixer(made_mask), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixer(x)
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_a_residual_that_is_added_in_the_mixer_stays_on_own_positions() -> None:
    model = Decoder(Around)
    plan = autoplan.plan(model, cp_size=2, inputs=_inputs(16))
    assert len(plan.runtime.of(ExchangeToPieces)) == 3 and autoplan.verify(model, plan, inputs=_inputs(13)).ok
    assert autoplan.plan(model, tp_size=2, sequence_parallel=True, inputs=_inputs(16)).sequence_parallel


class Weights(nn.Module):
    """A block whose weights are its own, as in code that is written with einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Parameter(torch.randn(WIDTH, HEADS, 8) / 6) for _ in range(3))
        self.o = nn.Parameter(torch.randn(HEADS, 8, WIDTH) / 6)
        self.up, self.down = (nn.Parameter(torch.randn(*shape) / 6) for shape in ((WIDTH, 64), (64, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (torch.einsum("btd,dhk->bhtk", y, w) for w in (self.q, self.k, self.v))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        x = x + torch.einsum("bhtk,hkd->btd", _attended(q, k, v, seen), self.o)
        return x + F.gelu(self.norm2(x) @ self.up) @ self.down


def test_sums_inside_a_block_are_reduce_scattered() -> None:
    model = Decoder(Weights)
    over_cp = autoplan.plan(model, cp_size=2, inputs=_inputs(16))
    assert over_cp.runtime.of(ReduceScatterCall)
    assert autoplan.verify(model, over_cp, inputs=_inputs(13)).ok
    sharded = autoplan.plan(model, tp_size=2, sequence_parallel=True, inputs=_inputs(16))
    assert sharded.sequence_parallel and len(sharded.runtime.of(ReduceScatterCall)) == 2
    assert autoplan.verify(model, sharded, inputs=_inputs(12), engine="gloo", checks=["forward"]).ok


class WithTorchsAttention(Block):
    """torch's attention, given a mask that torch makes."""

    def __init__(self) -> None:
        super().__init__(fused)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, mask = self.norm1(x), nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = x + self.o(self.attention(y, y, y, attn_mask=mask, need_weights=False)[0])
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def test_a_mask_that_is_made_without_a_dtype() -> None:
    """In a clone in double precision it was float32, for which torch's attention is wrong there: it was not sharded."""
    model = Decoder(WithTorchsAttention)
    assert autoplan.plan(model, tp_size=2, inputs=_inputs(16)).runtime.of(AttentionCall)
    plan = autoplan.plan(model, tp_size=2, cp_size=2, inputs=_inputs(16))
    assert plan.runtime.of(AttentionCall) and plan.runtime.of(AttendAcross)
    report = autoplan.verify(model, plan, inputs=_inputs(13))
    assert report.ok, report  # heads of tp, for the queries of cp


class Encoder(Decoder):
    """torch's own layers, with a mask of padding."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__(lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=batch_first))
        self.batch_first = batch_first

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x, padded = self.table(ids), ids == 0
        x = x if self.batch_first else x.transpose(0, 1)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padded)
        logits: Tensor = self.head(x if self.batch_first else x.transpose(0, 1))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_layers_attend_with_own_queries(batch_first: bool) -> None:
    model = Encoder(batch_first)
    plan = autoplan.plan(model, cp_size=2, inputs=_inputs(16))
    (attention,) = plan.runtime.of(AttendAcross)
    assert attention.gathers == (1,)  # keys and values are made of one value
    assert not any(gather.pattern.startswith("blocks") for gather in plan.runtime.of(AllGatherSequenceSumGradient))
    assert autoplan.verify(model, plan, inputs=_inputs(13), engine="gloo", checks=["forward"]).ok
    block = plan.communication[0]
    assert block.forward == {"all_gather": (1, WIDTH * 4)}  # once for keys and values


class Fourier(nn.Module):
    """Reads all positions in its own code, and treats no units apart."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(torch.fft.fft2(x, dim=(1, 2)).real)))


def test_a_block_without_heads_runs_on_the_whole_sequence_beside_others() -> None:
    blocks = iter((Fourier(), Block(fused)) * 2)
    model = Decoder(lambda: next(blocks))
    plan = autoplan.plan(model, cp_size=2, inputs=_inputs(16))
    assert autoplan.verify(model, plan, inputs=_inputs(13)).ok
    assert {x.pattern for x in plan.runtime.of(AllGatherSequenceSumGradient)} >= {"blocks.0"}
    assert any("_fft_c2c in blocks.0 reads across the sequence" in finding.message for finding in plan.findings)
    with pytest.raises(autoplan.IndivisibleError, match="_fft_c2c in blocks.0 reads across the sequence"):
        autoplan.plan(Decoder(Fourier), cp_size=2, inputs=_inputs(16))


class TwoLists(Decoder):
    """The second list of blocks goes on with the stream of the first."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(fused))
        self.more = nn.ModuleList(Block(made_mask) for _ in range(2))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.table(ids)
        for block in (*self.blocks, *self.more):
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("sizes", [{"cp_size": 2}, {"tp_size": 2, "sequence_parallel": True}], ids=["cp", "tp"])
def test_a_stream_goes_through_two_lists_of_blocks(sizes: dict[str, int]) -> None:
    model = TwoLists()
    plan = autoplan.plan(model, inputs=_inputs(16), **sizes)
    assert plan.sequence_parallel and autoplan.verify(model, plan, inputs=_inputs(13)).ok
    assert {cut.sequence.name for cut in plan.runtime.of(SequenceBoundary)} == {"s0"}
    assert not any("more" in f.message for f in plan.findings if "full sequence" in f.message)


# Calls that a plan of context parallelism was not made from: one error that names the module and the line.


class Scan(torch.nn.Module):
    """A running sum of channels, which goes on from a state if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.decay = torch.nn.Parameter(torch.rand(32))

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        summed = torch.cumsum(self.into(x) * self.decay, 1)
        if state is not None:
            summed = summed + state[:, None]
        made: torch.Tensor = self.out(torch.tanh(summed))
        return made


class Model(Stack):
    def __init__(self) -> None:
        super().__init__(Scan)

    def forward(self, input_ids: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        return self.run(input_ids, state)


def test_a_state_of_all_channels_is_refused_by_module_and_line() -> None:
    torch.manual_seed(3)
    model, ids = Model().double(), torch.randint(30, (2, 8))
    plan = autoplan.plan(model, cp_size=2, inputs={"input_ids": ids})

    def run(_: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        sharded = autoplan.parallelize(copy.deepcopy(model), mesh, plan)
        sharded(ids, torch.zeros(2, 32).double())

    with pytest.raises(RankError, match=r"PlanMismatchError: blocks.0.mixer \(Scan\) fails on a rank's shards .*state"):
        run_ranks(run, 2)


@pytest.mark.parametrize(
    ("experts", "whole"),
    [
        (dispatch.MaskOfExperts, False),
        (dispatch.MaskedInPlace, False),
        (dispatch.FirstOfEach, True),
        (dispatch.LoadInMask, False),  # of the load of all ranks
        (dispatch.LoadBelow, True),
        (dispatch.LoadInPython, True),  # the trial finds it
    ],
)
def test_loops_over_experts_run_on_own_positions_unless_counts_enter_values(experts: Any, whole: bool) -> None:
    torch.manual_seed(0)
    block = type("Chosen", (dispatch.Block,), {"experts": experts})
    plan = autoplan.plan(dispatch.Stack(block).double(), cp_size=2)
    assert plan.proof.ok, plan.findings
    assert any("full sequence" in finding.message for finding in plan.findings) == whole, plan.findings


@pytest.mark.parametrize("over", [{"cp_size": 2}, {"cp_size": 2, "tp_size": 2}], ids=["cp", "tp and cp"])
def test_a_block_may_sum_over_all_positions_in_its_own_code(over: dict[str, int]) -> None:
    torch.manual_seed(0)
    plan = autoplan.plan(streams.Stack(streams.SumsOfAll).double(), **over)
    assert plan.proof.ok and len(plan.runtime.of(CallOverPositions)) == 4, plan.findings
    assert not any("full sequence" in finding.message for finding in plan.findings), plan.findings


def test_what_is_written_in_place_is_cut_behind_its_module() -> None:
    model = Stack(streams.MergedByLikeness).double()
    plan = autoplan.plan(model, cp_size=2, inputs={"input_ids": torch.arange(24).view(2, 12)})
    assert {each.pattern for each in plan.runtime.of(OwnPositions) if each.side == "output"} == {"blocks.*.mixer"}
    assert autoplan.verify(model, plan, inputs={"input_ids": torch.arange(26).view(2, 13)}).ok


def test_code_that_would_take_another_branch_for_the_whole_length_is_refused() -> None:
    model = Stack(streams.ScaledIfLong)
    plan = autoplan.plan(model, cp_size=2, inputs={"input_ids": torch.arange(24).view(2, 12)})
    copies = [copy.deepcopy(model) for _ in range(2)]

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        autoplan.parallelize(copies[rank], mesh, plan)(torch.zeros(1, 22, dtype=torch.long))

    with pytest.raises(RankError, match=r"streams\.py:\d+: .*compares 11 with 16; for the full value, 22 with 16"):
        run_ranks(run, 2)

"""What other engines run around autoplan's part: stages of a pipeline, experts that exchange tokens, products in
float8, a sharded optimizer, losses in chunks."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

import autoplan
from autoplan.common.errors import AutoplanError
from autoplan.forecast.devices import load_device

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 4096, "dtype": "bfloat16"
}  # fmt: skip
DENSE = LlamaConfig(**SIZES, num_hidden_layers=16)
EXPERTS = MixtralConfig(**SIZES, num_hidden_layers=4, num_local_experts=8, num_experts_per_tok=2)


def asked(config: Any = DENSE, **how: Any) -> autoplan.Estimate:
    return autoplan.estimate(config, **({"mesh": "tp=1", "sequence": 128, "batch": 2} | how))


def test_a_stage_has_its_share_of_blocks_and_keeps_a_micro_batch_for_each_stage_behind_it() -> None:
    whole, stage = asked(accumulate=8), asked(mesh="pp=4,dp_shard=1", accumulate=8)
    ends = asked(LlamaConfig(**SIZES, num_hidden_layers=4), accumulate=8)  # its 4 blocks, embedding and head
    assert stage.parts.weights == ends.parts.weights < whole.parts.weights
    assert stage.flops == ends.flops
    assert stage.parts.kept > 2 * ends.parts.kept
    assert stage.run_by and not whole.run_by
    assert stage.time is not None
    idle = stage.time.idle
    assert idle == pytest.approx(3 / 8 * (stage.time.compute + stage.time.memory), rel=0.01)


def test_a_pipeline_that_serves_is_run_by_engines_that_serve() -> None:
    trained, served = (asked(mesh="pp=2", train=train).run_by for train in ("full", "inference"))
    assert "torchtitan" in trained and "vLLM" in served and "torchtitan" not in served


def test_a_pipeline_talks_once_a_step() -> None:
    """It keeps what it gathered, and sums gradients after the last micro-batch."""
    sent = {n: {s.kind: s.number for s in asked(mesh="pp=4,dp_shard=2", accumulate=n).messages} for n in (4, 8)}
    assert sent[4] == sent[8]


def test_too_many_stages_are_one_error() -> None:
    with pytest.raises(AutoplanError, match="17 stages"):
        asked(mesh="pp=17")


def test_a_stage_of_fewer_blocks_than_are_recorded_does_what_its_blocks_do() -> None:
    stage, alone = asked(mesh="pp=16"), asked(LlamaConfig(**SIZES, num_hidden_layers=1))
    assert stage.flops == alone.flops and stage.parts.weights == alone.parts.weights
    assert stage.parts.temporary >= 0


def test_interleaved_stages_idle_less_and_keep_more() -> None:
    one, two = (asked(mesh="pp=4", accumulate=8, virtual_stages=n) for n in (1, 2))
    assert one.time is not None and two.time is not None
    assert two.time.idle == pytest.approx(one.time.idle / 2)
    assert one.parts.kept < two.parts.kept and "8 stages, 2 on each rank" in two.run_by


def test_compiled_ops_between_products_are_one_kernel() -> None:
    plain, compiled = asked(sequence=512), asked(sequence=512, compiled=True)
    assert plain.time is not None and compiled.time is not None
    assert 0.2 < compiled.time.memory / plain.time.memory < 0.8
    assert compiled.time.compute == plain.time.compute and compiled.parts == plain.parts
    assert any("compiled" in text for text in compiled.how)


def test_reading_operands_takes_time() -> None:
    """Few tokens read as many weights as many tokens do."""
    few, many = asked(sequence=8), asked(sequence=512)
    assert few.time is not None and many.time is not None
    assert few.time.memory > 4 * few.time.compute and few.time.memory > many.time.memory / 64


def test_blocks_that_are_too_few_to_leave_any_out_count_as_blocks() -> None:
    shallow = LlamaConfig(**SIZES, num_hidden_layers=2)
    plain, faster = asked(shallow), asked(shallow, matmuls="fp8")
    assert plain.time is not None and faster.time is not None and faster.time.compute < plain.time.compute
    assert asked(shallow, mesh="pp=2").parts.weights < plain.parts.weights


def test_experts_that_exchange_tokens_are_gathered_by_those_that_hold_the_same() -> None:
    alone, exchanging = (asked(EXPERTS, mesh="dp_shard=8", exchange_experts=n) for n in (1, 8))
    assert exchanging.parts.weights == alone.parts.weights and exchanging.flops == alone.flops
    gathered = [next(s.bytes for s in one.messages if s.kind == "all-gather") for one in (alone, exchanging)]
    experts = 4 * 8 * 3 * 256 * 512 * 2
    assert experts * 7 // 8 <= gathered[0] - gathered[1] <= experts * 2 * 7 // 8  # once, or for backward again
    (sent,) = (s for s in exchanging.messages if s.kind == "all-to-all")
    assert sent.number == 4 * 4 and sent.bytes == 4 * 4 * (2 * 128 * 2) * 256 * 2  # there, back; tokens of two experts
    assert exchanging.run_by


@pytest.mark.parametrize(
    ("config", "how"),
    [
        (DENSE, {"mesh": "dp_shard=8", "exchange_experts": 8}),
        (EXPERTS, {"mesh": "dp_shard=6", "exchange_experts": 4}),
        (EXPERTS, {"mesh": "dp_shard=3", "exchange_experts": 3}),
        (EXPERTS, {"exchange_experts": 0}),
        (DENSE, {"matmuls": "int3"}),
        (DENSE, {"matmuls": "fp8", "device": "a100"}),
        (DENSE, {"mesh": "dp_shard=8", "shard_optimizer": True}),
        (DENSE, {"mesh": "dp_replicate=8,dp_shard=1", "shard_optimizer": True, "mp_policy": "bf16"}),
        (DENSE, {"train": "inference", "chunked_loss": True}),
        (DENSE, {"chunked_loss": "yes"}),
        (DENSE, {"compiled": "yes"}),
        (DENSE, {"mesh": "dp_replicate=4,dp_shard=1", "shard_optimizer": True, "cpu_offload": True}),
        (EXPERTS, {"mesh": "dp_shard=4", "ep_size": 2}),
        (DENSE, {"virtual_stages": 2}),
        (DENSE, {"gradient_sync": "sometimes"}),
        (DENSE, {"mesh": "pp=4", "virtual_stages": 2, "accumulate": 6}),
    ],
)
def test_what_cannot_be_priced_is_one_error(config: Any, how: dict[str, Any]) -> None:
    with pytest.raises(AutoplanError) as error:
        asked(config, **how)
    assert error.value.hint


def test_products_of_blocks_run_in_float8_and_all_else_as_before() -> None:
    plain, faster = asked(), asked(matmuls="fp8")
    assert plain.time is not None and faster.time is not None
    head = asked(LlamaConfig(**SIZES, num_hidden_layers=1))
    device = load_device("h100")
    share = device.reached("bfloat16") / device.reached("float8")
    assert share * plain.time.compute < faster.time.compute < plain.time.compute
    assert head.time is not None and faster.time.compute - share * plain.time.compute < head.time.compute
    assert faster.parts == plain.parts and faster.run_by


def test_a_sharded_optimizer_divides_its_states_alone() -> None:
    mesh = "dp_replicate=8,dp_shard=1"
    every, part = asked(mesh=mesh), asked(mesh=mesh, shard_optimizer=True, optimizer="adamw_master")
    assert part.parts.weights == every.parts.weights
    assert part.parts.optimizer == -(-every.parts.optimizer * 3 // 8)  # twelve bytes a number, where AdamW's are four
    assert {s.kind for s in part.messages} == {"reduce-scatter", "all-gather"}


def test_gradients_that_wait_for_the_last_micro_batch_are_whole_and_summed_once() -> None:
    mesh: dict[str, Any] = {"mesh": "dp_shard=4", "accumulate": 4}
    each, last = (asked(**mesh, gradient_sync=sync) for sync in ("each", "last"))
    numbers = sum(part.numel() for part in LlamaForCausalLM(DENSE).parameters())
    assert last.parts.gradients - each.parts.gradients == pytest.approx(4 * numbers - 2 * numbers / 4, rel=0.01)
    summed = [{s.kind: s.number for s in one.messages} for one in (each, last)]
    assert summed[0]["reduce-scatter"] == 4 * summed[1]["reduce-scatter"]
    assert summed[0]["all-gather"] == summed[1]["all-gather"]
    alone = asked(mesh="dp_shard=4", gradient_sync="last")
    assert alone.parts == asked(mesh="dp_shard=4").parts
    assert any("no effect: gradient_sync" in note for note in alone.notes)


def test_gradients_beside_weights_of_an_optimizer_in_float32_are_kept_in_float32() -> None:
    narrow, wide = (asked(mesh="tp=1", accumulate=2, optimizer=name) for name in ("adamw", "adamw_master"))
    assert wide.parts.gradients == 2 * narrow.parts.gradients
    assert asked(optimizer="adamw_master").parts.gradients == wide.parts.gradients  # there from the start


def test_decoding_reads_the_experts_that_tokens_go_to() -> None:
    held: dict[str, Any] = {"train": "inference", "batch": 1}
    few, many = (asked(EXPERTS, **held, concurrency=n) for n in (1, 64))
    weights = few.parts.weights / load_device("h100").bandwidth
    assert few.decoded_per_second * 1.0 < 1 / (0.3 * weights)  # two of eight experts, and all else
    assert many.decoded_per_second < 64 * few.decoded_per_second
    more = MixtralConfig(**SIZES, num_hidden_layers=4, num_local_experts=64, num_experts_per_tok=2)
    other = asked(more, **held, concurrency=1)
    assert other.parts.weights > 5 * few.parts.weights
    assert other.decoded_per_second > 0.9 * few.decoded_per_second  # two of 64 are as many bytes as two of eight


def test_what_others_run_holds_for_all_rows_of_a_choice() -> None:
    rows = autoplan.choose(EXPERTS, gpus=4, sequence=128, exchange_experts=2).rows
    assert rows and all("exchange tokens" in row.estimate.run_by and row.ep == 1 for row in rows)
    sharded = autoplan.choose(DENSE, gpus=4, sequence=128, shard_optimizer=True)
    assert all("ZeroRedundancyOptimizer" in row.estimate.run_by for row in sharded.rows if row.mesh.get("tp") != 4)
    assert "run with: states sharded" in str(sharded)
    staged = autoplan.choose(DENSE, gpus=4, sequence=128, global_batch=16, virtual_stages=2)
    assert not any(row.estimate.run_by for row in staged.rows)
    assert all("2 on each rank" in row.estimate.run_by for row in staged.elsewhere if "pp" in row.mesh)
    with pytest.raises(AutoplanError, match="exchange_experts"):
        autoplan.choose(EXPERTS, gpus=4, sequence=128, exchange_experts=3)


def test_a_loss_in_chunks_never_holds_all_logits() -> None:
    whole, chunks = (asked(chunked_loss=chunked, sequence=1024, mesh="dp_shard=8") for chunked in (False, True))
    logits = 2 * 1024 * 4096 * 4
    assert whole.peak - chunks.peak > logits
    assert (chunks.flops, chunks.messages, chunks.time) == (whole.flops, whole.messages, whole.time)


def test_choosing_says_what_others_would_run_and_where_a_mesh_stands() -> None:
    chosen = autoplan.choose(DENSE, gpus=2, sequence=128, global_batch=8, margin=0.5)
    assert chosen.memory == int(chosen.device.memory * 0.5)
    assert chosen.elsewhere and all(row.fits and row.estimate.run_by for row in chosen.elsewhere)
    assert not any(row.estimate.run_by for row in chosen.rows)
    place, row, more = chosen.against_first("tp=2")
    assert chosen.rows[place - 1] is row and row.mesh == {"tp": 2}
    first = chosen.rows[0].estimate.time
    assert first is not None and row.estimate.time is not None
    assert sum(more.values()) == pytest.approx(row.estimate.time.total / first.total - 1)
    assert f"row {place} " in str(chosen) or place > 12
    place, row, _ = chosen.against_first("pp=2")  # others run it
    assert place == 0 and row.estimate.run_by and row.mesh == {"pp": 2}
    with pytest.raises(AutoplanError, match="no row"):
        chosen.against_first("dp_shard=3")
    with pytest.raises(AutoplanError):
        autoplan.choose(DENSE, gpus=2, margin=1.0)

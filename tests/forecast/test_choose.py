"""Choosing a mesh: what fits comes first, what does not says by how much, and the choice can be carried out."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, CLIPVisionConfig, LlamaConfig, LlavaConfig, T5Config, ViTConfig
from typer.testing import CliRunner

import autoplan
from autoplan.cli.app import app
from autoplan.forecast.asked import Asked
from autoplan.forecast.choose import Choice, choose, parse_memory
from autoplan.forecast.devices import load_device
from autoplan.forecast.estimate import estimate_with
from autoplan.forecast.sharded import fake_mesh
from autoplan.forecast.step import Steps
from autoplan.forecast.sweep import Sweep
from autoplan.hf.source import resolve
from autoplan.values.estimate import Estimate


def _llama(**sizes: Any) -> LlamaConfig:
    known = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 4, "vocab_size": 32000}  # fmt: skip
    return LlamaConfig(**known | sizes, architectures=["LlamaForCausalLM"], dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def chosen() -> Choice:
    two_heads = _llama(num_attention_heads=2, num_key_value_heads=2)
    return choose(two_heads, gpus=4, memory="2.5GB", sequence=511, global_batch=32)  # odd: not cut along


def test_rows_that_fit_come_first_and_the_fastest_before_others(chosen: Choice) -> None:
    fits = [row.fits for row in chosen.rows]
    assert chosen.fits and fits == sorted(fits, reverse=True)
    speeds = [row.estimate.tokens_per_second for row in chosen.rows if row.fits]
    assert speeds == sorted(speeds, reverse=True)
    assert all(row.estimate.peak <= chosen.memory for row in chosen.rows if row.fits)
    assert all(row.estimate.batch * row.accumulate * 4 // row.mesh.get("tp", 1) == 32 for row in chosen.rows)


def test_what_does_not_fit_says_by_how_much_and_what_binds(chosen: Choice) -> None:
    near = chosen.nearest
    assert near is not None and near.missing == near.estimate.peak - chosen.memory > 0
    assert near.binds.startswith("memory: ")


def test_the_choice_is_a_value(chosen: Choice) -> None:
    text = chosen.script()
    compile(text, "script", "exec")
    assert len(text.splitlines()) < 60
    assert chosen.plan.tp_size == chosen.best.mesh.get("tp", 1)
    assert str(chosen.rows[0]) in str(chosen)


@pytest.fixture(scope="module")
def long() -> Choice:
    return choose(_llama(), gpus=2, memory="10GB", sequence=1 << 15, global_batch=2)


def test_a_long_sequence_is_cut(long: Choice) -> None:
    """Where it fits over ranks of cp alone, such a row comes first, and its figures are those of its own tokens."""
    assert long.best.cp > 1 and not any(row.fits for row in long.rows if row.cp == row.tp == 1)
    best = long.best.estimate
    assert best.own_tokens * long.best.cp == best.sequence == 1 << 15
    assert best.tokens == 2 << 15 and f"{best.own_tokens} tokens" in str(long.best)
    assert long.script().count(f"cp_size={long.best.cp}") == 1 and long.plan.cp_size == long.best.cp
    alone = [row for row in long.rows if row.tp == row.estimate.batch == 1 and row.checkpointing is True]
    sizes = sorted({row.cp for row in alone}, reverse=True)  # what holds more than one that does not fit is left out
    smallest = [min(row.estimate.peak for row in alone if row.cp == size) for size in sizes]
    assert len(sizes) > 1 and smallest == sorted(smallest)


@pytest.mark.long
def test_one_micro_batch_may_fit_where_several_do_not() -> None:
    """Gradients of earlier ones wait in float32."""
    asked: dict[str, Any] = {"gpus": 1, "sequence": 32, "global_batch": 2}
    peaks = {n: min(row.estimate.peak for row in choose(_llama(), memory="80GB", **asked).rows if row.accumulate == n)
             for n in (1, 2)}  # fmt: skip
    assert peaks[1] < peaks[2]
    found = choose(_llama(), memory=(peaks[1] + peaks[2]) // 2, **asked)
    assert found.fits and found.best.accumulate == 1


def test_nothing_fits() -> None:
    """What would be enough is: with as many it fits, and with one fewer not."""
    asked: dict[str, Any] = {"memory": "1.55GB", "sequence": 255}  # odd: not cut along
    found = choose(_llama(), gpus=1, **asked)
    assert not found.fits and found.enough is not None and found.enough > 2
    assert found.steps is not None
    sweep = Sweep(found.steps, found.device, found.memory, found.sweep.common)
    for gpus in (found.enough, found.enough - 1):  # as choose() asks, of the same recordings
        assert any(row.fits for row in sweep.rows(gpus, gpus)) == (gpus == found.enough)
    with pytest.raises(autoplan.AutoplanError, match="does not fit 1 GPU"):
        _ = found.best


def test_sizes_that_cannot_be_are_one_error_with_the_nearest() -> None:
    with pytest.raises(autoplan.AutoplanError, match="global batch of 3") as caught:
        choose(_llama(), gpus=16, sequence=128, global_batch=3)
    assert "nearest valid" in str(caught.value)
    with pytest.raises(autoplan.AutoplanError, match="cannot be divided") as caught:
        choose(_llama(), gpus=16, sequence=128, global_batch=5)
    assert "4 or 8" in str(caught.value)


@pytest.mark.parametrize("text", ["much", "0GB", "", "-1GB", "nan", "1e3GB", "1GB2", "80", 80, 0, -5])
def test_what_is_no_size_of_memory(text: Any) -> None:
    with pytest.raises(autoplan.AutoplanError, match="not a size"):
        parse_memory(text)


def test_sizes_of_memory() -> None:
    assert (parse_memory("80GB"), parse_memory("1GiB"), parse_memory(2**20)) == (80 * 10**9, 2**30, 2**20)
    assert (parse_memory("80 gb"), parse_memory("512MiB")) == (80 * 10**9, 512 * 2**20)


@pytest.mark.parametrize(
    "keywords",
    [{"gpus": 0}, {"gpus": 10**6}, {"gpus": True}, {"per_node": 0}, {"per_node": -1}, {"per_node": "8"},
     {"sequence": "x"}, {"sequence": 1}, {"global_batch": -1}, {"global_batch": 2.5}, {"gpu": 3}, {"mp_policy": "x"},
     {"optimizer": None}, {"train": "some"}, {"memory": 1.5}],
    ids=str,
)  # fmt: skip
def test_wrong_arguments_are_one_error(keywords: dict[str, Any]) -> None:
    with pytest.raises(autoplan.AutoplanError):
        choose(_llama(), **{"gpus": 2, **keywords})


def test_a_model_without_blocks_is_chosen_for() -> None:
    found = choose(torch.nn.Sequential(torch.nn.Linear(64, 64)), gpus=2, sequence=16)
    assert found.fits and not any(row.checkpointing for row in found.rows)


def test_a_decoder_is_cut_along_its_sequence_too() -> None:
    config = T5Config(d_model=64, d_ff=128, num_heads=4, num_layers=1, vocab_size=512)
    found = choose(config, gpus=2, sequence=64, global_batch=2)
    assert any(row.sequence_parallel for row in found.rows) and not found.dropped


@pytest.mark.long
def test_what_cannot_be_cut_along_one_of_its_sequences_is_left_out() -> None:
    seen = CLIPVisionConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                            image_size=64, patch_size=16)  # fmt: skip  # 17 tokens of a picture
    text = _llama(hidden_size=256, intermediate_size=512, vocab_size=1024)
    found = choose(LlavaConfig(text_config=text, vision_config=seen, image_token_index=1000), gpus=2, sequence=64)
    assert found.fits and any("sequence parallel" in text for text in found.dropped)


def test_inference_is_chosen_by_weights_and_cache() -> None:
    found = choose(_llama(), gpus=4, memory="8GB", sequence=1024, global_batch=4, train="inference")
    assert found.fits and found.rows[0].estimate.parts.optimizer == 0


def test_the_command_line(tmp_path: Path) -> None:
    _llama(num_hidden_layers=1).save_pretrained(tmp_path)
    arguments = [str(tmp_path), "--gpus", "2", "--memory", "8GB", "--sequence", "255", "--json"]
    ran = CliRunner().invoke(app, ["choose", *arguments])
    data = json.loads(ran.stdout)
    assert ran.exit_code == 0 and data["fits"] and data["rows"][0]["estimate"]["peak_bytes"] < 8e9
    assert data["model"].endswith("LlamaForCausalLM") and data["nearest"] is None and data["dropped"] == []
    alone = [arguments[0], "--gpus", "1", "--sequence", "255"]
    ran = CliRunner().invoke(app, ["choose", *alone, "--memory", "8GB", "--explain", "1"])
    assert ran.exit_code == 0 and "peak: " in ran.stdout
    assert CliRunner().invoke(app, ["choose", *alone, "--memory", "1.2GB"]).exit_code == 1
    ran = CliRunner().invoke(app, ["dryrun", str(tmp_path), "--mesh", "dp_shard=16,tp=4", "--sequence", "64"])
    assert ran.exit_code == 0 and "reduce-scatter" in ran.stdout


def test_a_mesh_of_other_gpus_is_refused_before_any_is_priced() -> None:
    ran = CliRunner().invoke(app, ["choose", "llama", "--gpus", "8", "--like", "dp_shard=3,tp=2"])
    assert isinstance(ran.exception, autoplan.AutoplanError) and "has 6 ranks, for 8 GPUs" in ran.exception.message


@pytest.mark.slow
@pytest.mark.parametrize(("train", "said"), [("full", "step 1 loss"), ("inference", "step 1: (1, 32)")])
def test_the_script_runs(tmp_path: Path, train: str, said: str) -> None:
    config = _llama(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=512)
    config.dtype = torch.float32
    config.save_pretrained(tmp_path)
    found = choose(str(tmp_path), gpus=2, memory="8GB", sequence=32, global_batch=2, per_node=2, train=train)
    program = tmp_path / "train.py"
    program.write_text(found.script())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    where = {"STEPS": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(autoplan.__file__).parents[1])}
    import os

    ran = subprocess.run(command, env={**os.environ, **where}, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert said in ran.stdout and "random ones" in ran.stderr


def test_a_measured_machine_is_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoplan.forecast import devices
    from autoplan.forecast.devices import load_device

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(devices._SIZE, "cpu", 128)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = tmp_path / "mine.toml"
    ran = CliRunner().invoke(app, ["calibrate", "--like", "a100", "-o", str(path)])
    assert ran.exit_code == 0, ran.output
    mine, like = load_device(str(path)), load_device("a100")
    assert 0 < mine.flops["bfloat16"] < like.flops["bfloat16"] and mine.inside == like.inside
    assert choose(_llama(num_hidden_layers=2), gpus=1, memory="8GB", sequence=64, gpu=str(path)).fits


def test_an_audit_says_what_a_rank_needs(tmp_path: Path) -> None:
    _llama(num_hidden_layers=2, hidden_size=256, intermediate_size=512, vocab_size=512).save_pretrained(tmp_path)
    ran = CliRunner().invoke(app, ["audit", str(tmp_path), "--tp", "2", "--memory"])
    assert ran.exit_code == 0, ran.output
    assert "Memory per rank [" in ran.stdout and "communication of a block" in ran.stdout


def test_adapters_are_chosen_for_and_said() -> None:
    found = choose(_llama(), gpus=2, sequence=127, train="lora", lora_rank=8, lora_targets="all-linear")
    assert found.fits and "adapters of rank 8" in str(found)
    assert found.best.estimate.parts.optimizer < found.best.estimate.parts.weights / 10
    for carried_out in (lambda: found.plan, found.script):
        with pytest.raises(autoplan.AutoplanError, match="was assumed for the estimate"):
            carried_out()


@pytest.mark.parametrize(("memory", "batch"), [(1.96, 0), (1.99, 0), (2.0, 48), (2.1, 48), (1.96, 48)])
def test_the_smallest_number_of_gpus_is_the_first_that_is_offered(memory: float, batch: int) -> None:
    """Every smaller number of whole nodes cannot deal the batch, or does not fit; cutting along the sequence counts."""
    found = _of_eight_heads()
    assert found.steps is not None
    sweep = Sweep(found.steps, found.device, int(memory * 1e9), found.sweep.common)
    enough = sweep.enough(4, batch)
    assert enough is not None
    assert [n for n in range(6, enough + 1, 2) if any(row.fits for row in sweep.rows(n, batch or n))] == [enough]


@cache
def _of_eight_heads() -> Choice:
    config = _llama(num_attention_heads=8, num_key_value_heads=8)
    return choose(config, gpus=4, memory="1GB", sequence=2048, per_node=2)


def test_replicas_are_swept_over_all_that_fit() -> None:
    """Parameters lie on ever fewer ranks, with replicas between, until a rank's part does not fit."""
    found = choose(_llama(), gpus=256, memory="2GB", sequence=127, global_batch=256)
    shards = {row.mesh["dp_shard"] for row in found.rows if row.tp == 1 and row.fits}
    assert {256, 128, 64, 32, 16, 8} <= shards and 1 not in shards
    first = found.rows[0].estimate
    assert first.tokens_per_second >= max(row.estimate.tokens_per_second for row in found.rows if row.fits)


def test_weights_that_are_served_may_lie_over_nodes() -> None:
    config = _llama(num_attention_heads=16, num_key_value_heads=16, num_hidden_layers=8)
    found = choose(config, gpus=4, per_node=2, memory="1.4GB", sequence=64, global_batch=4, train="inference")
    assert found.best.tp == 4 and "dp_shard" not in str(found)
    copies = choose(config, gpus=4, per_node=2, memory="8GB", sequence=64, global_batch=4, train="inference")
    assert any("replicated" in str(row) for row in copies.rows)


def test_inference_on_copies_shards_nothing_over_them() -> None:
    found = choose(_llama(), gpus=4, memory="2GB", sequence=64, global_batch=4, train="inference")
    assert found.best.mesh == {"dp_replicate": 4}
    with fake_mesh({"ranks": 4}):
        mesh = found.mesh("cpu")
        model = found.parallelize(found.source.module(), mesh)
    assert not any("FSDP" in type(part).__name__ for part in model.modules())
    text = found.script()
    compile(text, "script", "exec")
    assert len(text.splitlines()) < 60 and "AdamW" not in text and "generate" in text


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (ViTConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2), "pixel_values"),
        (torch.nn.Sequential(torch.nn.Linear(64, 64)), "your own code"),
        (BertConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                    architectures=["BertForSequenceClassification"]), "one label per sequence"),
    ],
    ids=["pictures", "a module", "classes"],
)  # fmt: skip
def test_what_no_script_is_written_for(model: Any, why: str) -> None:
    found = choose(model, gpus=1, sequence=16)
    with pytest.raises(autoplan.AutoplanError, match=why):
        found.script()


def test_rows_that_the_estimate_cannot_tell_apart_are_a_tie(chosen: Choice) -> None:
    first = chosen.rows[0]
    slower = replace(first.estimate, tokens=int(first.estimate.tokens * 0.95))
    much_slower = replace(first.estimate, tokens=int(first.estimate.tokens * 0.8))
    rows = (first, replace(first, estimate=slower), replace(first, estimate=much_slower))
    assert [row.ties(first) for row in rows] == [True, True, False]
    said = str(replace(chosen, rows=rows))
    assert "2 configurations are within 10% of the fastest" in said and "\n2= " in said and "\n3  " in said


def test_a_row_that_fits_only_without_its_bar_is_marked(chosen: Choice) -> None:
    row = chosen.rows[0]
    peak, overhead = row.estimate.peak, row.estimate.parts.overhead
    assert row.narrow(peak) and not row.narrow(int(peak + 0.06 * (peak - overhead)))
    assert "?: it fits by less than" in str(replace(chosen, memory=peak))
    short = replace(row, fits=False, missing=5)
    assert "it needs 1 MiB more" in str(replace(chosen, rows=(short,)))


def test_a_sequence_over_fewer_ranks_is_told_from_two_recordings() -> None:
    """16 heads, 4 of keys: over 16, 8 and 4 ranks each holds one head of keys, over 2 it holds two."""
    steps = Steps(resolve(_llama(num_attention_heads=16, num_key_value_heads=4)))
    asked = Asked((("dp_shard", 1), ("cp", 16)), sequence=2048, exact=False, activation_checkpointing=True)
    device = load_device("h100")

    def over(ranks: int, exact: bool = False) -> tuple[Estimate, int]:
        mesh = (("dp_shard", 16 // ranks), ("cp", ranks))
        return estimate_with(steps, replace(asked, mesh=mesh, exact=exact), device), len(steps.known)

    assert [over(ranks)[1] for ranks in (16, 8, 4, 2)] == [1, 2, 2, 3]
    told, _ = over(4)
    recorded, number = over(4, exact=True)
    assert number == 4
    assert told.peak == pytest.approx(recorded.peak, rel=0.01) and told.flops == pytest.approx(recorded.flops, rel=0.01)
    assert told.tokens_per_second == pytest.approx(recorded.tokens_per_second, rel=0.01)
    assert [(sent.dim, sent.kind, sent.number) for sent in told.messages] == [
        (sent.dim, sent.kind, sent.number) for sent in recorded.messages
    ]


def test_over_cp_only_what_can_pay_is_looked_at() -> None:
    """Without a large vocabulary tp adds nothing to cp; without checkpointing it does not fit over 4 ranks, nor 2."""
    wide = _llama(vocab_size=512, num_hidden_layers=12)
    rows = choose(wide, gpus=4, memory="5.4GB", sequence=1 << 15, global_batch=4).rows
    over = {size: [row for row in rows if (row.tp, row.cp) == size] for size in ((1, 4), (2, 2), (1, 2))}
    alone = [row for row in over[1, 4] if row.estimate.batch == 1 and row.checkpointing is True]
    assert {(row.checkpointing, row.estimate.batch) for row in over[2, 2]} == {(True, 1)}
    assert all(row.estimate.peak < over[2, 2][0].estimate.peak for row in alone)
    assert all(row.estimate.tokens_per_second > over[2, 2][0].estimate.tokens_per_second for row in alone)
    assert not any(row.fits for row in over[1, 4] if not row.checkpointing)
    assert all(row.checkpointing for row in over[1, 2])


def test_what_estimate_is_asked_is_asked_of_all_rows() -> None:
    """Each row is that estimate; what parallelize takes of it is among its options and in the script."""
    asked: dict[str, Any] = {"mp_policy": "bf16", "cpu_offload": True}
    found = choose(_llama(), gpus=2, sequence=64, global_batch=2, **asked)
    best = found.best.estimate
    alone = autoplan.estimate(_llama(), mesh=dict(best.mesh), sequence=64, batch=best.batch, device=found.device,
                              **asked,
                              activation_checkpointing=found.best.checkpointing, accumulate=found.best.accumulate,
                              reshard_after_forward=found.best.reshard)  # fmt: skip
    assert (best.parts, best.tokens_per_second) == (alone.parts, alone.tokens_per_second)
    assert best.parts.optimizer == 0 and "offloaded to the host" in found.how
    assert found.options() | asked == found.options()
    assert "mp_policy='bf16', cpu_offload=True" in found.script()
    own = choose(_llama(), gpus=1, sequence=64, loss=lambda outputs, labels: outputs.logits.float().sum())
    with pytest.raises(autoplan.AutoplanError, match="not a loss of your own"):
        own.script()


def test_concurrent_sequences_are_dealt_over_the_copies() -> None:
    asked: dict[str, Any] = {"train": "inference", "cache_dtype": "fp8", "sequence": 64}
    found = choose(_llama(), gpus=2, concurrency=64, global_batch=2, **asked)
    assert {(row.tp, row.estimate.batch, row.estimate.concurrency) for row in found.rows} == {(1, 1, 32), (2, 2, 64)}
    alone = autoplan.estimate(_llama(), mesh="tp=2", batch=2, concurrency=64, **asked)
    (row,) = (row for row in found.rows if row.tp == 2)
    assert (row.estimate.parts.cache, row.estimate.decoded_per_second) == (
        alone.parts.cache, alone.decoded_per_second)  # fmt: skip
    assert "64 sequences held at once, 2 prompts read at a time" in str(found)
    with pytest.raises(autoplan.AutoplanError, match="concurrency=1 with global_batch=2"):
        choose(_llama(), gpus=2, concurrency=1, global_batch=2, **asked)
    with pytest.raises(autoplan.AutoplanError, match="a cache dtype with train='full'"):
        choose(_llama(), gpus=2, cache_dtype="fp8")
    with pytest.raises(autoplan.AutoplanError, match="concurrency=4 with train='full'"):
        autoplan.estimate(_llama(), mesh="dp_shard=2", concurrency=4)

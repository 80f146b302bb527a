"""Dry runs: the whole step of the sharded model at its size, in every way that it can be sharded, counts what an
estimate counts, and each rank runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from adapters import with_adapters
from slow_cases import marked
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig
from typer.testing import CliRunner

import autoplan
from autoplan.cli.app import app
from autoplan.forecast.asked import Asked, mesh_sizes
from autoplan.forecast.devices import load_device
from autoplan.forecast.dry_run import DryRun, dry_run
from autoplan.forecast.estimate import estimate_with
from autoplan.forecast.step import Steps
from autoplan.hf.source import resolve

BATCH, LENGTH = 2, 64
LLAMA = LlamaConfig(hidden_size=1024, intermediate_size=3584, num_hidden_layers=4, num_attention_heads=16,
                    num_key_value_heads=8, vocab_size=32000, dtype=torch.bfloat16)  # fmt: skip
MIXTRAL = MixtralConfig(hidden_size=1024, intermediate_size=1792, num_hidden_layers=4, num_attention_heads=16,
                        num_key_value_heads=8, vocab_size=32000, num_local_experts=8, dtype=torch.bfloat16)  # fmt: skip


def _adapted() -> nn.Module:
    with torch.device("meta"):
        return with_adapters(AutoModelForCausalLM.from_config(LLAMA, dtype=LLAMA.dtype))


CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "along the sequence": (LLAMA, "dp_shard=4,tp=4", {"sequence_parallel": True}),
    "along the sequence, again": (LLAMA, "tp=4", {"sequence_parallel": True, "activation_checkpointing": True}),
    "replicas": (LLAMA, "dp_replicate=2,dp_shard=4,tp=2", {"activation_checkpointing": "selective"}),
    "a cut sequence": (LLAMA, "dp_shard=2,cp=2", {}),
    "replicas of a cut sequence": (LLAMA, "dp_replicate=2,dp_shard=2,cp=2", {"activation_checkpointing": "selective"}),
    "a cut sequence beside tp": (LLAMA, "dp_shard=2,cp=2,tp=2", {}),
    "a cut sequence alone": (LLAMA, "cp=4", {"activation_checkpointing": True}),
    "experts apart": (MIXTRAL, "dp_shard=4,tp=4", {"ep_size": 4}),
    "experts alone": (MIXTRAL, "dp_shard=2,ep=4", {}),
    "experts apart, along the sequence": (MIXTRAL, "dp_shard=2,tp=4", {"ep_size": 4, "sequence_parallel": True}),
    "adapters": (_adapted, "dp_shard=4,tp=4", {"activation_checkpointing": True}),
    "adapters, along the sequence": (_adapted, "dp_shard=2,tp=4", {"sequence_parallel": True}),
}
STEPS: dict[int, Steps] = {}


@pytest.mark.parametrize(
    "name",
    marked(
        CASES,
        long=["adapters", "a cut sequence alone"],
        slow=[
            "replicas of a cut sequence",
            "along the sequence, again",
            "experts alone",
            "experts apart, along the sequence",
        ],
    ),
)
def test_it_counts_what_an_estimate_counts(name: str) -> None:
    model, mesh, options = CASES[name]
    built = model() if callable(model) else model
    found = dry_run(built, mesh=mesh, rank=1, batch=BATCH, sequence=LENGTH, **options)
    steps = Steps(resolve(built)) if callable(model) else STEPS.setdefault(id(model), Steps(resolve(built)))
    rest = {key: value for key, value in options.items() if key != "ep_size"}
    asked = Asked(mesh_sizes(mesh), BATCH, LENGTH, experts=options.get("ep_size", 1) > 1, **rest)
    counted = estimate_with(steps, asked, load_device("h100"))
    assert {(s.dim, s.kind): (s.number, s.bytes) for s in found.sent} == {
        (s.dim, s.kind): (s.number, s.bytes) for s in counted.messages
    }
    assert found.parameters == counted.parts.weights - sum(
        one.numel() * one.element_size() for one in steps.module.buffers()
    )
    assert 0 < found.gradients <= found.parameters


def test_every_rank_runs_and_holds_its_piece() -> None:
    uneven = LlamaConfig(**{**LLAMA.to_dict(), "vocab_size": 32003, "num_hidden_layers": 2})
    found: list[DryRun] = [dry_run(uneven, mesh="dp_shard=2,tp=4", rank=rank, sequence=16) for rank in (0, 3, 7)]
    assert [one.rank for one in found] == [0, 3, 7]
    assert {dict(one.outputs)["logits"] for one in found} == {(1, 16, 32003)}
    assert found[2].parameters < found[0].parameters  # the last ranks hold fewer rows


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"mesh": "tp=2,tp=2"}, "could all be"),
        ({"mesh": "pp=2"}, "not supported in estimates"),
        ({"mesh": "tp=2,ep=2"}, "'ep'"),
        ({"mesh": "dp_replicate=2"}, "no dim to shard over"),
        ({"mesh": {}}, "no dims"),
        ({"mesh": "foo=2"}, "no known purpose"),
        ({"mesh": "dp_shard=100000"}, "100000 ranks"),
        ({"mesh": "tp=２"}, "must be a whole number"),
        ({"mesh": "cp=2,dp_shard=2"}, "separate dims"),
        ({"rank": "x"}, "rank is"),
        ({"rank": 9}, "no rank 9"),
        ({"batch": "x"}, "batch is"),
        ({"sequence": 1}, "two tokens"),
        ({"plan": 3}, "plan is 3"),
        ({"ep_size": 3}, "ep_size=3"),
    ],
)
def test_what_cannot_be_is_refused(keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(autoplan.AutoplanError, match=said):
        dry_run(LLAMA, **{"mesh": "dp_shard=2,tp=2", **keywords})


def test_products_of_experts_need_rows_of_16_bytes_in_their_dtype() -> None:
    config = MixtralConfig(**{**MIXTRAL.to_dict(), "intermediate_size": 96, "num_hidden_layers": 1})
    how: dict[str, Any] = {"mesh": "tp=8", "sequence": 16}
    assert autoplan.estimate(config, weights="float32", **how).peak > 0
    with pytest.raises(autoplan.AutoplanError, match=r"12 numbers wide on a rank; grouped_mm takes multiples of 8"):
        autoplan.estimate(config, weights="bfloat16", **how)


def test_the_command_line_takes_experts_and_ranks(tmp_path: Any) -> None:
    MixtralConfig(
        **{**MIXTRAL.to_dict(), "num_hidden_layers": 2, "architectures": ["MixtralForCausalLM"]}
    ).save_pretrained(tmp_path)
    options = ["--mesh", "dp_shard=2,tp=2", "--ep", "2", "--sequence", "16"]
    ran = CliRunner().invoke(app, ["dryrun", str(tmp_path), *options, "--rank", "3"])
    assert ran.exit_code == 0 and "as rank 3 of" in ran.stdout, ran.output
    assert "model.layers.*." in ran.stdout and "model.layers.1." not in ran.stdout  # alike in all layers: one line
    ran = CliRunner().invoke(app, ["estimate", str(tmp_path), *options])
    assert ran.exit_code == 0 and "peak: " in ran.stdout, ran.output
    ran = CliRunner().invoke(app, ["estimate", str(tmp_path), "--cp", "2", "--sequence", "16", "--json"])
    found = json.loads(ran.stdout)
    assert found["mesh"] == {"dp_shard": 1, "cp": 2} and found["tokens_of_a_rank"] == 8
    ran = CliRunner().invoke(app, ["estimate", str(tmp_path), "--tp", "2", "--sequence", "16", "--json"])
    assert json.loads(ran.stdout)["mesh"] == {"tp": 2}
    ran = CliRunner().invoke(app, ["estimate", str(tmp_path), "--sequence", "16", "--json"])
    assert json.loads(ran.stdout)["mesh"] == {"tp": 1}
    for wrong in (["--mesh", "dp_shard=2,cp=2", "--cp", "4"], ["--cp", "2", "--train", "inference"],
                  ["--mesh", "dp_shard=2", "--tp", "2"]):  # fmt: skip
        refused = CliRunner().invoke(app, ["estimate", str(tmp_path), *wrong]).exception
        assert isinstance(refused, autoplan.AutoplanError | SystemExit)


def test_a_dry_run_says_what_a_rank_needs() -> None:
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=4, vocab_size=1024)  # fmt: skip
    found = dry_run(config, mesh="dp_shard=2,tp=2", sequence=128)
    assert found.states == 2 * found.parameters
    assert found.peak is not None and found.peak > found.parameters + found.states


@pytest.mark.long
def test_activations_of_a_long_sequence_are_shared_out() -> None:
    """One block of a 70B at 131,072 tokens: what it keeps over eight ranks of cp is a seventh at most."""
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=1,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=256,
        max_position_embeddings=1 << 17,
        dtype=torch.bfloat16,
    )
    one, eight = (autoplan.estimate(config, mesh=f"dp_shard=1,cp={cp}", sequence=1 << 17).parts for cp in (1, 8))
    assert 7 * eight.kept <= one.kept
    assert 7 * (eight.kept + eight.temporary + eight.communication) <= one.kept + one.temporary + one.communication

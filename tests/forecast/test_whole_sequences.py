"""What a rank of cp holds of whole sequences: no stream, and values of sequence × sequence only where it is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import BloomConfig, LlamaConfig, Mamba2Config, PretrainedConfig

import autoplan
from autoplan.forecast.devices import load_device
from autoplan.forecast.dry_run import dry_run
from autoplan.forecast.recording import record

HIDDEN, LENGTH = 96, 1000
H100 = load_device("h100")
LLAMA = LlamaConfig(hidden_size=HIDDEN, intermediate_size=344, num_hidden_layers=2, num_attention_heads=8,
                    num_key_value_heads=4, vocab_size=512, dtype=torch.bfloat16)  # fmt: skip
MAMBA = Mamba2Config(hidden_size=HIDDEN, num_hidden_layers=2, head_dim=8, num_heads=24, n_groups=4, state_size=16,
                     vocab_size=512, chunk_size=32, dtype=torch.bfloat16)  # fmt: skip
BLOOM = BloomConfig(hidden_size=HIDDEN, n_layer=2, n_head=8, vocab_size=512, dtype=torch.bfloat16)


def eager(config: PretrainedConfig) -> PretrainedConfig:
    config = type(config)(**config.to_dict())
    config._attn_implementation = "eager"
    return config


@pytest.mark.parametrize("config", [LLAMA, pytest.param(MAMBA, marks=pytest.mark.long)], ids=["llama", "mamba2"])
def test_no_rank_ever_holds_the_whole_stream(config: PretrainedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []

    def noting(log: Any, tensor: torch.Tensor, collective: bool, as_it_is: Any = record._Log.made) -> None:
        made.append(tuple(tensor.shape))
        as_it_is(log, tensor, collective)

    monkeypatch.setattr(record._Log, "made", noting)
    found = {}
    for ranks in (1, 4):
        made.clear()
        mesh = "dp_shard=1" if ranks == 1 else f"dp_shard=1,cp={ranks}"
        dry_run(config, mesh=mesh, sequence=LENGTH)
        found[ranks] = [shape for shape in made if {HIDDEN, LENGTH} <= set(shape)]
    assert found[1] and not found[4]


def test_a_plan_names_what_is_sequence_by_sequence() -> None:
    plan = autoplan.plan(BLOOM, cp_size=2, prove="none")
    found = {finding.where: finding for finding in plan.findings if finding.kind == "pairs"}
    assert set(found) == {"transformer", "transformer.h.*.self_attention"}
    text = found["transformer.h.*.self_attention"].message
    assert text.startswith("softmax in line") and "holds 16 bytes for each pair" in text  # four heads, in float32
    beside = autoplan.plan(BLOOM, tp_size=2, cp_size=2, prove="none")
    assert any("holds 8 bytes for each pair" in finding.message for finding in beside.findings)
    assert not [finding for finding in autoplan.plan(BLOOM, tp_size=2).findings if finding.kind == "pairs"]
    fused = autoplan.plan(LLAMA, cp_size=2, prove="none")
    assert [finding.where for finding in fused.findings if finding.kind == "pairs"] == ["model"]  # a mask


def test_an_estimate_says_its_bytes_or_refuses_it() -> None:
    mesh = "dp_shard=1,cp=2"
    said = [one for one in autoplan.estimate(BLOOM, mesh=mesh, sequence=LENGTH).notes if "sequence × sequence" in one]
    assert len(said) == 2 and "in this step 15.3 MiB" in said[1]  # four heads in float32
    small = replace(H100, memory=4 * LENGTH**2 * 4 - 1)
    with pytest.raises(autoplan.AutoplanError, match=r"self_attention: softmax in line \d+ .* and the device has"):
        autoplan.estimate(BLOOM, mesh=mesh, sequence=LENGTH, device=small)
    autoplan.estimate(BLOOM, mesh=mesh, sequence=LENGTH, device=replace(small, memory=small.memory + 1))
    fused, by_hand = (autoplan.estimate(config, mesh=mesh, sequence=LENGTH).notes for config in (LLAMA, eager(LLAMA)))
    assert not [text for text in fused if "sequence × sequence" in text]  # nor is a mask made, without padding
    assert len([text for text in by_hand if "sequence × sequence" in text]) == 2


def test_a_dry_run_says_what_it_held() -> None:
    fused, by_hand = (dry_run(config, mesh="dp_shard=1,cp=2", sequence=LENGTH) for config in (LLAMA, eager(LLAMA)))
    assert not [text for text in fused.notes if "sequence × sequence" in text]
    assert any("model.layers.*.self_attn: " in text and "in this step" in text for text in by_hand.notes)


@pytest.mark.long
def test_a_choice_says_so() -> None:
    chosen = autoplan.choose(BLOOM, gpus=2, sequence=1 << 15)
    (row,) = [row for row in chosen.rows if row.mesh.get("cp") == 2][:1]
    assert any("self_attention" in text and "in this step 16.0 GiB" in text for text in row.estimate.notes)

"""Sizes come from the question: example inputs say the kinds of arguments, and what cannot be scaled is said."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import BertConfig, GPT2Config, GptOssConfig, LlamaConfig, MixtralConfig, ViTConfig

import autoplan
from autoplan.emit.tables.estimate_table import dry_run_to_dict, dry_run_view
from autoplan.forecast.choose import estimated_sizes
from autoplan.forecast.devices import load_device
from autoplan.forecast.dry_run import dry_run
from autoplan.hf.inputs.step import resized, size_of

CONFIG = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=4, vocab_size=1024, dtype=torch.bfloat16)  # fmt: skip


def test_a_step_with_example_inputs_is_as_large_as_asked() -> None:
    keywords: dict[str, Any] = {"mesh": "tp=2", "batch": 3, "sequence": 96}
    inputs = {"input_ids": torch.ones(1, 64, dtype=torch.long), "attention_mask": torch.ones(1, 64, dtype=torch.long)}
    plain, given = (autoplan.estimate(CONFIG, **keywords, inputs=one) for one in (None, inputs))
    assert (given.batch, given.sequence, given.tokens) == (3, 96, 3 * 96)
    assert given.flops == pytest.approx(plain.flops, rel=0.01) and not given.notes
    text = next(row for row in autoplan.choose(CONFIG, gpus=1, sequence=96, inputs=inputs).rows)
    assert text.estimate.sequence == 96


def test_arguments_are_made_longer_and_shorter() -> None:
    inputs = {"input_ids": torch.arange(12).view(2, 6), "mask": torch.ones(2, 1, 6, 6), "scale": torch.ones(3),
              "position_ids": torch.arange(6).view(1, 6), "pixel_values": torch.ones(2, 3, 8, 6),
              "flag": True}  # fmt: skip
    assert size_of(inputs) == (2, 6)
    larger = {name: tuple(value.shape) for name, value in resized(inputs, 4, 9).items() if name != "flag"}
    assert larger == {"input_ids": (4, 9), "mask": (4, 1, 9, 9), "scale": (3,), "position_ids": (1, 9),
                      "pixel_values": (4, 3, 8, 6)}  # fmt: skip
    assert resized(inputs, 1, 4)["input_ids"].tolist() == [[0, 1, 2, 3]]


class Readout(nn.Module):
    """Takes no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


def readout() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Readout(), {"x": torch.ones(2, 64)}


def test_what_has_no_tokens_is_priced_in_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "readout_of_tests", sys.modules[__name__])
    found = autoplan.estimate("readout_of_tests:readout", mesh="dp_shard=2", batch=16, sequence=8192)
    assert (found.batch, found.sequence, found.tokens) == (16, 0, 32)
    said = " ".join(str(found).split())
    assert "micro-batch 16 samples" in said and "samples per second" in said and "sequence=8192 has no effect" in said
    pictures = ViTConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)
    chosen = autoplan.choose(pictures, gpus=2, global_batch=8)
    assert chosen.elsewhere and "tokens/s" not in str(chosen)


def test_a_sequence_without_positions_is_one_error() -> None:
    """A table of 128 positions; rotary ones have none."""
    learned = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=512, n_positions=128)
    assert autoplan.estimate(learned, mesh="tp=1", sequence=128).peak
    with pytest.raises(autoplan.AutoplanError, match="table of 128 positions"):
        autoplan.estimate(learned, mesh="tp=1", sequence=129)
    with pytest.raises(autoplan.AutoplanError, match="table of 128 positions"):
        autoplan.choose(learned, gpus=2, sequence=256)
    rotary = LlamaConfig(**{**CONFIG.to_dict(), "max_position_embeddings": 128})
    within, past = (autoplan.estimate(rotary, mesh="tp=1", sequence=n) for n in (128, 256))
    assert past.peak > within.peak and not within.notes
    assert past.notes == ("256 tokens exceed the config's 128 positions: it runs, but was not trained for that",)


def test_the_header_says_all_that_was_asked() -> None:
    """And a note what has no part in such a step."""
    asked: dict[str, Any] = {"mesh": "dp_shard=4", "sequence": 64, "device": "h100"}
    found = autoplan.estimate(CONFIG, **asked, accumulate=4, activation_checkpointing=True, mp_policy="bf16",
                              reshard_after_forward=False, matmuls="fp8", chunked_loss=True)  # fmt: skip
    said = ("4 micro-batches a step", "checkpointing blocks", "computed in bfloat16", "no reshard after forward",
            "a loss in chunks", "matmuls in fp8")  # fmt: skip
    assert found.how == said and ", ".join(said) in " ".join(str(found).split()) and not found.notes
    assert found.to_dict()["how"] == list(said) and not autoplan.estimate(CONFIG, **asked).how
    still = autoplan.estimate(CONFIG, **asked, train="inference", optimizer="muon", activation_checkpointing=True,
                              mp_policy="bf16", reshard_after_forward=False)  # fmt: skip
    assert not still.how and [note for note in still.notes if note.startswith("no effect: ")] == [
        f"no effect: {what}: nothing is trained"
        for what in ("optimizer=muon", "checkpointing", "mixed precision", "reshard_after_forward")
    ]
    alone = autoplan.estimate(CONFIG, mesh="tp=2", sequence=64, mp_policy="bf16", sequence_parallel=True)
    assert alone.how == ("sequence parallel",)
    assert alone.notes == ("no effect: mixed precision: the mesh has no dim of data parallelism",)


def test_parallelism_that_the_plan_does_not_apply_is_not_in_the_header() -> None:
    """Experts of a dense model: in an estimate and in a dry run."""
    asked: dict[str, Any] = {"mesh": "tp=2", "sequence": 64, "ep_size": 2}
    for found in (autoplan.estimate(CONFIG, **asked), dry_run(CONFIG, **asked)):
        assert not found.how
        (note,) = found.notes
        assert note.startswith("no effect: expert parallelism was requested but is not applied")


def test_a_dry_run_says_its_question() -> None:
    rotary = LlamaConfig(**{**CONFIG.to_dict(), "max_position_embeddings": 32})
    ran = dry_run(rotary, mesh="dp_shard=2,tp=2", sequence=64, activation_checkpointing=True)
    shown = io.StringIO()
    Console(file=shown, width=300).print(dry_run_view(ran))
    assert "dp_shard 2 × tp 2: micro-batch 1 × 64 tokens, weights in bfloat16" in shown.getvalue()
    assert ", checkpointing blocks" in shown.getvalue() and "note: 64 tokens exceed" in shown.getvalue()
    assert dry_run_to_dict(ran)["notes"] == list(ran.notes) and len(ran.notes) == 1


def test_other_sizes_are_planned_as_the_plan_is() -> None:
    """With sequence parallelism, and over the ranks of cp as well."""
    made = autoplan.plan(CONFIG, tp_size=2, sequence_parallel=True, prove="none")
    sizes = estimated_sizes(CONFIG, made, load_device("h100"))
    assert {tp for tp, one in sizes.plans.items() if one.sequence_parallel} == set(sizes.plans) - {1}
    cut = autoplan.plan(CONFIG, tp_size=2, cp_size=2, prove="none")
    (found,) = estimated_sizes(CONFIG, cut, load_device("h100")).estimates.values()
    assert found.mesh == (("dp_shard", 1), ("cp", 2), ("tp", 2))


def test_a_choice_says_what_it_was_asked_of_all_rows() -> None:
    choice = autoplan.choose(CONFIG, gpus=2, sequence=64, global_batch=4, optimizer="lion", matmuls="fp8")
    assert choice.how == ("4 sequences a step", "matmuls in fp8")
    assert "lion, 4 sequences a step, matmuls in fp8" in " ".join(str(choice).split())
    still = autoplan.choose(CONFIG, gpus=1, sequence=64, train="inference", optimizer="lion", mp_policy="bf16")
    assert still.how == ("1 sequence held at once",)
    assert still.notes[:2] == tuple(
        f"no effect: {what}: nothing is trained" for what in ("optimizer=lion", "mixed precision")
    )


def test_who_keeps_no_keys_is_not_served() -> None:
    """A classifier decodes nothing."""
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    config.architectures = ["BertForSequenceClassification"]
    found = autoplan.estimate(config, mesh="tp=1", sequence=64, train="inference")
    assert not found.decoded_per_second and "decoding" not in str(found)
    with pytest.raises(autoplan.AutoplanError, match="concurrency=8: .* has no cache of keys and values"):
        autoplan.estimate(config, mesh="tp=1", sequence=64, train="inference", concurrency=8)


@pytest.mark.parametrize("asked", [{"lora_rank": 64}, {"lora_targets": "q_proj"}, {"lora_dropout": 0.1}])
def test_adapters_of_a_step_that_trains_something_else_are_one_error(asked: dict[str, Any]) -> None:
    with pytest.raises(autoplan.AutoplanError, match=f"{next(iter(asked))} with train='full'"):
        autoplan.estimate(CONFIG, mesh="tp=1", **asked)
    with pytest.raises(autoplan.AutoplanError, match=f"{next(iter(asked))} with train='inference'"):
        autoplan.choose(CONFIG, gpus=1, train="inference", **asked)


def test_a_format_that_is_asked_for_is_not_that_of_all_else() -> None:
    """Its header says who says the dtype of what is not quantised; a format of another model is refused as asked."""
    trained = autoplan.estimate(CONFIG, mesh="tp=1", sequence=64, weights="nf4")
    assert trained.weights_text == "weights in bfloat16 (from the config)"
    still = autoplan.estimate(CONFIG, mesh="tp=1", sequence=64, weights="nf4", train="inference")
    assert still.weights_text.endswith("others in bfloat16 (from the config)") and "nf4" in still.weights_text
    with pytest.raises(autoplan.AutoplanError, match="'mxfp4' .* applies to no weight of LlamaForCausalLM"):
        autoplan.estimate(CONFIG, mesh="tp=1", sequence=64, weights="mxfp4")


def test_seconds_of_messages_are_of_the_dim_that_sends_them() -> None:
    found = autoplan.estimate(CONFIG, mesh="dp_replicate=4,dp_shard=1", sequence=64)
    assert {sent.dim for sent in found.messages} == {"dp_replicate"}
    assert found.time is not None and [dim for dim, _ in found.time.exposed] == ["dp_replicate"]


@pytest.mark.parametrize("length", [65_536, 131_072])
def test_long_sequences_can_be_asked(length: int) -> None:
    """Of a wide model that takes an encoder's states as well, which a step does not need; nor does it a mask of all
    pairs of tokens, where each row is one sequence."""
    wide = GPT2Config(n_embd=4096, n_layer=2, n_head=32, vocab_size=512, n_positions=131_072, resid_pdrop=0.0,
                      embd_pdrop=0.0, attn_pdrop=0.0, dtype=torch.bfloat16)  # fmt: skip
    asked: dict[str, Any] = {"mesh": "dp_shard=8", "activation_checkpointing": True}
    found, half = (autoplan.estimate(wide, sequence=n, **asked) for n in (length, length // 2))
    assert found.sequence == length and half.peak < found.peak < 2 * half.peak


def test_what_is_offloaded_is_not_on_the_device() -> None:
    keywords: dict[str, Any] = {"mesh": "dp_shard=4", "sequence": 64}
    plain, offloaded = (autoplan.estimate(CONFIG, **keywords, cpu_offload=one) for one in (False, True))
    assert offloaded.parts.optimizer == 0 and offloaded.parts.weights < plain.parts.weights / 10
    assert offloaded.time is not None and plain.time is not None and offloaded.time.total > plain.time.total
    assert "the host" in dict(offloaded.time.exposed) and "cpu_offload" in "".join(offloaded.notes)
    with pytest.raises(autoplan.AutoplanError, match="cpu_offload"):
        autoplan.estimate(CONFIG, mesh="tp=2", cpu_offload=True)


def test_what_the_same_tokens_cost_ranks_of_experts_is_said() -> None:
    config = MixtralConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=4, vocab_size=1024, num_local_experts=4,
                           dtype=torch.bfloat16)  # fmt: skip
    note = next(text for text in autoplan.estimate(config, mesh="ep=4", sequence=64).notes if "same tokens" in text)
    times = float(note.rpartition(" times, ")[2].split(" times")[0])
    assert 1 < times <= 4


def test_attention_without_sdpa_is_priced_as_the_kernel_that_its_class_takes() -> None:
    """Eager attention keeps all scores: four times as much at twice the length."""
    config = GptOssConfig(hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=16,
                          num_key_value_heads=2, head_dim=64, num_local_experts=4, num_experts_per_tok=2,
                          vocab_size=512, dtype=torch.bfloat16)  # fmt: skip
    short, long = (autoplan.estimate(config, mesh="tp=2", sequence=n) for n in (512, 1024))
    assert long.parts.kept / short.parts.kept < 2.2 and "flash attention" in "".join(long.notes)

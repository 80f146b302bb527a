"""Estimates held against torch's own tracker, against published figures, and against what cannot be."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from adapters import with_adapters
from memory_referee import tracked_peak
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    CLIPVisionConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    MixtralConfig,
    T5Config,
)

import autoplan
from autoplan import planning
from autoplan.forecast.asked import Asked, mesh_sizes
from autoplan.forecast.devices import device_names, load_device
from autoplan.forecast.estimate import estimate_with
from autoplan.forecast.step import Setting, Steps, inputs_of
from autoplan.forecast.trained import Adapted
from autoplan.forecast.trained import with_adapters as adapters_beside
from autoplan.hf.inputs.guesses import labels_of
from autoplan.hf.source import resolve

H100 = load_device("h100")


def llama(**sizes: Any) -> LlamaConfig:
    known = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}  # fmt: skip
    return LlamaConfig(**known | sizes, dtype=torch.bfloat16)


MIXTRAL = MixtralConfig(hidden_size=1024, intermediate_size=3584, num_hidden_layers=4, num_attention_heads=16,
                        num_key_value_heads=8, vocab_size=32000, num_local_experts=8, dtype=torch.bfloat16)  # fmt: skip
T5 = T5Config(d_model=512, d_ff=2048, num_heads=8, num_layers=4, vocab_size=8192, dtype=torch.bfloat16)


LLAMA = llama()


@cache
def llama_steps() -> Steps:
    """What is planned for one case is there for the next."""
    return Steps(resolve(LLAMA))


def adapted(config: Any) -> nn.Module:
    with torch.device("meta"):
        return with_adapters(AutoModelForCausalLM.from_config(config, dtype=config.dtype))


@pytest.mark.parametrize(
    ("config", "mesh", "options"),
    [
        (LLAMA, {"tp": 4}, {}),
        (LLAMA, {"dp_shard": 4, "tp": 4}, {"activation_checkpointing": True}),
        pytest.param(
            LLAMA, {"dp_shard": 8, "tp": 2}, {"activation_checkpointing": "selective"}, marks=pytest.mark.long
        ),
        pytest.param(
            MIXTRAL, {"dp_shard": 4, "tp": 4}, {"activation_checkpointing": "submodule"}, marks=pytest.mark.slow
        ),
        pytest.param(T5, {"dp_shard": 2, "tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param(
            adapted(MIXTRAL),
            {"dp_shard": 4, "tp": 4},
            {"activation_checkpointing": "submodule"},
            marks=pytest.mark.long,
        ),
    ],
    ids=["llama tp", "llama blocks again", "llama selective", "mixtral submodules", "t5", "mixtral adapters"],
)
def test_peak_memory_is_within_five_percent_of_torchs_tracker(
    config: Any, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    steps = llama_steps() if config is LLAMA else Steps(resolve(config))
    asked = Asked(tuple(mesh.items()), 1, 512, **options, updates=False)
    found = estimate_with(steps, asked, H100)
    tracked = tracked_peak(steps, mesh, options, 1, 512)
    assert found.peak - found.parts.overhead == pytest.approx(tracked, rel=0.05)


def test_a_gathered_head_is_a_message_of_two_gigabytes() -> None:
    steps = Steps(resolve(llama(num_hidden_layers=32)))
    mesh = mesh_sizes("dp_shard=2,tp=4")
    split, gathered = (estimate_with(steps, Asked(mesh, 2, 4096, gather_logits=whole), H100) for whole in (False, True))
    whole = next(s for s in gathered.messages if s.dim == "tp" and s.kind == "all-gather")
    assert whole.bytes == 2 * 4096 * 128256 * 2
    assert not [s for s in split.messages if s.dim == "tp" and s.kind == "all-gather"]


def test_memory_of_a_batch_is_read_off_two_smaller_ones() -> None:
    steps = Steps(resolve(llama(num_hidden_layers=2)))
    for checkpointing in (False, True):
        asked = {"mesh": mesh_sizes("dp_shard=2,tp=2"), "batch": 4, "sequence": 256}
        exact = estimate_with(steps, Asked(**asked, activation_checkpointing=checkpointing), H100)  # type: ignore[arg-type]
        scaled = estimate_with(steps, Asked(**asked, activation_checkpointing=checkpointing, exact=False), H100)  # type: ignore[arg-type]
        assert scaled.peak == pytest.approx(exact.peak, rel=0.03)
        assert scaled.flops == pytest.approx(exact.flops, rel=0.01)


def test_left_out_blocks_count() -> None:
    """Twelve layers, of which three are recorded, and all twelve recorded: the same."""
    few, many = (llama(num_hidden_layers=n, hidden_size=512, intermediate_size=1024, vocab_size=1024) for n in (12, 13))
    asked = Asked(mesh_sizes("dp_shard=2,tp=2"), 2, 256, activation_checkpointing=True, updates=False)
    one, other = (estimate_with(Steps(resolve(config)), asked, H100) for config in (few, many))
    layer = other.flops - one.flops
    assert layer * 12 < one.flops < layer * 12 + 16 * 2 * 256 * 512 * 1024
    assert other.parts.weights > one.parts.weights and other.peak > one.peak


def test_along_the_sequence_few_blocks_tell_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    config = llama(num_hidden_layers=7, hidden_size=256, intermediate_size=512, num_attention_heads=8, vocab_size=1024)
    asked = Asked(mesh_sizes("dp_shard=2,tp=2"), 2, 256, sequence_parallel=True)
    few, all_of_them = Steps(resolve(config)), Steps(resolve(config))
    told = estimate_with(few, asked, H100)
    monkeypatch.setattr(planning, "same_in_like_blocks", lambda *_: False)
    assert told == estimate_with(all_of_them, asked, H100)
    assert few.plan(2, 1, True).sequence_parallel


MLA = DeepseekV3Config(hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=3,
                       first_k_dense_replace=3, num_attention_heads=16, num_key_value_heads=16,
                       vocab_size=1024)  # fmt: skip


def test_attention_of_uneven_heads_keeps_no_scores() -> None:
    """On a CPU torch takes a reference that keeps all of them: 16 heads of 2,048 × 2,048 a layer."""
    steps = Steps(resolve(MLA))
    short, long = (estimate_with(steps, Asked((("tp", 2),), 1, n, updates=False), H100) for n in (1024, 2048))
    assert long.parts.kept / short.parts.kept < 2.5  # about evenly with the tokens; scores would grow fourfold


def test_dropout_in_attention_keeps_no_scores() -> None:
    config = GPT2Config(n_embd=512, n_layer=3, n_head=8, vocab_size=1024, n_positions=2048, attn_pdrop=0.1)
    steps = Steps(resolve(config))
    short, long = (estimate_with(steps, Asked((("tp", 2),), 1, n, updates=False), H100) for n in (1024, 2048))
    assert long.parts.kept / short.parts.kept < 2.5


def test_experts_in_float32_are_estimated() -> None:
    config = MixtralConfig(**{**MIXTRAL.to_dict(), "dtype": torch.float32})
    narrow, wide = (estimate_with(Steps(resolve(one)), Asked((("tp", 2),), 1, 256), H100) for one in (MIXTRAL, config))
    assert wide.flops == narrow.flops and wide.parts.gradients == 2 * narrow.parts.gradients


def test_the_first_recording_of_a_process_is_like_the_second() -> None:
    """DTensor asks once for the shape of an op on whole tensors: no rank holds those."""
    config = llama(num_hidden_layers=2, hidden_size=512, intermediate_size=1024, vocab_size=64008 + 8 * 97)
    config.dtype = torch.float32
    asked = Asked(mesh_sizes("dp_shard=2,tp=8"), 1, 512, mp_policy="bf16", activation_checkpointing=True)
    first, second = (estimate_with(Steps(resolve(config)), asked, H100) for _ in range(2))
    assert first == second and first.parts.temporary < 512 * config.vocab_size * 4


def test_gradients_of_earlier_micro_batches_are_there() -> None:
    steps = Steps(resolve(llama(num_hidden_layers=2, vocab_size=32000)))
    for mesh in ("tp=4", "dp_shard=4"):
        one, two = (
            estimate_with(steps, Asked(mesh_sizes(mesh), 1, 256, accumulate=n, updates=False), H100) for n in (1, 2)
        )
        trained = one.parts.optimizer // 2
        assert one.peak < two.peak <= one.peak + trained


def test_operations_are_six_for_each_weight_and_token() -> None:
    config = llama(num_hidden_layers=2)
    found = autoplan.estimate(config, mesh={"tp": 2}, batch=1, sequence=512)
    layers = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    attention = 2 * 3 * 2 * 512 * 512 * 4096  # scores and their use, forward and backward, causal: half of all
    assert found.flops == pytest.approx((6 * layers * 512 + attention) / 2, rel=0.05)


def test_inference_keeps_keys_and_values() -> None:
    found = autoplan.estimate(llama(), mesh={"tp": 4}, batch=2, sequence=1024, train="inference")
    cache = 4 * 2 * 2 * 1024 * 8 * 128 * 2 // 4
    assert found.parts.gradients == found.parts.optimizer == 0
    assert found.parts.cache >= cache and found.where


def test_sequences_that_are_served_hold_their_cache_and_are_decoded() -> None:
    """A step reads the weights and all caches once: four heads of keys and values a rank, in half the bytes."""
    keywords: dict[str, Any] = {"mesh": {"tp": 2}, "sequence": 1024, "train": "inference"}
    alone, many, small = (
        autoplan.estimate(llama(num_hidden_layers=2), **keywords, concurrency=held, cache_dtype=dtype)
        for held, dtype in ((0, None), (65, None), (65, "fp8"))
    )
    cache = 2 * 2 * 1024 * 4 * 128 * 2
    assert many.parts.cache - alone.parts.cache == pytest.approx(64 * cache, rel=0.01)
    assert small.parts.cache == pytest.approx(many.parts.cache / 2, rel=0.01)
    slowest = 3.35e12 / (alone.parts.weights + cache)
    assert 0.5 * slowest < alone.decoded_per_second < slowest and many.concurrency == 65
    assert alone.decoded_per_second < many.decoded_per_second < 65 * alone.decoded_per_second
    for odd in ({"concurrency": 1, "batch": 2}, {"cache_dtype": "int3"}, {"concurrency": -1}, {"concurrency": 2.5}):
        with pytest.raises(autoplan.AutoplanError):
            autoplan.estimate(llama(num_hidden_layers=2), **keywords | odd)
    with pytest.raises(autoplan.AutoplanError, match="concurrency=4"):
        autoplan.estimate(llama(num_hidden_layers=2), mesh="tp=2", concurrency=4)


def test_a_sliding_window_bounds_what_is_cached() -> None:
    """Of 3 layers with a window of 128 tokens, and one without, on a rank with two of four heads of keys and values."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    config = Gemma3TextConfig(**sizes, head_dim=16, num_hidden_layers=4, layer_types=kinds, sliding_window=128,
                              vocab_size=128, dtype="bfloat16")  # fmt: skip
    keywords: dict[str, Any] = {"mesh": {"tp": 2}, "sequence": 1024, "train": "inference"}
    alone, many = (autoplan.estimate(config, **keywords, concurrency=held) for held in (0, 9))
    one = (3 * 127 + 1024) * 2 * 2 * 16 * 2
    assert alone.parts.cache == pytest.approx(one, rel=0.01)
    assert many.parts.cache - alone.parts.cache == pytest.approx(8 * one, rel=0.01)
    assert sum("sliding window" in note for note in alone.notes) == 1
    config.layer_types = ["full_attention"] * 4
    whole = autoplan.estimate(config, **keywords)
    assert alone.decoded_per_second > whole.decoded_per_second > 0 and not any("sliding" in n for n in whole.notes)


def test_a_rank_has_a_head_of_keys_at_least() -> None:
    """Over 16 ranks of tp eight heads of keys are held twice, and cannot be halved from recordings over 4 and 8."""
    steps = Steps(resolve(llama(num_hidden_layers=2)))
    for tp in (4, 8):
        steps.at(Setting(tp=tp, sequence=64, training=False))
    asked = Asked((("tp", 16),), 4, 64, train="inference", exact=False)
    scaled, exact = (estimate_with(steps, replace(asked, exact=exact), H100) for exact in (False, True))
    assert scaled.parts.cache == exact.parts.cache == 2 * 4 * 64 * 128 * 2 * 2


def test_a_trained_adapter_needs_states_for_itself_only() -> None:
    config = llama(num_hidden_layers=2)
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM(config).bfloat16().requires_grad_(False)
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(True)
    found = autoplan.estimate(model, mesh={"tp": 2}, sequence=128, train="lora")
    assert found.parts.optimizer == 2 * 2 * 4096 * 14336 // 2


def test_bytes_of_data_parallelism_follow_the_ranks() -> None:
    steps = Steps(resolve(llama(num_hidden_layers=2)))
    two, four = (estimate_with(steps, Asked((("dp_shard", n), ("tp", 2)), 1, 128), H100) for n in (2, 4))
    assert two.parts.optimizer == pytest.approx(2 * four.parts.optimizer, rel=0.01)
    assert {s.kind for s in two.messages if s.dim == "dp_shard"} == {"all-gather", "reduce-scatter"}


def test_every_device_is_whole_and_dense() -> None:
    for name in device_names():
        device = load_device(name)
        assert device.sources and device.memory > 10**10 and device.flops["bfloat16"] >= 7e13
    assert load_device("H100").flops["bfloat16"] < 1e15  # 1,979 TFLOPS are with sparsity


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"mesh": "tp=x"}, "whole number"),
        ({"mesh": "tp=2", "train": "some"}, "train="),
        ({"mesh": "tp=2", "optimizer": "sophia"}, "optimizer="),
        ({"mesh": "tp=2", "batch": 0}, "batch is 0"),
        ({"mesh": "tp=2", "device": "abacus"}, "unknown device"),
        ({"mesh": "tp=2", "device": 3}, "the device is 3"),
        ({"mesh": "tp=2", "batch": "2"}, "batch is"),
        ({"mesh": "tp=2", "sequence": 2.5}, "sequence is"),
        ({"mesh": "tp=2", "accumulate": True}, "accumulate is"),
        ({"mesh": "tp=2", "optimizer": []}, "optimizer="),
        ({"mesh": "tp=2", "mp_policy": "fp8"}, "mp_policy="),
        ({"mesh": "tp=2", "reshard_after_forward": 3}, "reshard_after_forward is"),
        ({"mesh": "tp=2", "loss": 3}, "loss=3"),
        ({"mesh": "tp=2", "plan": "x"}, "plan is"),
    ],
)
def test_what_cannot_be_is_refused(keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(autoplan.AutoplanError, match=said):
        autoplan.estimate(llama(num_hidden_layers=2), **keywords)


def test_what_is_stored_quantised_is_said() -> None:
    """A step of training is counted in the numbers that it computes with; a note says what the checkpoint takes."""
    config = llama(num_hidden_layers=2)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (note,) = autoplan.estimate(config, mesh={"tp": 2}, sequence=64).notes
    assert "0.8 GiB on all ranks; the quantised checkpoint takes 0.4 GiB" in note
    assert not autoplan.estimate(llama(num_hidden_layers=2), mesh={"tp": 2}, sequence=64, train="inference").notes


def test_a_class_of_a_sequence_is_one_label_and_is_estimated() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=512))
    steps = Steps(resolve(model))
    given = inputs_of(steps, Setting(batch=2, sequence=32))
    assert given["input_ids"].shape == (2, 32) and given["labels"].shape == (2,)
    found = estimate_with(steps, Asked((("dp_shard", 2),), 2, 32, updates=False), H100)
    tracked = tracked_peak(steps, {"dp_shard": 2}, {}, 2, 32)
    assert found.peak - found.parts.overhead == pytest.approx(tracked, rel=0.05)


def test_fewer_experts_than_ranks_take_no_room_for_what_a_rank_has_not() -> None:
    """Two experts on a rank of tp, over four of FSDP2: an even share of each."""
    steps, mesh = Steps(resolve(MIXTRAL)), {"dp_shard": 4, "tp": 4}
    asked = Asked(tuple(mesh.items()), 1, 512, True, experts=True, updates=False)
    found = estimate_with(steps, asked, H100)
    assert found.parts.weights < 1.1 * sum(p.numel() * p.element_size() for p in steps.module.parameters()) / 16
    tracked = tracked_peak(steps, mesh, {"activation_checkpointing": True}, 1, 512, ep=4)
    assert found.peak - found.parts.overhead == pytest.approx(tracked, rel=0.05)


def test_gradients_of_earlier_micro_batches_are_added_to() -> None:
    steps = Steps(resolve(llama(hidden_size=512, intermediate_size=1024, vocab_size=4096)))
    found = estimate_with(steps, Asked((("tp", 4),), 1, 128, accumulate=2, updates=False), H100)
    tracked = tracked_peak(steps, {"tp": 4}, {}, 1, 128, micro=2)
    assert found.peak - found.parts.overhead == pytest.approx(tracked, rel=0.05)


def test_adapters_are_put_in_where_nothing_is_frozen() -> None:
    """As those that a model brings, and not as training all of it."""
    config = llama(num_hidden_layers=3, hidden_size=512, intermediate_size=1024, vocab_size=1024)
    keywords: dict[str, Any] = {"mesh": "dp_shard=2,tp=2", "sequence": 256}
    every: dict[str, Any] = {**keywords, "train": "lora", "lora_targets": "all-linear", "lora_dtype": "model"}
    full = autoplan.estimate(config, **keywords)
    ours, brought = (autoplan.estimate(model, **every, lora_rank=16) for model in (config, adapted(config)))
    assert ours.parts == brought.parts and ours.messages == brought.messages
    assert ours.parts.optimizer < full.parts.optimizer / 4 and ours.flops < full.flops
    assert "adapters of rank 16 were added to 21 linear layers (all-linear; in the model's dtype)" in "".join(
        ours.notes
    )
    assert brought.notes == (
        "no effect: rank, targets, dropout and dtype of adapters; the model has trainable parameters of its own",
    )
    wider = autoplan.estimate(config, **every, lora_rank=64)
    assert wider.parts.optimizer == 4 * ours.parts.optimizer


def test_what_adapters_drop_is_kept_with_its_mask() -> None:
    """Of each of 14 adapters what goes in is kept anew, and a byte for each number."""
    config = llama(num_hidden_layers=2, hidden_size=512, intermediate_size=1024, vocab_size=1024)
    keywords: dict[str, Any] = {"mesh": "tp=1", "sequence": 256, "train": "lora", "lora_targets": "all-linear"}
    for mesh in ("tp=1", "tp=2"):
        plain, dropped = (
            autoplan.estimate(config, **keywords | {"mesh": mesh}, lora_dropout=rate, lora_dtype="model")
            for rate in (0.0, 0.1)
        )
        inputs = 2 * 256 * (6 * 512 + 1024) // plain.mesh[0][1]
        assert inputs < dropped.parts.kept - plain.parts.kept < 6 * inputs
        assert "; dropout 0.1;" in "".join(dropped.notes)
    with pytest.raises(autoplan.AutoplanError, match="lora_dropout=1"):
        autoplan.estimate(config, **keywords, lora_dropout=1)


def test_adapters_are_in_float32_as_peft_casts_them() -> None:
    """And so is what goes into them, once more for each layer of half precision."""
    config = llama(num_hidden_layers=2, hidden_size=512, intermediate_size=1024, vocab_size=128)
    keywords: dict[str, Any] = {"mesh": "tp=1", "sequence": 256, "train": "lora", "lora_targets": "q_proj"}
    wide, narrow = (autoplan.estimate(config, **keywords, lora_dtype=dtype) for dtype in ("float32", "model"))
    number = 2 * 8 * (512 + 32 * 16)
    assert (wide.parts.optimizer, narrow.parts.optimizer) == (2 * 4 * number, 2 * 2 * number)
    assert wide.parts.kept - narrow.parts.kept >= 2 * 256 * 512 * (4 - 2)
    assert "in float32)" in "".join(wide.notes) and "in the model's dtype)" in "".join(narrow.notes)
    with pytest.raises(autoplan.AutoplanError, match="lora_dtype='fp4'"):
        autoplan.estimate(config, **keywords, lora_dtype="fp4")
    with pytest.raises(autoplan.AutoplanError, match="lora_dtype with train='full'"):
        autoplan.estimate(config, **keywords | {"train": "full", "lora_targets": None}, lora_dtype="model")


def test_adapters_stand_beside_linear_layers_of_the_models_own_class() -> None:
    """Falcon's are a subclass; those that attention of torch's reads without a call are none."""
    config = FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
    found = autoplan.estimate(config, mesh="tp=1", sequence=64, train="lora", lora_targets="query_key_value")
    assert "2 linear layers (query_key_value)" in "".join(found.notes)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    names = [name for name, part in adapters_beside(layer, 2, "all-linear").named_modules() if type(part) is Adapted]
    assert names == ["linear1", "linear2"]


@pytest.mark.hosts
def test_adapters_stand_where_peft_puts_them() -> None:
    """Its own model of the same class trains as many numbers, in the same dtype."""
    peft = pytest.importorskip("peft", reason="NOT TRIED: peft is absent; `make test-hosts` installs it")
    config = llama(num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=4,
                   num_key_value_heads=4, vocab_size=1024)  # fmt: skip
    keywords: dict[str, Any] = {"mesh": "tp=1", "sequence": 64, "train": "lora"}
    found = autoplan.estimate(config, **keywords)
    with torch.device("meta"):
        theirs = peft.get_peft_model(AutoModelForCausalLM.from_config(config), peft.LoraConfig(task_type="CAUSAL_LM"))
    trained = sum(p.nbytes for p in theirs.parameters() if p.requires_grad)
    assert found.parts.optimizer == 2 * trained
    assert "rank 8 were added to 4 linear layers (q_proj, v_proj; in float32)" in "".join(found.notes)
    fewer = autoplan.estimate(config, **keywords, lora_targets=["o_proj"], lora_rank=4)
    assert fewer.parts.optimizer == 2 * 4 * 2 * 2 * 4 * 256
    alone = autoplan.estimate(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128), **keywords)
    assert "2 linear layers (c_attn)" in "".join(alone.notes)


@pytest.mark.parametrize(
    ("model", "targets", "said"),
    [
        (nn.Sequential(nn.Conv1d(4, 4, 3)), "all-linear", "no linear layers to add adapters to"),
        pytest.param(nn.Sequential(nn.Linear(4, 4)), None, "no default target layers", marks=pytest.mark.hosts),
        (nn.Sequential(nn.Linear(4, 4)), "q_proj", "no linear layer named q_proj"),
        (nn.Sequential(nn.Linear(4, 4)), [3], "lora_targets="),
    ],
)
def test_where_adapters_cannot_be_put_is_one_error(model: nn.Module, targets: Any, said: str) -> None:
    if targets is None:
        pytest.importorskip("peft", reason="NOT TRIED: peft is absent; `make test-hosts` installs it")
    with pytest.raises(autoplan.AutoplanError, match=said):
        autoplan.estimate(model, mesh="tp=1", train="lora", lora_targets=targets)


def test_a_cache_is_keys_and_values_and_no_logits() -> None:
    config = llama(num_hidden_layers=3)
    found = autoplan.estimate(config, mesh="tp=2", batch=2, sequence=512, train="inference").parts
    assert found.cache == 2 * 3 * 2 * 512 * (8 // 2) * 128 * 2  # keys and values of each layer, half of the heads
    assert found.temporary < 2 * 512 * 128256 // 2 * 2, "generation makes logits of the last token alone"


def test_a_prompt_with_a_picture_fills_a_cache() -> None:
    text = llama(num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=4,
                 num_key_value_heads=4, vocab_size=1024)  # fmt: skip
    seen = CLIPVisionConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                            image_size=64, patch_size=16)  # fmt: skip
    config = LlavaConfig(text_config=text, vision_config=seen, image_token_index=1000, dtype=torch.bfloat16)
    found = autoplan.estimate(config, mesh="tp=2", sequence=128, train="inference")
    assert found.parts.cache > 0 and found.sequence == 128, "its tokens are part of the sequence"
    assert found.notes == ("each sequence comes with pixel_values of 1 × 3 × 64 × 64",)


def test_inputs_are_made_once_and_placeholders_are_no_labels() -> None:
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128)
    config.image_token_id = 7
    steps = Steps(resolve(config))
    first, second = (inputs_of(steps, Setting(sequence=64)) for _ in range(2))
    assert first["input_ids"] is second["input_ids"] and first is not second
    labels = labels_of(torch.tensor([[1, 7, 2]]), config)
    assert labels.tolist() == [[1, -100, 2]]


def test_a_plan_that_names_a_class_is_estimated_beside_its_model() -> None:
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128)
    plan = autoplan.plan(config, 2, prove="none")
    with pytest.raises(autoplan.AutoplanError, match="not where its config is") as caught:
        autoplan.estimate(plan, mesh="tp=2", sequence=64)
    assert "plan=plan" in str(caught.value)
    assert autoplan.estimate(config, plan=plan, mesh="tp=2", sequence=64).peak > 0


def test_the_dtype_of_weights_and_the_optimizer_are_said() -> None:
    config = llama(num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=4,
                   num_key_value_heads=4, vocab_size=1024)  # fmt: skip
    found = autoplan.estimate(config, mesh="tp=2", sequence=64)
    assert "weights in bfloat16 (from the config), adamw" in " ".join(str(found).split())
    assert found.to_dict()["optimizer"] == "adamw"


def test_quantised_weights_are_counted_as_stored_where_nothing_is_trained() -> None:
    folder = "examples/shapes/quantised/llama-3.1-70b-w4a16"
    training, running = (
        autoplan.estimate(folder, mesh="tp=8", sequence=64, train=train) for train in ("full", "inference")
    )
    less = (127.5 - 32.9) / 8
    assert (training.parts.weights - running.parts.weights) / 2**30 == pytest.approx(less, abs=0.1)
    assert "counted as stored, 32.9 GiB" in "".join(running.notes)

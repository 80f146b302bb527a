"""A cross-section of the architectures in transformers, and (slow) all causal language models: exact, how much split.

One of every kind that was hard at some time; quick are those that other tests do not plan. `autoplan scoreboard
causal_lm` prints the same for a whole mapping.
"""

from __future__ import annotations

import pytest

from autoplan.check.scoreboard.run import scoreboard
from autoplan.check.scoreboard.score import How, score

# type, class, the share of weights that is split at least, and what it stands for
CROSS_SECTION = [
    ("llama", "LlamaForCausalLM", 1.0),  # the plain decoder
    ("gpt2", "GPT2LMHeadModel", 1.0),  # packed in thirds, transposed weights, tied head
    ("gpt_neox", "GPTNeoXForCausalLM", 1.0),  # packed by head, parallel residual
    ("gpt_bigcode", "GPTBigCodeForCausalLM", 1.0),  # one key/value head
    ("codegen", "CodeGenForCausalLM", 1.0),  # packed in blocks of its own
    ("falcon", "FalconForCausalLM", 1.0),  # key and value next to the queries
    ("bloom", "BloomForCausalLM", 1.0),  # ALiBi made in forward
    ("mpt", "MptForCausalLM", 1.0),  # slopes of a power of two
    ("phi3", "Phi3ForCausalLM", 1.0),  # packed by segments, gate and up in one
    ("opt", "OPTForCausalLM", 1.0),  # stored head counts, learned positions
    ("olmo2", "Olmo2ForCausalLM", 1.0),  # norms over all heads
    ("gemma3_text", "Gemma3ForCausalLM", 1.0),  # norms of each head, two kinds of layers
    ("xglm", "XGLMForCausalLM", 1.0),  # dropout amid attention
    ("gpt_oss", "GptOssForCausalLM", 0.8),  # sinks, interleaved experts with biases
    ("mixtral", "MixtralForCausalLM", 0.85),  # experts; the router stays whole
    ("longcat_flash", "LongcatFlashForCausalLM", 0.9),  # a loop over the experts that were hit
    ("deepseek_v3", "DeepseekV3ForCausalLM", 0.9),  # latent attention, shared experts
    ("mamba2", "Mamba2ForCausalLM", 1.0),  # state space, one projection of five parts
    ("rwkv", "RwkvForCausalLM", 0.9),  # linear recurrence
    ("recurrent_gemma", "RecurrentGemmaForCausalLM", 1.0),  # gates with a block each
    ("zamba2", "Zamba2ForCausalLM", 0.98),  # shared blocks, adapters
    ("t5", "T5ForConditionalGeneration", 1.0),  # relative positions, encoder and decoder
    ("bart", "BartForConditionalGeneration", 1.0),  # cross-attention
    ("bert", "BertForMaskedLM", 0.9),  # a head that is not a plain linear
    ("whisper", "WhisperForConditionalGeneration", 1.0),  # sound
    ("llava", "LlavaForConditionalGeneration", 0.85),  # a vision tower and a projector
    ("vit", "ViTModel", 0.7),  # vision alone; the patches stay whole
]  # fmt: skip


QUICK = ("gpt_neox", "falcon", "phi3", "gpt_oss", "t5", "llava", "vit", "mamba2", "bert", "xglm")


@pytest.mark.parametrize(
    ("model_type", "class_name", "share"),
    [pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow) for case in CROSS_SECTION],
    ids=lambda value: str(value),
)
def test_cross_section(model_type: str, class_name: str, share: float) -> None:
    found = score(model_type, class_name, How(2))
    assert found.verdict == "exact", found.reason
    assert found.share is not None and found.share >= share, (found.whole, found.unused)


@pytest.mark.slow
def test_every_causal_language_model() -> None:
    """None wrong, none failing; at least 165 of the 180 that run are exact."""
    board = scoreboard("causal_lm", timeout=300)
    bad = {score.model_type: score.reason for score in board.scores if score.verdict in ("wrong", "failed")}
    assert not bad
    assert board.totals()["exact"] >= 165

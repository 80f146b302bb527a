"""Spoilt config.json: `python tests/fuzz/configs.py --count N --seed S`.

Configs of a few architectures (dense, experts, latent attention, hybrid, with a vision tower) are spoilt as values and
as text; a folder that holds one is resolved, built on meta and planned. A plan that is made has the command's full way
behind it, so accepted cases may take a while. Those that are refused may take twice what planning a sound config takes
here, since some are refused only when the model that they describe is built and run.
"""

from __future__ import annotations

import random
import time
import warnings
from typing import Any

from fuzzing import SECONDS, Counts, as_json, folder, fuzz, main, spoil, spoil_text

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CONFIGS: tuple[dict[str, Any], ...] = (
    {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL, "rope_theta": 1e4, "hidden_act": "silu"},
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **SMALL,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 32},
        "auto_map": {"AutoConfig": "configuration_x.XConfig"},
    },
    {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **SMALL}
    | {"num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_head": 4, "n_layer": 2}
    | {"n_positions": 64, "vocab_size": 96, "activation_function": "gelu_new"},
    {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], **SMALL, "sliding_window": 16}
    | {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
    {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "llama", **SMALL},
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48}
        | {"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8, "projection_dim": 16},
        "image_token_index": 90,
        "vision_feature_layer": -1,
    },
)


def make(chance: random.Random) -> str:
    """The text of a config.json."""
    text = as_json(spoil(chance.choice(CONFIGS), chance))
    return text if chance.random() < 0.9 else spoil_text(text, chance)


def run(count: int, seed: int) -> Counts:
    import autoplan

    with folder() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def attempt(text: str) -> None:
            (place / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
            autoplan.plan(str(place), 2, prove="none")

        for config in CONFIGS:  # the first of each architecture pays for its imports
            attempt(as_json(config))
        began = time.process_time()
        attempt(as_json(CONFIGS[-1]))
        refused = max(SECONDS, 2 * (time.process_time() - began))
        return fuzz("configs", make, attempt, count, seed, accepted=20 * refused, refused=refused)


if __name__ == "__main__":
    main(run)

"""Estimated peak memory held against torch's MemTracker on the sharded model in fake mode, which runs every layer.

    python tests/benchmarks/estimate_memory.py [CASE]

Real widths and few layers. MemTracker sees no allocator, no context and no kernels of a GPU, so the estimate's overhead
is left out; both see the same step: gradients and optimizer states as they are from the second step on, the update
itself not. Beside it stand what accelerate's and Megatron-LM's formulas give (peer_formulas.py), where they apply.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from autoplan.forecast.asked import Asked
from autoplan.forecast.devices import load_device
from autoplan.forecast.estimate import estimate_with
from autoplan.forecast.step import Steps
from autoplan.hf.source import resolve

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from adapters import with_adapters  # noqa: E402
from memory_referee import tracked_peak  # noqa: E402
from peer_formulas import accelerate_bytes, megatron_bytes  # noqa: E402

BATCH, SEQUENCE = 1, 1024


def _built(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**sizes)
        config.dtype = torch.bfloat16
        with torch.device("meta"):
            made: nn.Module = getattr(transformers, _CLASSES.get(name, f"{name}ForCausalLM"))(config).bfloat16()
        return made

    return build


_CLASSES = {"T5": "T5ForConditionalGeneration", "LlavaNext": "LlavaForConditionalGeneration"}


def _llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    text = LlamaConfig(**_LLAMA)
    vision = CLIPVisionConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=16,
                              image_size=336, patch_size=14, projection_dim=768)  # fmt: skip
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=32000)
    with torch.device("meta"):
        made: nn.Module = LlavaForConditionalGeneration(config).bfloat16()
    return made


_LLAMA: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": _built("Llama", **_LLAMA),
    "experts": _built("Mixtral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
                      num_key_value_heads=8, vocab_size=32000, num_local_experts=8),
    "mamba": _built("Bamba", hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
                    num_key_value_heads=8, vocab_size=128000, attn_layer_indices=[2], mamba_n_heads=128,
                    mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128),
    "mla": _built("DeepseekV3", hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
                  num_hidden_layers=4, first_k_dense_replace=2, num_attention_heads=128, num_key_value_heads=128,
                  vocab_size=129280, n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=8),
    "encoder-decoder": _built("T5", d_model=1024, d_ff=4096, d_kv=64, num_heads=32, num_layers=4, vocab_size=32128),
    "multimodal": _llava,
}  # fmt: skip
HOW: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp 4": ({"tp": 4}, {}),
    "fsdp 4 × tp 4, blocks again": ({"dp_shard": 4, "tp": 4}, {"activation_checkpointing": True}),
    "fsdp 8 × tp 2, selective": ({"dp_shard": 8, "tp": 2}, {"activation_checkpointing": "selective"}),
    "fsdp 2 × cp 2, blocks again": ({"dp_shard": 2, "cp": 2}, {"activation_checkpointing": True}),
    "fsdp 2 × cp 4, selective": ({"dp_shard": 2, "cp": 4}, {"activation_checkpointing": "selective"}),
    "cp 2 × tp 2": ({"cp": 2, "tp": 2}, {}),
    "fsdp 2 × cp 2 × tp 2, blocks again": ({"dp_shard": 2, "cp": 2, "tp": 2}, {"activation_checkpointing": True}),
    "fsdp 2 × cp 4 × tp 2, selective": ({"dp_shard": 2, "cp": 4, "tp": 2}, {"activation_checkpointing": "selective"}),
    "lora, fsdp 4 × tp 4, submodules": ({"dp_shard": 4, "tp": 4}, {"activation_checkpointing": "submodule"}),
}


def main(wanted: str = "") -> None:
    table = Table(
        "model", "how", "MemTracker GiB", "estimate GiB", "off by", "accelerate", "Megatron", "s", "s (est.)", "where"
    )
    worst = 0.0
    for name, build in MODELS.items():
        for lora in (False, True):
            model = with_adapters(build()) if lora else build()
            steps = Steps(resolve(model))
            for how, (dims, options) in HOW.items():
                if how.startswith("lora") != lora or wanted not in f"{name} {how}":
                    continue
                try:
                    asked = Asked(tuple(dims.items()), batch=BATCH, sequence=SEQUENCE, updates=False, **options)
                    steps.split(dims.get("tp", 1), cp=dims.get("cp", 1))
                    planned = time.time()
                    found = estimate_with(steps, asked, load_device("h100"))
                    ours, done = found.peak - found.parts.overhead, time.time()
                    theirs = tracked_peak(steps, dims, options, BATCH, SEQUENCE)
                except Exception as error:
                    table.add_row(name, how, f"{type(error).__name__}: {str(error)[:150]}")
                    print(name, how, repr(error)[:600], file=sys.stderr)
                    continue
                off = ours / theirs - 1
                worst = max(worst, abs(off))
                others = accelerate_bytes(model, dims), megatron_bytes(model, dims, BATCH, SEQUENCE)
                said = [f"{other / theirs - 1:+.0%}" if other else "none" for other in others]
                table.add_row(name, how, f"{theirs / 2**30:.3f}", f"{ours / 2**30:.3f}", f"{off:+.2%}", *said,
                              f"{time.time() - done:.1f}", f"{done - planned:.1f}",
                              f"{found.where}, {found.phase}")  # fmt: skip
                print(name, how, f"{off:+.2%}", file=sys.stderr, flush=True)
    Console(width=200).print(table)
    print(f"worst: {worst:.2%}")


if __name__ == "__main__":
    main(*sys.argv[1:])

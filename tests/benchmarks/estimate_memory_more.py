"""Estimated peak memory held against torch's MemTracker on further families and ways, each once.

    python tests/benchmarks/estimate_memory_more.py [CASE]

The same referee as estimate_memory.py: sliding windows, sinks, experts apart, hybrids, speech, pictures, classes,
adapters cut along the sequence, replicas, mixed precision, accumulated gradients, a gathered head, and the update.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
from adapters import with_adapters  # noqa: E402
from memory_referee import tracked_peak  # noqa: E402


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    mesh: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    ep: int = 1
    along: bool = False
    micro: int = 1
    update: bool = False
    sequence: int = 1024


def _built(kind: str, *, of: str = "", dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**sizes)
        config.dtype = dtype
        with torch.device("meta"):
            made: nn.Module = getattr(transformers, of or f"{kind}ForCausalLM")(config).to(dtype)
        return made

    return build


_DENSE: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4,
                          "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 128256,
                          "tie_word_embeddings": False}  # fmt: skip
_LLAMA = _built("Llama", **_DENSE)
_MIXTRAL = _built(
    "Mixtral",
    hidden_size=2048,
    intermediate_size=4096,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=32000,
    num_local_experts=8,
)
_BOTH = {"dp_shard": 2, "tp": 2}
_BLOCKS = {"activation_checkpointing": True}
CASES: dict[str, Case] = {
    "gemma3, windows": Case(_built("Gemma3Text", of="Gemma3ForCausalLM", hidden_size=2560, intermediate_size=10240,
                            num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=256),
                            _BOTH, _BLOCKS),
    "gpt-oss": Case(_built("GptOss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=4,
                           num_local_experts=8), _BOTH),
    "qwen3-moe, experts apart": Case(_built("Qwen3Moe", hidden_size=2048, moe_intermediate_size=768,
                                            num_hidden_layers=4, num_experts=32), {"dp_shard": 2, "tp": 4}, ep=4),
    "qwen3-moe, experts alone": Case(_built("Qwen3Moe", hidden_size=2048, moe_intermediate_size=768,
                                            num_hidden_layers=4, num_experts=32), {"dp_shard": 2, "ep": 4}, ep=4),
    "mixtral, fewer experts than ranks": Case(_MIXTRAL, {"dp_shard": 4, "tp": 4}, _BLOCKS, ep=4, along=True),
    "mixtral, fewer experts than ranks, replicas": Case(_MIXTRAL, {"dp_replicate": 2, "dp_shard": 16}, _BLOCKS),
    "jamba": Case(_built("Jamba", hidden_size=2048, intermediate_size=4096, num_hidden_layers=4, num_experts=4,
                         attn_layer_period=4, attn_layer_offset=2, vocab_size=65536), _BOTH, _BLOCKS),
    "falcon-h1": Case(_built("FalconH1", hidden_size=2048, intermediate_size=4096, num_hidden_layers=4,
                             mamba_d_ssm=2048, mamba_n_heads=32, mamba_d_head=64, vocab_size=65536), {"tp": 2}),
    "whisper": Case(_built("Whisper", of="WhisperForConditionalGeneration", d_model=1024, encoder_layers=4,
                           decoder_layers=4, encoder_attention_heads=16, decoder_attention_heads=16,
                           encoder_ffn_dim=4096, decoder_ffn_dim=4096), _BOTH, sequence=256),
    "qwen2.5-vl": Case(_built("Qwen2_5_VL", of="Qwen2_5_VLForConditionalGeneration", text_config={
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 8, "vocab_size": 152064}, vision_config={"depth": 4, "out_hidden_size": 2048}), _BOTH),
    "mla, along the sequence": Case(_built("DeepseekV3", hidden_size=2048, intermediate_size=4096,
                                           moe_intermediate_size=1024, num_hidden_layers=4, first_k_dense_replace=2,
                                           num_attention_heads=16, num_key_value_heads=16, n_routed_experts=16,
                                           n_group=4, topk_group=2, num_experts_per_tok=4, vocab_size=102400),
                                    {"dp_shard": 2, "tp": 4}, along=True),
    "bert, classes": Case(_built("Bert", of="BertForSequenceClassification", hidden_size=1024, num_hidden_layers=6,
                                 num_attention_heads=16, intermediate_size=4096), {"dp_shard": 4}, sequence=512),
    "adapters, along the sequence": Case(lambda: with_adapters(_LLAMA()), {"dp_shard": 2, "tp": 4}, along=True),
    "replicas": Case(_LLAMA, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, _BLOCKS),
    "float32 weights, bf16 compute": Case(_built("Llama", dtype=torch.float32, **_DENSE), {"dp_shard": 4, "tp": 2},
                                          {"mp_policy": "bf16"}),
    "accumulated, FSDP2": Case(_LLAMA, {"dp_shard": 4}, micro=2),
    "accumulated, tp": Case(_LLAMA, {"tp": 4}, micro=2),
    "a gathered head": Case(_LLAMA, {"tp": 4}, {"gather_logits": True}),
    "weights kept": Case(_LLAMA, {"dp_shard": 4}, {"reshard_after_forward": False}),
    "the update": Case(_LLAMA, {"tp": 4}, _BLOCKS, update=True, sequence=64),
}  # fmt: skip


def main(wanted: str = "") -> None:
    table = Table("case", "mesh", "MemTracker GiB", "estimate GiB", "off by", "s", "where")
    worst = 0.0
    failed: list[str] = []
    for name, case in CASES.items():
        if wanted not in name:
            continue
        started = time.time()
        mesh = " × ".join(f"{dim} {size}" for dim, size in case.mesh.items())
        try:
            steps = Steps(resolve(case.build()))
            asked = Asked(tuple(case.mesh.items()), 1, case.sequence, updates=case.update, accumulate=case.micro,
                          sequence_parallel=case.along, experts=1 < case.ep == case.mesh.get("tp"),
                          **case.options)  # fmt: skip
            found = estimate_with(steps, asked, load_device("h100"))
            theirs = tracked_peak(steps, case.mesh, case.options, 1, case.sequence, ep=case.ep, along=case.along,
                                  micro=case.micro, update=case.update)  # fmt: skip
        except Exception as error:  # one case must not stop the others: its row says what happened, and so does the end
            failed.append(name)
            table.add_row(name, mesh, f"{type(error).__name__}: {str(error)[:150]}")
            print(name, repr(error)[:900], file=sys.stderr, flush=True)
            continue
        ours = found.peak - found.parts.overhead
        worst = max(worst, abs(ours / theirs - 1))
        table.add_row(name, mesh, f"{theirs / 2**30:.3f}", f"{ours / 2**30:.3f}", f"{ours / theirs - 1:+.2%}",
                      f"{time.time() - started:.0f}", f"{found.where}, {found.phase}")  # fmt: skip
        print(name, mesh, f"{ours / theirs - 1:+.2%}", file=sys.stderr, flush=True)
    Console(width=180).print(table)
    print(f"worst: {worst:.2%}")
    if failed:
        sys.exit(f"no figure: {', '.join(failed)}")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Layouts that people published, and what `choose` says of them: do they fit, which place have they, what was measured.

    python tests/benchmarks/published_layouts.py [NAME]

Those with other dims than ours (pipeline stages, context parallelism) are looked at without them; the table says so.
"Measured" stands where a source gives memory or tokens a second of each GPU: there the estimate is held against GPUs.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DeepseekV3Config, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from autoplan.forecast.asked import Asked
from autoplan.forecast.choose import Choice, choose
from autoplan.forecast.devices import load_device
from autoplan.forecast.estimate import estimate_with
from autoplan.forecast.step import Steps
from autoplan.hf.source import resolve
from autoplan.values.estimate import Row

OLDER = "torchtitan docs/performance.md, before December 2024"
TITAN = "torchtitan benchmarks/llama3_h100_202412_torchtitan.md (H100 of 96 GB at 500 W)"


def llama(layers: int, hidden: int, inner: int, heads: int) -> LlamaConfig:
    return LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
                       num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """One layout. `gib`, `speed`: of each GPU, where they were measured. `global_batch` 0: one micro-batch a rank."""

    config: Any
    mesh: tuple[tuple[str, int], ...]
    batch: int
    checkpointing: bool | str
    source: str
    gib: float | None = None
    speed: float | None = None
    sequence: int = 8192
    note: str = ""
    memory: str = "96GB"
    gpu: str = "h100"
    cut: bool = False  # along the sequence
    experts: bool = False  # whole ones on the ranks of tp
    global_batch: int = 0


LAYOUTS = {
    "Llama 3.1 8B, 8": Published(llama(32, 4096, 14336, 32), (("dp_shard", 8),), 2, "selective", TITAN, 82.4, 5762),
    "Llama 3.1 8B, 128": Published(llama(32, 4096, 14336, 32), (("dp_shard", 128),), 2, "selective", TITAN, 67.0, 5605),
    "Llama 3.1 70B, 256": Published(
        llama(80, 8192, 28672, 64), (("dp_shard", 32), ("tp", 8)), 16, True, TITAN, 71.9, 829, cut=True,
        note="measured compiled, with float8 products",
    ),
    "Llama 3 8B, 64 A100": Published(
        llama(32, 4096, 14336, 32), (("dp_shard", 64),), 1, "selective", OLDER, None, 2973, memory="80GB", gpu="a100",
    ),
    "Llama 3 70B, 64 A100": Published(
        llama(80, 8192, 28672, 64), (("dp_shard", 64),), 1, True, OLDER, None, 331, memory="80GB", gpu="a100",
    ),
    "Llama 3 70B, 64 A100, tp": Published(
        llama(80, 8192, 28672, 64), (("dp_shard", 8), ("tp", 8)), 8, True,
        "torchtitan, train_configs/llama3_70b.toml (a preset for 64 A100)", memory="80GB", gpu="a100", cut=True,
    ),
    "DeepSeek-V3 of 16B, 8": Published(
        DeepseekV3Config(hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27,
                         first_k_dense_replace=1, num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64,
                         n_shared_experts=2, num_experts_per_tok=6, n_group=1, topk_group=1, q_lora_rank=None,
                         vocab_size=102400),
        (("dp_shard", 8),), 8, True, "torchtitan, train_configs/deepseek_v3_16b.toml (FSDP alone)", sequence=4096,
        memory="80GB",
    ),
    "Qwen3 30B-A3B, 8": Published(
        Qwen3MoeConfig(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
                       num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
                       num_experts_per_tok=8, vocab_size=151936, dtype=torch.bfloat16),
        (("dp_shard", 8),), 4, True, "NeMo Automodel docs/performance-summary.md, October 2025 (FSDP 8 × EP 8)",
        None, 12040, sequence=4096, memory="80GB", global_batch=512,
        note="published with experts over the ranks of FSDP, tokens exchanged: not among ours",
    ),
    "Llama 3.1 405B, 128": Published(
        llama(126, 16384, 53248, 128), (("dp_shard", 16), ("tp", 8)), 2, True, OLDER, None, 109, memory="94GB",
        cut=True,
    ),
    "Llama 3.1 405B, 512": Published(
        llama(126, 16384, 53248, 128), (("dp_shard", 64), ("tp", 8)), 1, True, TITAN, cut=True,
        note="published with 8 pipeline stages (FSDP 8 × TP 8 × PP 8)",
    ),
    "Mixtral 8x7B, 64": Published(
        MixtralConfig(), (("dp_shard", 8), ("tp", 8)), 1, True,
        "Megatron-LM examples/mixtral (TP 1 × EP 8 × PP 4 on 64 H100)", sequence=4096, memory="80GB",
        note="published with experts apart and 4 stages", cut=True, experts=True, global_batch=256,
    ),
    "Qwen3 30B-A3B, 64": Published(
        Qwen3MoeConfig(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
                       num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
                       num_experts_per_tok=8, vocab_size=151936),
        (("dp_shard", 16), ("tp", 4)), 1, True, "Megatron-Bridge recipe qwen3_30b_a3b (TP 4 × EP 4 × PP 2)",
        sequence=4096, memory="80GB", note="published with 2 stages", cut=True, experts=True, global_batch=512,
    ),
    "DeepSeek-V3, 1024": Published(
        DeepseekV3Config(), (("dp_shard", 128), ("tp", 8)), 1, True,
        "DeepSeek-V3 report, 3.2 (PP 16 × EP 64 × ZeRO-1 on 2,048 H800)", sequence=4096, memory="80GB",
        note="published with 16 stages and no tp", cut=True, experts=True, global_batch=15360,
    ),
}  # fmt: skip


def place_of(one: Published, choice: Choice) -> tuple[str, str]:
    """The place of its mesh among all, each taken at its best; and by how much the first is faster than it."""
    best: dict[tuple[tuple[str, int], ...], Row] = {}
    for row in choice.rows:
        best.setdefault(tuple(row.mesh.items()), row)
    wanted = tuple((name, size) for name, size in one.mesh if size > 1)
    found = best.get(wanted)
    if found is None:
        return "not among them", ""
    place = f"{list(best).index(wanted) + 1} of {len(best)}" if found.fits else "does not fit"
    first = choice.rows[0]
    faster = first.estimate.tokens_per_second / max(found.estimate.tokens_per_second, 1e-9) - 1
    return place, f"{first} ({faster:+.0%}: {differs(found, first)})" if found is not first else "it is the first"


def differs(found: Row, first: Row) -> str:
    """Where the time goes that its mesh takes more, in hundredths of the first's step; and how each was run."""
    theirs, ours = _times(found), _times(first)
    more = {part: theirs.get(part, 0.0) - ours.get(part, 0.0) for part in {**theirs, **ours}}
    told = [f"{part} {seconds / sum(ours.values()):+.0%}" for part, seconds in more.items()]
    return f"{', '.join(told)}; this mesh at its best: {found}"


def _times(row: Row) -> dict[str, float]:
    """Seconds of a token."""
    time = row.estimate.time
    assert time is not None
    parts = time.parts
    return {part: seconds / row.estimate.tokens for part, seconds in parts.items()}


def main(wanted: str = "") -> None:
    heads = ("fits", "place of its mesh", "GiB", "measured", "tok/s/GPU", "measured", "s", "the first", "note")
    table = Table("layout", "mesh", *heads)
    for name, one in LAYOUTS.items():
        if wanted not in name:
            continue
        device = load_device(one.gpu)
        one.config.dtype = torch.float32
        steps = Steps(resolve(one.config))
        asked = Asked(one.mesh, one.batch, one.sequence, one.checkpointing, mp_policy="bf16", exact=one.batch < 4,
                      sequence_parallel=one.cut, experts=one.experts)  # fmt: skip
        started = time.time()
        found = estimate_with(steps, asked, device)
        gpus = asked.ranks
        copies = gpus // asked.size("tp")
        chosen = choose(one.config, gpus=gpus, memory=one.memory, gpu=device, sequence=one.sequence, mp_policy="bf16",
                        global_batch=one.global_batch or copies * one.batch)  # fmt: skip
        fits = "yes" if found.peak <= chosen.memory else f"+{(found.peak - chosen.memory) / 2**30:.1f} GiB"
        mesh = " × ".join(f"{dim} {size}" for dim, size in one.mesh)
        told = (f"{found.peak / 2**30:.1f}", f"{one.gib or ''}", f"{found.tokens_per_second / gpus:,.0f}",
                f"{one.speed or ''}", f"{time.time() - started:.0f}")  # fmt: skip
        place, first = place_of(one, chosen)
        table.add_row(name, mesh, fits, place, *told, first, one.note)
        print(name, fits, place, first, *told, sep=" | ", file=sys.stderr, flush=True)
    Console(width=200).print(table)
    for name, one in LAYOUTS.items():
        print(f"{name}: {one.source}")


if __name__ == "__main__":
    main(*sys.argv[1:])

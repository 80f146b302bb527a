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

from autoplan.forecast.choose import Choice, choose
from autoplan.forecast.devices import load_device
from autoplan.forecast.estimate import Asked, estimate_with
from autoplan.forecast.step import Steps
from autoplan.hf.source import resolve

TITAN = "torchtitan benchmarks/llama3_h100_202412_torchtitan.md (H100 of 96 GB at 500 W)"


def llama(layers: int, hidden: int, inner: int, heads: int) -> LlamaConfig:
    return LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
                       num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """One layout. `gib`, `speed`: of each GPU, where they were measured."""

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


LAYOUTS = {
    "Llama 3.1 8B, 8": Published(llama(32, 4096, 14336, 32), (("dp_shard", 8),), 2, "selective", TITAN, 82.4, 5762),
    "Llama 3.1 8B, 128": Published(llama(32, 4096, 14336, 32), (("dp_shard", 128),), 2, "selective", TITAN, 67.0, 5605),
    "Llama 3.1 70B, 256": Published(
        llama(80, 8192, 28672, 64), (("dp_shard", 32), ("tp", 8)), 16, True, TITAN, 71.9, 829,
        note="measured compiled, with float8 products",
    ),
    "Llama 3.1 405B, 512": Published(
        llama(126, 16384, 53248, 128), (("dp_shard", 64), ("tp", 8)), 1, True, TITAN,
        note="published with 8 pipeline stages (FSDP 8 × TP 8 × PP 8)",
    ),
    "Mixtral 8x7B, 64": Published(
        MixtralConfig(), (("dp_shard", 8), ("tp", 8)), 1, True,
        "Megatron-LM examples/mixtral (TP 1 × EP 8 × PP 4 on 64 H100)", sequence=4096, memory="80GB",
        note="published with experts apart and 4 stages",
    ),
    "Qwen3 30B-A3B, 64": Published(
        Qwen3MoeConfig(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
                       num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
                       num_experts_per_tok=8, vocab_size=151936),
        (("dp_shard", 16), ("tp", 4)), 1, True, "Megatron-Bridge recipe qwen3_30b_a3b (TP 4 × EP 4 × PP 2)",
        sequence=4096, memory="80GB", note="published with experts apart and 2 stages",
    ),
    "DeepSeek-V3, 1024": Published(
        DeepseekV3Config(), (("dp_shard", 128), ("tp", 8)), 1, True,
        "DeepSeek-V3 report, 3.2 (PP 16 × EP 64 × ZeRO-1 on 2,048 H800)", sequence=4096, memory="80GB",
        note="published with experts apart and 16 stages",
    ),
}  # fmt: skip


def place_of(one: Published, choice: Choice) -> str:
    wanted = {name: size for name, size in one.mesh if size > 1}
    for place, row in enumerate(choice.rows, 1):
        if row.mesh == wanted:
            return f"{place} of {len(choice.rows)}" if row.fits else "does not fit"
    return "not among them"


def main(wanted: str = "") -> None:
    device = load_device("h100")
    table = Table(
        "layout", "mesh", "fits", "place of its mesh", "GiB", "measured", "tok/s/GPU", "measured", "s", "note"
    )
    for name, one in LAYOUTS.items():
        if wanted not in name:
            continue
        one.config.dtype = torch.float32
        steps = Steps(resolve(one.config))
        asked = Asked(one.mesh, one.batch, one.sequence, one.checkpointing, mp_policy="bf16", exact=one.batch < 4)
        started = time.time()
        found = estimate_with(steps, asked, device)
        gpus = asked.ranks
        copies = gpus // asked.size("tp")
        chosen = choose(one.config, gpus=gpus, memory=one.memory, sequence=one.sequence, mp_policy="bf16",
                        global_batch=copies * one.batch)  # fmt: skip
        fits = "yes" if found.peak <= chosen.memory else f"+{(found.peak - chosen.memory) / 2**30:.1f} GiB"
        mesh = " × ".join(f"{dim} {size}" for dim, size in one.mesh)
        table.add_row(
            name, mesh, fits, place_of(one, chosen), f"{found.peak / 2**30:.1f}", f"{one.gib or ''}",
            f"{found.tokens_per_second / gpus:,.0f}", f"{one.speed or ''}", f"{time.time() - started:.0f}", one.note,
        )  # fmt: skip
        said = (f"{found.peak / 2**30:.1f}", one.gib, f"{found.tokens_per_second / gpus:,.0f}", one.speed)
        print(name, *said, place_of(one, chosen), f"first: {chosen.rows[0]}", found.where, file=sys.stderr, flush=True)
    Console(width=200).print(table)
    for name, one in LAYOUTS.items():
        print(f"{name}: {one.source}")


if __name__ == "__main__":
    main(*sys.argv[1:])

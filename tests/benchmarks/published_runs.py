"""Runs that others published, estimated and sorted by error: the table of truth in published_runs.md beside ours.

python tests/benchmarks/published_runs.py [WORD …]    # rows in which each word stands

Without words it writes published_errors.md, the largest errors last.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    FalconConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    NemotronConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

import autoplan
from autoplan.forecast.devices import load_device

TABLE = Path(__file__).with_suffix(".md")
ERRORS = TABLE.with_name("published_errors.md")
REASONS = TABLE.with_name("published_reasons.md")
BAR = 0.1  # errors beyond it have a reason
_HEAD = """# Published runs, by error

Written by published_runs.py: GiB and tokens a second of a GPU, as published, and the errors of the estimates.
"Why": the numbers of published_reasons.md, for memory (m) and speed (s) beyond 10 %.

| source | model | gpu | mesh | tokens | again | train | weights | GiB | off | speed | off | engine | otherwise | why |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def llama(layers: int, hidden: int, inner: int, heads: int, keys: int = 8, vocabulary: int = 128256,
          tied: bool = False) -> LlamaConfig:  # fmt: skip
    return LlamaConfig(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
                       num_key_value_heads=keys, vocab_size=vocabulary, max_position_embeddings=131072,
                       tie_word_embeddings=tied)  # fmt: skip


def mpt(layers: int, hidden: int, heads: int) -> GPT2Config:
    """MPT with learned positions: GPT-2's shape, run with fused attention as llm-foundry runs it."""
    return GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=50368, n_positions=65536, attn_pdrop=0.0,
                      resid_pdrop=0.0, embd_pdrop=0.0)  # fmt: skip


def qwen(layers: int, hidden: int, inner: int, heads: int, keys: int = 0, vocabulary: int = 151936,
         tied: bool = False) -> Qwen2Config:  # fmt: skip
    """Biases of queries, keys and values; that of 2023 has as many keys as queries."""
    return Qwen2Config(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
                       num_key_value_heads=keys or heads, vocab_size=vocabulary, tie_word_embeddings=tied)  # fmt: skip


def qwen_experts(layers: int, hidden: int, inner: int, heads: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(hidden_size=hidden, intermediate_size=3 * hidden, moe_intermediate_size=inner,
                          num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=4, head_dim=128,
                          num_experts=128, num_experts_per_tok=8, vocab_size=151936)  # fmt: skip


def nemotron(layers: int, hidden: int, heads: int, keys: int) -> NemotronConfig:
    return NemotronConfig(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=4 * hidden,
                          num_attention_heads=heads, num_key_value_heads=keys)  # fmt: skip


MODELS: dict[str, Any] = {
    "llama-3.1-8b": llama(32, 4096, 14336, 32),
    "llama-3.1-70b": llama(80, 8192, 28672, 64),
    "llama-3.1-405b": llama(126, 16384, 53248, 128),
    "llama-3-70b-12": llama(12, 8192, 28672, 64),
    "llama-3.1-405b-4": llama(4, 16384, 53248, 128),
    "llama-3.2-3b": llama(28, 3072, 8192, 24, tied=True),
    "llama-3.2-1b": llama(16, 2048, 8192, 32, tied=True),
    "llama-13b-gqa": llama(40, 5120, 17920, 40),
    "llama-175b": llama(96, 12288, 39680, 96),
    "llama-1b-mha": llama(24, 2048, 4096, 32, 32, 50257, tied=True),
    "internlm-7b": llama(32, 4096, 11008, 32, 32, 103168),
    "internlm-20b": llama(60, 5120, 13824, 40, 40, 103168),
    "yi-6b": llama(32, 4096, 11008, 32, 4, 64000),
    "yi-34b": llama(60, 7168, 20480, 56, 8, 64000),
    "power-3b": GraniteConfig(hidden_size=2304, intermediate_size=9216, num_hidden_layers=40, num_attention_heads=36,
                              vocab_size=49152, max_position_embeddings=4096, tie_word_embeddings=True),
    "gpt3-5b": mpt(24, 4096, 32),
    "gpt3-20b": mpt(44, 6144, 48),
    "gpt3-175b": mpt(96, 12288, 96),
    "gpt-22b": mpt(48, 6144, 64),
    "gpt-530b": mpt(105, 20480, 128),
    "gpt-1t": mpt(128, 25600, 160),
    "olmo-7b": llama(32, 4096, 11008, 32, 32, 100352),
    "olmo-13b": llama(40, 5120, 13824, 40, 40, 100352),
    "nemotron-8b": nemotron(32, 4096, 32, 32),
    "nemotron-15b": nemotron(32, 6144, 48, 8),
    "nemotron-22b": nemotron(40, 6144, 48, 48),
    "nemotron-340b": nemotron(96, 18432, 96, 8),
    "mixtral-8x7b": MixtralConfig(),
    "mixtral-8x22b": MixtralConfig(num_hidden_layers=56, hidden_size=6144, intermediate_size=16384,
                                   num_attention_heads=48, max_position_embeddings=65536),
    "llama-2-7b": llama(32, 4096, 11008, 32, 32, 32000),
    "llama-2-13b": llama(40, 5120, 13824, 40, 40, 32000),
    "llama-2-70b": llama(80, 8192, 28672, 64, 8, 32000),
    "codellama-34b": llama(48, 8192, 22016, 64, 8, 32000),
    "mistral-7b": llama(32, 4096, 14336, 32, 8, 32000),
    "tiny-llama": llama(22, 2048, 5632, 32, 4, 32000),
    "qwen-1.8b": qwen(24, 2048, 5504, 16),
    "qwen-7b": qwen(32, 4096, 11008, 32),
    "qwen-14b": qwen(40, 5120, 13696, 40),
    "qwen-72b": qwen(80, 8192, 24576, 64),
    "qwen2.5-7b": qwen(28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-0.5b": qwen(24, 896, 4864, 14, 2, tied=True),
    "qwen2.5-1.5b": qwen(28, 1536, 8960, 12, 2, tied=True),
    "qwen2.5-14b": qwen(48, 5120, 13824, 40, 8, 152064),
    "qwen2.5-32b": qwen(64, 5120, 27648, 40, 8, 152064),
    "qwen3-14b": Qwen3Config(hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
                             num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False),
    "falcon-7b": FalconConfig(hidden_size=4544, num_hidden_layers=32, num_attention_heads=71, vocab_size=65024),
    "phi-2": PhiConfig(hidden_size=2560, intermediate_size=10240, num_hidden_layers=32, vocab_size=51200,
                       partial_rotary_factor=0.4),
    "phi-3-mini": Phi3Config(num_attention_heads=32, num_key_value_heads=32),
    "mpt-70b": mpt(80, 8192, 64),
    "mpt-30b": mpt(48, 7168, 56),
    "mpt-13b": mpt(40, 5120, 40),
    "mpt-7b": mpt(32, 4096, 32),
    "mpt-3b": mpt(32, 2560, 20),
    "mpt-1b": mpt(24, 2048, 16),
    "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    "gpt-oss-120b": GptOssConfig(),
    "qwen3-30b-a3b": qwen_experts(48, 2048, 768, 32),
    "qwen3-235b": qwen_experts(94, 4096, 1536, 64),
    "deepseek-v3": DeepseekV3Config(),
    "deepseek-v3-4": DeepseekV3Config(num_hidden_layers=4, first_k_dense_replace=1),
    "deepseek-v2-4": DeepseekV2Config(hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536,
                                      num_hidden_layers=4, first_k_dense_replace=1, num_attention_heads=128,
                                      n_routed_experts=160, n_shared_experts=2, num_experts_per_tok=6,
                                      q_lora_rank=1536, vocab_size=102400),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One row of the table, as it is written there."""

    source: str
    model: str
    gpu: str
    mesh: str
    batch: str
    sequence: str
    times: str
    checkpointing: str
    train: str
    weights: str
    gib: str
    speed: str
    engine: str
    otherwise: str

    def estimated(self) -> autoplan.Estimate:
        says = dict(part.partition("=")[::2] for part in self.engine.split(","))
        along = self.mesh.endswith(",sp")
        device = load_device(self.gpu)
        between = float(says["link"]) * 1e9 if "link" in says else device.between
        device = replace(device, per_node=int(says.get("node", device.per_node)), between=between)
        again: Any = {"none": False, "block": True}.get(self.checkpointing, self.checkpointing)
        return autoplan.estimate(
            MODELS[self.model], mesh=self.mesh.removesuffix(",sp"), batch=int(self.batch), sequence=int(self.sequence),
            accumulate=int(self.times), activation_checkpointing=again, sequence_parallel=along, train=self.train,
            weights=self.weights, mp_policy="bf16" if self.weights == "float32" else None, device=device,
            gather_logits="gathered" in says, matmuls="fp8" if "fp8" in says else None,
            gradient_sync="last" if "late" in says else "each", exchange_experts=int(says.get("exchange", 1)),
            chunked_loss="chunked" in says, shard_optimizer="zero1" in says,
            compiled="compiled" in says, virtual_stages=int(says.get("virtual", 1)),
            optimizer="adamw_master" if says.keys() & {"zero1", "master"} else "adamw", cpu_offload="offload" in says,
            lora_rank=int(says.get("rank", 8)), lora_targets=says.get("targets", "").replace("+", ",") or None,
            lora_dropout=float(says.get("dropout", 0)),
            lora_dtype="model" if self.train == "lora" and "cast" not in says else "float32",
        )  # fmt: skip


def runs() -> list[Run]:
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    return [Run(*(cell.strip() for cell in line.strip()[1:-1].split("|"))) for line in lines]


def reason(run: Run, figure: str, off: float | None) -> str:
    """Return the number of the first reason whose words all stand in the run, for an error beyond the bar."""
    if off is None or abs(off) <= BAR:
        return ""
    cells = {*vars(run).values(), *run.mesh.split(","), *run.engine.split(","), f"{run.batch} × {run.sequence}"}
    cells.add("fast" if off > 0 else "slow")
    for line in REASONS.read_text(encoding="utf-8").splitlines():
        number, kind, words, *_ = [cell.strip() for cell in line.strip("|").split("|")] + [""] * 3
        if kind == figure and cells.issuperset(words.split("; ")):
            return f"{figure[0]}{number}"
    return f"{figure[0]}?"


def errors(run: Run, found: autoplan.Estimate) -> tuple[float | None, float | None]:
    """Of memory, without what the context and communicators take, and of speed."""
    gib = (found.peak - found.parts.overhead) / 2**30
    gpus = 1
    for _, size in found.mesh:
        gpus *= size
    speed = found.tokens_per_second / gpus
    return (None if run.gib == "-" else gib / float(run.gib) - 1,
            None if run.speed == "-" else speed / float(run.speed) - 1)  # fmt: skip


def main(*words: str) -> None:
    rows = []
    written: list[tuple[float, tuple[str, ...]]] = []
    for run in runs():
        if not all(any(word in cell for cell in vars(run).values()) for word in words):
            continue
        started = time.process_time()
        try:
            memory, speed = errors(run, run.estimated())
        except autoplan.AutoplanError as error:
            print(run.source, run.model, run.mesh, "cannot be asked:", error.message, flush=True)
            continue
        rows.append((memory, speed, run))
        shown = [f"{one:+.1%}" if one is not None else "-" for one in (memory, speed)]
        why = [reason(run, "memory", memory), reason(run, "speed", speed)]
        name = (run.source, run.model, run.gpu, run.mesh, f"{run.batch} × {run.sequence}", run.checkpointing, run.train,
                run.weights, run.gib, shown[0], run.speed, shown[1], "other" if run.otherwise else "same",
                run.otherwise, " ".join(filter(None, why)))  # fmt: skip
        written.append((max(abs(one) for one in (memory, speed) if one is not None), name))
        cells = (run.source, run.model, run.mesh, f"{run.batch} x {run.sequence}", run.checkpointing, run.train,
                 run.weights, run.gib, run.speed, *shown, run.otherwise)  # fmt: skip
        print(*cells, f"{time.process_time() - started:.0f} s", sep=" | ", flush=True)
    if not words:
        lines = (f"| {' | '.join(cells)} |\n" for _, cells in sorted(written))
        ERRORS.write_text(_HEAD + "".join(lines), encoding="utf-8")
    for place, what in enumerate(("memory", "speed")):
        for matches in (True, False):
            off = [abs(row[place]) for row in rows if row[place] is not None and bool(row[2].otherwise) != matches]
            if off:
                engine = "the engine is the one estimated" if matches else "it is another"
                near, far = (sum(one <= bar for one in off) for bar in (0.1, 0.4))
                print(
                    f"{what}, where {engine}: {len(off)} runs, median error {median(off):.1%}, within 10 %: {near}, "
                    f"within 40 %: {far}"
                )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])

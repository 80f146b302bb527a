"""Decoding speeds that others published, beside the estimates: tokens a second of all GPUs.

python tests/benchmarks/published_decoding.py [WORD …]    # rows in which each word stands

Asked for the mean number of tokens that are cached: the prompt and half of the output. What a kernel of decoding takes
(`_KERNEL` of forecast/steptime.py) was chosen on gpt-fast's rows; all others are held against it.
"""

from __future__ import annotations

import sys
from statistics import median

import published_runs
import torch

import autoplan

LMDEPLOY = "InternLM/lmdeploy docs/en/benchmark/a100_fp16.md (v0.1.0a1)"
GPT_FAST = "pytorch-labs/gpt-fast README.md (A100 at 330 W)"
ORACLE = "Oracle, Serving Llama 3.1 405B with AMD MI300X (vLLM)"
TRT = "NVIDIA/TensorRT-LLM release 0.5.0 docs/source/performance.md (keys and values in fp8)"
NIM = "NVIDIA NIM 1.8.0 for LLMs, Llama-3.3-70B, time between tokens"
# model, device, GPUs of tp, tokens of a prompt and of an output, sequences, weights, tokens a second, who says so
ROWS = (
    ("llama-2-7b", "a100", 1, 128, 2048, 1, "bfloat16", 98.92, LMDEPLOY),
    ("llama-2-7b", "a100", 1, 128, 128, 16, "bfloat16", 1272.47, LMDEPLOY),
    ("llama-2-7b", "a100", 1, 128, 2048, 64, "bfloat16", 1852.06, LMDEPLOY),
    ("llama-2-13b", "a100", 1, 128, 2048, 1, "bfloat16", 55.29, LMDEPLOY),
    ("llama-2-13b", "a100", 1, 128, 128, 32, "bfloat16", 1301.27, LMDEPLOY),
    ("llama-2-70b", "a100", 4, 128, 2048, 1, "bfloat16", 32.38, LMDEPLOY),
    ("llama-2-70b", "a100", 4, 128, 2048, 64, "bfloat16", 1391.8, LMDEPLOY),
    ("llama-2-7b", "a100", 1, 5, 200, 1, "bfloat16", 104.9, GPT_FAST),
    ("llama-2-7b", "a100", 2, 5, 200, 1, "bfloat16", 168.84, GPT_FAST),
    ("llama-2-7b", "a100", 4, 5, 200, 1, "bfloat16", 254.02, GPT_FAST),
    ("llama-2-7b", "a100", 8, 5, 200, 1, "bfloat16", 328.43, GPT_FAST),
    ("llama-2-7b", "a100", 1, 5, 200, 1, "int8", 155.58, GPT_FAST),
    ("llama-2-7b", "a100", 1, 5, 200, 1, "gptq", 196.8, GPT_FAST),
    ("llama-2-70b", "a100", 1, 5, 200, 1, "int8", 19.13, GPT_FAST),
    ("llama-2-70b", "a100", 2, 5, 200, 1, "bfloat16", 21.32, GPT_FAST),
    ("llama-2-70b", "a100", 4, 5, 200, 1, "bfloat16", 38.01, GPT_FAST),
    ("llama-2-70b", "a100", 8, 5, 200, 1, "bfloat16", 62.5, GPT_FAST),
    ("mixtral-8x7b", "a100", 2, 5, 200, 1, "bfloat16", 96.67, GPT_FAST),
    ("mixtral-8x7b", "a100", 4, 5, 200, 1, "bfloat16", 155.35, GPT_FAST),
    ("mixtral-8x7b", "a100", 8, 5, 200, 1, "bfloat16", 227.82, GPT_FAST),
    ("llama-3.1-405b", "mi300x", 8, 128, 128, 1, "fp8", 36, ORACLE),
    ("llama-3.1-405b", "mi300x", 8, 128, 128, 16, "fp8", 468, ORACLE),
    ("llama-3.1-405b", "mi300x", 8, 128, 128, 64, "fp8", 1184, ORACLE),
    ("llama-2-7b", "h100", 1, 128, 2048, 64, "fp8", 5367, TRT),
    ("llama-2-70b", "h100", 4, 128, 2048, 64, "fp8", 2616, TRT),
    ("llama-3.1-70b", "h100", 2, 5000, 500, 1, "fp8", 53.8, NIM),
    ("llama-3.1-70b", "h100", 2, 500, 2000, 1, "fp8", 52.9, NIM),
)


def main(*words: str) -> None:
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in ROWS:
        if not all(any(word in str(cell) for cell in row) for word in words):
            continue
        model, gpu, tp, prompt, output, sequences, weights, measured, source = row
        found = autoplan.estimate(
            published_runs.MODELS[model], mesh=f"tp={tp}", sequence=prompt + output // 2, train="inference", device=gpu,
            concurrency=sequences, weights=weights, cache_dtype="fp8" if source == TRT else None,
        )  # fmt: skip
        off = found.decoded_per_second / measured - 1
        errors[source == GPT_FAST].append(abs(off))
        print(*row[:-2], measured, f"{found.decoded_per_second:.1f}", f"{off:+.1%}", source, sep=" | ", flush=True)
    for chosen, off in errors.items():
        if off:
            near = sum(error <= 0.4 for error in off)
            which = "chosen on" if chosen else "held against"
            print(f"{which}: {len(off)} rows, median error {median(off):.1%}, within 40 %: {near}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])

"""Checkpoints and GPUs that are known to serve them, or to be too few: does the estimate fit where it should?

python tests/benchmarks/serving_layouts.py [WORD …]    # rows in which each word stands
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import autoplan
from autoplan.forecast.devices import load_device

SHAPES = Path(__file__).parents[2] / "examples" / "shapes" / "quantised"
VLLM, OPENAI = "vLLM recipes", "openai/gpt-oss README"
APART = "experts apart"  # blocks of 128 cannot be cut by 8
# checkpoint, GPUs, device, tokens of the one sequence, whether it runs, who says so
LAYOUTS = (
    ("deepseek-r1-fp8", 8, "h200", 8192, True, f"{VLLM}: DeepSeek-V3 (R1) usage guide"),
    ("llama-3.1-405b-fbgemm-fp8", 8, "h100", 8192, True, "Meta's release of Llama 3.1: one server of eight H100"),
    ("qwen3-235b-a22b-fp8", 4, "h100", 8192, True, "reports of users"),
    ("llama-3.3-70b-fp8-dynamic", 1, "h200", 8192, True, "reports of users"),
    ("gpt-oss-120b-mxfp4", 1, "h100", 8192, True, f"{OPENAI}: one GPU of 80 GB"),
    ("gpt-oss-20b-mxfp4", 1, "rtx4090", 8192, True, f"{OPENAI}: 16 GB"),
    ("glm-4.6-fp8", 4, "h200", 8192, True, f"{VLLM}: GLM-4.X"),
    ("minimax-m2.5-fp8", 4, "h100", 8192, True, f"{VLLM}: MiniMax-M2"),
    ("qwen3-coder-480b-a35b-fp8", 8, "h200", 32768, True, f"{VLLM}: Qwen3-Coder, {APART}"),
    ("kimi-k2-thinking-int4", 8, "h200", 8192, True, f"{VLLM}: Kimi-K2-Thinking"),
    ("kimi-k2-fp8", 16, "h200", 8192, True, "Moonshot's deployment guide: 16 H800 or H200"),
    ("llama-3.1-405b-awq", 4, "a100", 8192, True, "hugging-quants' model card: 203 GiB"),
    ("deepseek-r1-fp8", 8, "h100", 8192, False, "642 GiB of weights, 596 of memory"),
    ("kimi-k2-fp8", 8, "h100", 8192, False, "Moonshot's deployment guide"),
    ("qwen3-coder-480b-a35b-fp8", 4, "h100", 8192, False, "about 450 GiB of weights, 298 of memory"),
    ("llama-3.1-405b-fbgemm-fp8", 4, "h100", 8192, False, "about 390 GiB of weights, 298 of memory"),
    ("gpt-oss-120b-mxfp4", 1, "rtx5090", 8192, False, "about 60 GiB of weights, 30 of memory"),
    ("qwen2.5-72b-gptq-int4", 1, "rtx5090", 8192, False, "about 39 GiB of weights, 30 of memory"),
)


def main(*words: str) -> None:
    right = 0
    rows = [row for row in LAYOUTS if all(any(word in str(cell) for cell in row) for word in words)]
    for name, gpus, gpu, tokens, runs, source in rows:
        device = load_device(gpu)
        try:
            found = autoplan.estimate(
                str(SHAPES / name), mesh=f"tp={gpus}", sequence=tokens, train="inference", device=device,
                ep_size=gpus if APART in source else 1,
            )  # fmt: skip
        except autoplan.AutoplanError as error:
            print(name, f"{gpus} × {gpu}", "cannot be asked:", error.message, sep=" | ", flush=True)
            continue
        fits = found.peak <= device.memory
        right += fits == runs
        said = "fits" if fits else "does not fit"
        print(name, f"{gpus} × {gpu}", f"{found.peak / 2**30:.1f} of {device.memory / 2**30:.1f} GiB", said,
              "as known" if fits == runs else "OTHERWISE", source, sep=" | ", flush=True)  # fmt: skip
    print(f"{right} of {len(rows)} as known")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])

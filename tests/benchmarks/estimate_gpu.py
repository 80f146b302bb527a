"""Estimated peak memory and seconds held against one real GPU: models of real widths and few layers, trained two steps.

    make bench-gpu

Prints, for each case, `torch.cuda.max_memory_allocated` of a step (update included), the estimate, and the error.
Without a GPU it says so, and nothing is held against anything.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import autoplan
from autoplan.forecast.devices import load_device
from autoplan.forecast.estimate import Asked, estimate_with
from autoplan.forecast.step import Setting, Steps, inputs_of, loss_of
from autoplan.hf.source import resolve

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "helpers")]
from adapters import with_adapters  # noqa: E402
from estimate_memory import MODELS  # noqa: E402

BATCH, SEQUENCE = 1, 2048
WAYS: tuple[tuple[str, bool, bool | str], ...] = (
    ("as it is", False, False), ("blocks again", False, True), ("adapters", True, False)
)  # fmt: skip


def measured(steps: Steps, checkpointing: bool | str) -> tuple[int, float]:
    """Peak bytes and seconds of the second step."""
    from torch.distributed.device_mesh import init_device_mesh

    model = steps.source.module().to_empty(device="cuda")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor.detach(), std=0.02)
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("tp",))
    options: dict[str, Any] = {"activation_checkpointing": checkpointing} if checkpointing else {}
    autoplan.parallelize(model, mesh, steps.plan(1), check=False, **options)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    setting = Setting(batch=BATCH, sequence=SEQUENCE)
    inputs = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in inputs_of(steps, setting).items()}
    taken = 0.0
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        loss = loss_of(model(**inputs), None)
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        taken = time.perf_counter() - started
    return torch.cuda.max_memory_allocated(), taken


def main() -> None:
    if not torch.cuda.is_available():
        print("no GPU here: no estimate was held against the memory of a real one")
        return
    device = load_device(sys.argv[1] if len(sys.argv) > 1 else "h100")
    table = Table("model", "how", "GPU GiB", "estimate GiB", "off by", "GPU s", "estimate s")
    for name, build in MODELS.items():
        for how, adapted, checkpointing in WAYS:
            steps = Steps(resolve(with_adapters(build()) if adapted else build()))
            found = estimate_with(steps, Asked((("tp", 1),), BATCH, SEQUENCE, checkpointing), device)
            ours = found.peak - found.parts.overhead
            peak, seconds = measured(steps, checkpointing)
            told = found.time.total if found.time else 0.0
            table.add_row(name, how, f"{peak / 2**30:.2f}", f"{ours / 2**30:.2f}", f"{ours / peak - 1:+.1%}",
                          f"{seconds:.2f}", f"{told:.2f}")  # fmt: skip
            torch.cuda.empty_cache()
    Console(width=140).print(f"on {torch.cuda.get_device_name()}", table)


if __name__ == "__main__":
    main()

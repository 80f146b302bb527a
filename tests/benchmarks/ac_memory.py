"""Peak memory of activations with and without checkpointing, on a deep and tiny model. Prints, asserts nothing.

    python tests/benchmarks/ac_memory.py [--depth 24] [--length 256]

Without checkpointing every block keeps its activations: memory grows as depth × what a block keeps. With it a block
keeps its input and one block at a time is computed again: depth × input + what a block keeps. Every tensor that is
made is counted as long as it lives, so no GPU is needed.
"""

from __future__ import annotations

import argparse
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan
from autoplan.execute.checkpointing.blocks import checkpoint_blocks
from autoplan.execute.tensor_parallel import record
from autoplan.values import Plan


class Peak(TorchDispatchMode):
    """Bytes of all storages made inside that are alive, and the most there ever were; `known` ones do not count."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.alive = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.alive:
                    self.alive[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._free, key)
        self.most = max(self.most, self.now)
        return result

    def _free(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)


def peak(depth: int, length: int, mode: Any) -> tuple[int, int]:
    """The most bytes alive during one forward and backward, gradients left out; and the estimate of what is saved."""
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=depth,
        vocab_size=256,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plan = Plan("llama", 1, layers=autoplan.layers(model))
    record(model, plan)
    if mode:
        checkpoint_blocks(model, plan.layers, mode)
    ids = torch.randint(256, (2, length))
    known = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    with Peak([*known, *model.buffers()]) as seen:
        model(ids, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    done = autoplan.applied(model)
    assert done is not None
    return seen.most, done.saved_bytes * ids.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--length", type=int, default=256)
    given = parser.parse_args()
    torch.set_num_threads(1)
    plain, _ = peak(given.depth, given.length, None)
    kept, whole = block_memory(given.length)
    theory = (given.depth * kept + whole) / (given.depth * whole)
    print(f"depth {given.depth}, {2 * given.length} tokens: without checkpointing {plain / 2**20:8.1f} MiB")
    for mode in ("block", "submodule", "selective"):
        most, saved = peak(given.depth, given.length, mode)
        said = f"; theory, blocks alone: {theory:.2f}" if mode == "block" else ""
        print(f"{mode:<10} {most / 2**20:8.1f} MiB, ratio {most / plain:.2f} (saves {(plain - most) / 2**20:.1f} MiB, "
              f"estimated {saved / 2**20:.1f}){said}")  # fmt: skip


def block_memory(length: int) -> tuple[float, float]:
    """(bytes of a block's input, bytes that a block keeps), from two depths without checkpointing."""
    shallow, deep = peak(2, length, None)[0], peak(6, length, None)[0]
    return 2 * length * 128 * 4, (deep - shallow) / 4


if __name__ == "__main__":
    main()

"""How much memory the loss takes: logits split over the vocabulary against gathered ones. Asserts nothing.

    python tests/benchmarks/loss_memory.py [--tokens 2048] [--vocabulary 32000] [--tp 1 2 4 8] [--device cpu|cuda]

One rank of a fake process group runs a head, a loss as transformers compute it (in float32), and its backward. What is
measured is what lies above the parameters, at its peak: on a GPU by the allocator, on a CPU by adding up the storages
that torch operations make, as long as they live.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.loss.loss_utils import ForCausalLMLoss

import autoplan


class Model(nn.Module):
    """The end of a language model: a head, and the loss from labels."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, states: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(states)
        if labels is None:
            return {"logits": logits}
        return {"loss": ForCausalLMLoss(logits, labels, self.vocabulary), "logits": logits}


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made inside the block and not freed yet; `peak` is the most there were at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self.known.add(tensor.untyped_storage()._cdata)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor.untyped_storage())
        return result

    def note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.known or storage.device.type == "meta":
            return
        size, key = storage.nbytes(), storage._cdata
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, key, size)

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def peak(step: Callable[[], None], device: str) -> int:
    """The most bytes alive during `step` above those before it."""
    if device == "cuda":
        step()  # the second time the allocator and the libraries have what they keep
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as live:
        step()
    return live.peak


def measure(tp: int, gather_logits: bool, tokens: int, vocabulary: int, device: str) -> int:
    """Peak bytes of forward and backward through head and loss, on one of `tp` ranks."""
    width = 64
    model = Model(width, vocabulary).bfloat16()
    states = torch.randn(1, tokens, width, dtype=torch.bfloat16, device=device)
    labels = torch.randint(vocabulary // max(tp, 1), (1, tokens), device=device)
    plan = autoplan.plan(model, tp, prove="none", inputs={"states": states.cpu()})
    mesh = init_device_mesh(device, (tp,), mesh_dim_names=("tp",))
    autoplan.parallelize(model.to(device), mesh, plan, gather_logits=gather_logits)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(states, labels=labels)["loss"].backward()

    return peak(step, device)


def main() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--tokens", type=int, default=2048)
    asked.add_argument("--vocabulary", type=int, default=32000)
    asked.add_argument("--tp", type=int, nargs="*", default=[2, 4, 8])
    asked.add_argument("--device", default="cpu")
    given = asked.parse_args()
    print(f"{given.tokens} tokens, a vocabulary of {given.vocabulary}, bfloat16 logits; peak MB of head and loss")
    for tp in given.tp:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
        found = [measure(tp, whole, given.tokens, given.vocabulary, given.device) / 1e6 for whole in (True, False)]
        print(f"  tp {tp}: gathered {found[0]:8.1f}   split {found[1]:8.1f}   ratio {found[1] / found[0]:.3f}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What other tools would say of the memory of a rank: their published formulas, on our cases, read in their favour.

Both count a parameter at the bytes that our cases give it (weight, gradient and two states, all in bfloat16), and what
they know nothing of is given to them: accelerate knows no ranks, so its figure is divided by all of them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["accelerate_bytes", "megatron_bytes"]

_HELD = 4 * 2  # bytes of a trained parameter: weight, gradient, two states


def accelerate_bytes(model: nn.Module, dims: dict[str, int]) -> int:
    """`accelerate estimate-memory`, "training using Adam": four times the model, and nothing for activations.

    huggingface/accelerate, src/accelerate/commands/estimate.py, estimate_training_usage.
    """
    return _parameters(model) * _HELD // _product(dims)


def megatron_bytes(model: nn.Module, dims: dict[str, int], batch: int, sequence: int) -> int | None:
    """Megatron-LM's report_theoretical_memory without sequence parallelism; None where it has no formula.

    NVIDIA/Megatron-LM, megatron/training/theoretical_memory_usage.py: it refuses hybrids, and knows one stack of
    layers, all of whose weights are trained. Recomputation is not in it.
    """
    config: Any = getattr(model, "config", None)
    one_stack = hasattr(config, "hidden_size") and not getattr(config, "is_encoder_decoder", False)
    hybrid = any(name.startswith("mamba") for name in vars(config))
    if not one_stack or hybrid or not all(p.requires_grad for p in model.parameters()):
        return None
    tokens, tp = batch * sequence, dims.get("tp", 1)
    layers = tokens * config.hidden_size * (10 + 24 / tp) * config.num_hidden_layers
    embedding = 8 * tokens + tokens * config.hidden_size
    head = 2 * tokens * (config.vocab_size / tp + config.hidden_size)
    return int(_parameters(model) * _HELD / _product(dims) + 1.05 * (layers + embedding + head))


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _product(dims: dict[str, int]) -> int:
    ranks = 1
    for size in dims.values():
        ranks *= size
    return ranks

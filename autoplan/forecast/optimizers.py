"""Bytes that each optimizer keeps for a trained number: the table that `optimizer=` and `--optimizer` choose from.

In: a trained parameter as it lies on a rank, and whether it is inside a block. Out: bytes of state for each element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autoplan.forecast.sharded import Held

_BLOCK = 256  # numbers that share a scale in bitsandbytes' 8-bit states (bitsandbytes/optim/optimizer.py)
_SCALE = 4


@dataclass(frozen=True)
class Optimizer:
    """`bytes_of(parameter, inside a block)`: for each element; `source`: whose code it is; `paged`: states are moved to
    the host when the device is short."""

    bytes_of: Callable[[Held, bool], float]
    source: str
    paged: bool = False


def _numbers(count: int) -> Callable[[Held, bool], float]:
    """As many numbers in the dtype of the parameter."""
    return lambda held, inside: count * held.size


def _eight_bits(count: int) -> Callable[[Held, bool], float]:
    return lambda held, inside: count * (1 + _SCALE / _BLOCK)


def _factored(held: Held, inside: bool) -> float:
    """A row and a column of second moments for each matrix, all of them for vectors."""
    if len(held.shape) < 2:
        return float(held.size)
    rows, columns = held.shape[-2:]
    return held.size * (rows + columns) / max(1, rows * columns)


def _muon(held: Held, inside: bool) -> float:
    """One momentum for matrices inside of blocks; embeddings, the head and vectors are AdamW's."""
    return (1 if inside and len(held.shape) > 1 else 2) * held.size


def _with_master(held: Held, inside: bool) -> float:
    """Two numbers in float32, and the weight itself where it is narrower."""
    return 8 + (4 if held.size < 4 else 0)


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(_numbers(2), "torch.optim.AdamW"),
    "adam": Optimizer(_numbers(2), "torch.optim.Adam"),
    "adamw_master": Optimizer(_with_master, "AdamW of Megatron-LM and DeepSpeed, with float32 weights beside"),
    "adamw8bit": Optimizer(_eight_bits(2), "bitsandbytes.optim.AdamW8bit"),
    "paged_adamw": Optimizer(_numbers(2), "bitsandbytes.optim.PagedAdamW", paged=True),
    "paged_adamw8bit": Optimizer(_eight_bits(2), "bitsandbytes.optim.PagedAdamW8bit", paged=True),
    "adafactor": Optimizer(_factored, "torch.optim.Adafactor"),
    "muon": Optimizer(_muon, "torch.optim.Muon, with AdamW outside of blocks"),
    "lion": Optimizer(_numbers(1), "lion-pytorch"),
    "lion8bit": Optimizer(_eight_bits(1), "bitsandbytes.optim.Lion8bit"),
    "adagrad": Optimizer(_numbers(1), "torch.optim.Adagrad"),
    "rmsprop": Optimizer(_numbers(1), "torch.optim.RMSprop"),
    "momentum": Optimizer(_numbers(1), "torch.optim.SGD with momentum"),
    "sgd": Optimizer(_numbers(0), "torch.optim.SGD"),
    "none": Optimizer(_numbers(0), "no update"),
}

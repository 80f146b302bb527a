"""What a step trains: low-rank adapters put into a model that has none, and the bytes that optimizers keep.

Adapters are two thin linear layers of plain torch beside each target; all else is frozen. Targets are named as peft
names them. Experts in one tensor get none. OPTIMIZERS is the table behind `optimizer=`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capture.fold import fold
from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.options import check_count
from autoplan.forecast.sharded import Held
from autoplan.hf.stacks import layers
from autoplan.values.estimate import TRAIN

LORA_RANK = 8  # of peft's LoraConfig
ALL_LINEAR = "all-linear"


class Adapted(nn.Module):
    """A frozen linear layer `inner`, and beside it the low-rank update of what `dropout` leaves. Who reads its weight
    reads that of `inner`. `wide`: the update is in float32, as peft casts it, and its input is cast to it."""

    def __init__(self, inner: nn.Module, rank: int, dropout: float = 0.0, *, wide: bool = False) -> None:
        super().__init__()
        self.inner = inner
        own = inner.get_parameter("weight")
        assert own.dim() == 2
        taken, out_features = own.shape if conventions().is_transposed_linear(inner) else own.shape[::-1]
        dtype = torch.float32 if wide and own.dtype in (torch.bfloat16, torch.float16) else own.dtype
        self.down = nn.Linear(taken, rank, bias=False, device="meta", dtype=dtype)
        self.up = nn.Linear(rank, out_features, bias=False, device="meta", dtype=dtype)
        self.dropout = dropout

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value: torch.Tensor | nn.Module = getattr(super().__getattr__("inner"), name)
            return value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cast = x.to(self.down.weight.dtype)
        left = F.dropout(cast, self.dropout, self.training) if self.dropout else cast
        frozen: torch.Tensor = self.inner(x)
        return (frozen + self.up(self.down(left))).to(frozen.dtype)


def targets_of(targets: str | Sequence[str] | None) -> tuple[str, ...] | str | None:
    """Parse the targets: a text names one layer, several between commas, or all linear ones."""
    if targets is None or targets == ALL_LINEAR:
        return targets
    names = targets.split(",") if isinstance(targets, str) else targets
    texts = isinstance(names, Sequence) and all(isinstance(name, str) and name.strip() for name in names)
    if not texts or not names:
        raise AutoplanError(f"lora_targets={targets!r}", hint=f"suffixes of layer names, or {ALL_LINEAR}")
    return tuple(name.strip() for name in names)


LORA_DTYPES = ("float32", "model")


def check_adapters(train: str, rank: int, targets: object, dropout: float, dtype: str = LORA_DTYPES[0]) -> None:
    """Refuse what no adapters can have, and adapters for a step that trains something else."""
    check_count("lora_rank", rank)
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise AutoplanError(f"lora_dropout={dropout!r}", hint="pass a fraction, such as 0.05")
    if dtype not in LORA_DTYPES:
        raise AutoplanError(f"lora_dtype={dtype!r}", hint=f"choose one of {', '.join(LORA_DTYPES)}")
    changed = {"lora_rank": rank != LORA_RANK, "lora_targets": targets is not None, "lora_dropout": dropout,
            "lora_dtype": dtype != LORA_DTYPES[0]}  # fmt: skip
    if train in TRAIN and train != "lora" and any(changed.values()):
        named = ", ".join(name for name, differs in changed.items() if differs)
        raise AutoplanError(f"{named} with train={train!r}", hint='only train="lora" adds adapters')


def with_adapters(
    model: nn.Module, rank: int, targets: tuple[str, ...] | str, dropout: float = 0.0, *, wide: bool = False
) -> nn.Module:
    """A copy of `model` without storage, frozen, with adapters beside the targets."""
    copy = fold(model, fold=False).module.requires_grad_(False)
    inside = tuple(f"{name}." for stack in layers(copy) for name in stack.fqns) or ("",)
    adapted: dict[nn.Module, Adapted] = {}
    for path, part in list(copy.named_modules(remove_duplicate=False)):
        for key, child in list(part.named_children()):
            name = f"{path}.{key}" if path else key
            own = not isinstance(part, nn.MultiheadAttention)  # which reads the weight, and calls no layer
            linear = isinstance(child, nn.Linear) and own or conventions().is_transposed_linear(child)
            if linear and (name.startswith(inside) if targets == ALL_LINEAR else _is_target(name, targets)):
                setattr(part, key, adapted.setdefault(child, Adapted(child, rank, dropout, wide=wide)))
    if not adapted:
        named = targets if isinstance(targets, str) else ", ".join(targets)
        lacks = f"no linear layer named {named}"
        hint = f"pass the names of the adapted layers in lora_targets (--lora-targets), or {ALL_LINEAR}"
        if targets == ALL_LINEAR:
            lacks = "no linear layers to add adapters to, and no parameter of it is frozen"
            hint = 'freeze what is not trained and pass the model itself, or use train="full"'
        raise AutoplanError(f"{type(model).__name__} has {lacks}", hint=hint)
    return copy.train(model.training)


def _is_target(name: str, targets: tuple[str, ...] | str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


_BLOCK = 256  # numbers that share a scale in bitsandbytes' 8-bit states (bitsandbytes/optim/optimizer.py)
_SCALE = 4


@dataclass(frozen=True)
class Optimizer:
    """`bytes_of(parameter, inside a block)`: for each element; `source`: whose code it is; `together`: numbers that its
    step makes for each trained one, `alone`: bytes for each number of the largest, where it takes one parameter after
    the other; `paged`: states are moved to the host when the device is short; `gradient`: bytes of a
    gradient's element, where it is kept in another dtype."""

    bytes_of: Callable[[Held, bool], float]
    source: str
    together: int = 0
    alone: Callable[[Held], float] = lambda held: 0
    paged: bool = False
    gradient: int = 0


def _numbers(count: int) -> Callable[[Held, bool], float]:
    """Return as many numbers in the dtype of the parameter."""
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


def _newton_schulz(held: Held) -> float:
    """The update, and two of its size and two products of its shorter side in bfloat16."""
    sides = held.shape[-2:] or (1,)
    return held.size + 4 + 4 * min(sides) / max(sides)


def _with_master(held: Held, inside: bool) -> float:
    """Two numbers in float32, and the weight itself where it is narrower."""
    return 8 + (4 if held.size < 4 else 0)


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(_numbers(2), "torch.optim.AdamW, its foreach form", 1),
    "adam": Optimizer(_numbers(2), "torch.optim.Adam, its foreach form", 1),
    "adamw_fused": Optimizer(_numbers(2), "torch.optim.AdamW(fused=True)"),
    "adamw_master": Optimizer(
        _with_master,
        "AdamW of Megatron-LM and DeepSpeed, with additional float32 weights; gradients in float32",
        gradient=4,
    ),
    "adamw8bit": Optimizer(_eight_bits(2), "bitsandbytes.optim.AdamW8bit"),
    "paged_adamw": Optimizer(_numbers(2), "bitsandbytes.optim.PagedAdamW", paged=True),
    "paged_adamw8bit": Optimizer(_eight_bits(2), "bitsandbytes.optim.PagedAdamW8bit", paged=True),
    "adafactor": Optimizer(_factored, "torch.optim.Adafactor", alone=lambda held: 2 * held.size),
    "muon": Optimizer(_muon, "torch.optim.Muon, with AdamW outside blocks", alone=_newton_schulz),
    "lion": Optimizer(_numbers(1), "lion-pytorch", alone=lambda held: held.size),
    "lion8bit": Optimizer(_eight_bits(1), "bitsandbytes.optim.Lion8bit"),
    "adagrad": Optimizer(_numbers(1), "torch.optim.Adagrad, its foreach form", 2),
    "rmsprop": Optimizer(_numbers(1), "torch.optim.RMSprop, its foreach form", 1),
    "momentum": Optimizer(_numbers(1), "torch.optim.SGD with momentum"),
    "sgd": Optimizer(_numbers(0), "torch.optim.SGD"),
    "none": Optimizer(_numbers(0), "no update"),
}

"""Say what a case is: a tiny model, the calls made on it, and the outcomes that are allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["CASES", "HOSTILE", "SOUND", "Call", "Case", "Setting", "call", "case", "floats", "ids"]

SOUND = ("exact",)
HOSTILE = ("exact", "refused")
HOW = ("ac", "bf16", "meta")


@dataclass(frozen=True)
class Call:
    """One call of the model. `do` takes (model, *args, **kwargs) where a plain call is not what is wanted."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    train: bool = False
    grad: bool = True
    autocast: torch.dtype | None = None
    do: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Setting:
    """Sizes of the mesh, and whether the stream is cut along the sequence too: "tp2", "tp4+sp", "tp2+cp2", "tp2+dp2".

    Ranks of a data-parallel dim are given the same data, so that means over them are what one process has. `how`:
    "ac" (blocks are checkpointed), "bf16" (the model is in bfloat16), "meta" (it is built on meta, and loaded).
    """

    tp: int = 2
    sequence: bool = False
    cp: int = 1
    dp: int = 1
    how: tuple[str, ...] = ()

    @classmethod
    def parse(cls, told: str) -> Setting:
        parts = told.split("+")
        sizes = {part[:2]: int(part[2:]) for part in parts if part != "sp" and part not in HOW}
        how = tuple(part for part in HOW if part in parts)
        return cls(sizes.get("tp", 1), "sp" in parts, sizes.get("cp", 1), sizes.get("dp", 1), how)

    def __str__(self) -> str:
        sizes = [f"{name}{size}" for name, size in (("tp", self.tp), ("cp", self.cp), ("dp", self.dp)) if size > 1]
        return "+".join([*sizes, *(["sp"] if self.sequence else []), *self.how])

    @property
    def mesh(self) -> dict[str, int]:
        """Its dims, outermost first."""
        sizes = (("dp_shard", self.dp), ("cp", self.cp), ("tp", self.tp))
        return {name: size for name, size in sizes if size > 1}

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp


@dataclass(frozen=True)
class Case:
    """One model and what is done with it.

    `inputs` go to plan; `plan_for` builds the model that the plan is made for, where that is another one, and the plan
    travels by `through` ("file", "cache"). `input_gradients`: do inputs ask for gradients. `prepare` is called on both
    models before the first call. `vary` adds calls in other modes and sizes. `draws` compares distributions over so
    many calls, for models that draw random numbers. `shards`: a plan that splits nothing counts as a refusal.
    """

    kind: str
    name: str
    build: Callable[[], nn.Module]
    calls: tuple[Call, ...]
    allowed: tuple[str, ...] = SOUND
    settings: tuple[Setting, ...] = (Setting(),)
    inputs: Mapping[str, Any] | None = None
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-6
    plan_for: Callable[[], nn.Module] | None = None
    through: str = "file"
    prepare: Callable[[nn.Module], Any] | None = None
    vary: bool = True
    draws: int = 0
    shards: bool = False
    input_gradients: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def ids(self) -> list[str]:
        return [f"{self.kind}/{self.name}@{setting}" for setting in self.settings]


CASES: dict[str, Case] = {}


def call(*args: Any, **kwargs: Any) -> Call:
    """Return a call; `_train`, `_grad`, `_autocast` and `_do` are its options, all else goes to the model."""
    options = {name: kwargs.pop(f"_{name}") for name in ("train", "grad", "autocast", "do") if f"_{name}" in kwargs}
    return Call(args, kwargs, **options)


def case(
    *calls: Call,
    tp: int | tuple[int, ...] = 2,
    sequence: bool | None = False,
    cp: int | None = None,
    dp: int | None = None,
    also: str = "",
    **options: Any,
) -> Callable[..., Any]:
    """Register the decorated class or function, which builds the model, as a case of its file's class.

    `sequence`: True: with sequence parallelism; None: with and without it. `cp`: with context parallelism too;
    `dp`: with data-parallel ranks too; `also`: in another setting.
    """
    sizes = (tp,) if isinstance(tp, int) else tp
    kinds = (False, True) if sequence is None else (sequence,)
    settings = tuple(Setting(size, kind) for size in sizes for kind in kinds)
    settings += (Setting(1, cp=cp),) if cp else ()
    settings += (Setting(sizes[0], dp=dp),) if dp else ()
    settings += (Setting.parse(also),) if also else ()

    def register(build: Any) -> Any:
        kind = build.__module__.rpartition(".")[2]
        if f"{kind}/{build.__name__}" in CASES:
            raise ValueError(f"two cases are called {kind}/{build.__name__}")
        CASES[f"{kind}/{build.__name__}"] = Case(kind, build.__name__, build, calls, settings=settings, **options)
        return build

    return register


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random numbers, the same in every process. They are cloned, and cast to the case's dtype, before use."""
    generator = torch.Generator().manual_seed(seed * 1000 + sum(shape) + 7 * math.prod(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def ids(*shape: int, below: int = 32, seed: int = 0) -> torch.Tensor:
    """Return random token ids, the same in every process."""
    generator = torch.Generator().manual_seed(seed * 1000 + sum(shape) + 7 * math.prod(shape))
    return torch.randint(below, shape, generator=generator)

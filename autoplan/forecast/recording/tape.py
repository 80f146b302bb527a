"""What one step of a model did with memory and messages, in the order in which it did it.

The recorded model holds few blocks of each kind. A tape knows where each block begins and ends, forward and backward,
so the steps of a block that was left out are those of the block that stands for it, at its own place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Storage:
    """One piece of memory. `gradient`: of a parameter; `kept`: made forward and freed later than its forward."""

    bytes: int
    kind: Literal["kept", "temporary", "gradient", "communication"]


@dataclass(frozen=True, slots=True)
class Changed:
    """A storage came (+1) or went (-1), while `module` ran."""

    storage: int
    sign: int
    module: str


@dataclass(frozen=True, slots=True)
class Worked:
    """One op: floating-point operations, and bytes read and written. `layer`: "linear" or "experts", of products with
    their weights (and in backward, of those that stand for them)."""

    flops: int
    bytes: int
    dtype: str
    module: str
    layer: Literal["", "linear", "experts"] = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One collective over the ranks of `dim`: bytes that go in, and bytes that come out."""

    kind: str
    dim: str
    sent: int
    received: int
    module: str


@dataclass(frozen=True, slots=True)
class UnitEvent:
    """A unit of data parallelism is about to run, or has run: parameters come, go, or their gradients are summed."""

    unit: str
    when: Literal["before", "after"]
    phase: Phase


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a repeated stack begins or ends."""

    name: str
    when: Literal["before", "after"]
    phase: Phase


@dataclass(frozen=True, slots=True)
class Place:
    """A module outside of the stacks runs forward: memory is told for it apart."""

    name: str


LeftOut = Mapping[
    str, tuple[tuple[str, str], ...]
]  # recorded block -> those left out after it, and who stands for each
Item = Changed | Worked | Message | UnitEvent | Block | Place


@dataclass(frozen=True)
class Tape:
    """`items` in order. `end_of_forward`: how many of them are the forward's. `phases` follow from it. `kernels`: the
    libraries whose fused kernels were recorded in the place of their reference."""

    storages: tuple[Storage, ...]
    items: tuple[Item, ...]
    end_of_forward: int
    kernels: tuple[str, ...] = ()

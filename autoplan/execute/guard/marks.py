"""Which tensors of a running forward are not whole on each rank, or carry a part of a gradient.

Only while a guard looks on: results of torch functions take the mark from what they are given, parameters get it where
they are read (execute/parameters/local_views.py), and what the plan does at boundaries and calls sets it or takes it
off, as its instruction says (`gives`).
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from autoplan.common.nested import flatten_tensors
from autoplan.execute.vocabulary.split_logits import SplitLogits
from autoplan.values import Instruction
from autoplan.values.instructions.base import Spread

__all__ = ["Marks", "as_given", "looking_on"]


class Marks:
    """The marked tensors of one forward."""

    def __init__(self) -> None:
        self.tensors: Any = WeakIdKeyDictionary()

    def add(self, value: Any) -> None:
        for _, tensor in flatten_tensors(value):
            if not isinstance(tensor, (DTensor, SplitLogits)):  # these know themselves how they lie
                self.tensors[tensor] = True

    def remove(self, value: Any) -> None:
        for _, tensor in flatten_tensors(value):
            self.tensors.pop(tensor, None)

    def any_in(self, value: Any) -> bool:
        return bool(self.tensors) and any(tensor in self.tensors for _, tensor in flatten_tensors(value))


class _OfThread(threading.local):
    marks: Marks | None = None


this = _OfThread()


def looking_on() -> Marks | None:
    """The marks of the forward that runs in this thread, if it is guarded."""
    return this.marks


def as_given(instruction: Instruction, result: Any) -> Any:
    """The same, marked by how it lies on ranks after an instruction."""
    marks = this.marks
    if marks is None:
        return result
    gives = instruction.gives
    if gives is Spread.REPLICATE and not getattr(instruction, "cuts", ()):
        marks.remove(result)
    elif gives is not Spread.ANY and (gives is not Spread.PARTIAL_GRADIENT or torch.is_grad_enabled()):
        marks.add(result)
    if getattr(instruction, "cuts", ()):
        marks.add(result)
    return result

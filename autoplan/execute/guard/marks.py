"""Which tensors of a running forward are not whole on each rank, or carry a part of a gradient.

Only while a guard looks on: results of torch functions take the mark from what they are given, parameters get it where
they are read (execute/parameters/local_views.py), and what the plan does at boundaries and calls sets it or takes it
off, as its instruction says (`gives`). A whole value of whose gradient each rank makes a part has a mark of its own:
what is computed of it without a gradient is whole.
"""

from __future__ import annotations

import threading
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from autoplan.common.nested import flatten_tensors
from autoplan.execute.vocabulary.split_logits import SplitLogits
from autoplan.values import Instruction
from autoplan.values.instructions.base import Spread

PART, GRADIENT = "part", "gradient"


class Marks:
    """The marked tensors of one forward."""

    def __init__(self) -> None:
        self.tensors: Any = WeakIdKeyDictionary()

    def add(self, value: Any, kind: str = PART) -> None:
        for _, tensor in flatten_tensors(value):
            if kind == GRADIENT and not tensor.requires_grad:
                continue
            if not isinstance(tensor, (DTensor, SplitLogits)):  # these know themselves how they lie
                self.tensors[tensor] = kind

    def remove(self, value: Any) -> None:
        for _, tensor in flatten_tensors(value):
            self.tensors.pop(tensor, None)

    def any_in(self, value: Any) -> bool:
        return bool(self.kind_in(value))

    def kind_in(self, value: Any) -> str:
        """`PART` if a tensor in it is one, else `GRADIENT` or ""."""
        kinds = {self.tensors.get(tensor, "") for _, tensor in flatten_tensors(value)} if self.tensors else ()
        return next((kind for kind in (PART, GRADIENT) if kind in kinds), "")


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
    elif gives is not Spread.ANY:
        marks.add(result, GRADIENT if gives is Spread.PARTIAL_GRADIENT else PART)
    if getattr(instruction, "cuts", ()):
        marks.add(result)
    return result

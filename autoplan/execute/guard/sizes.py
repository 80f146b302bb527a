"""Sizes of a rank's parts, as the model's code reads them while a guard looks on.

A plan may know both ways of `if h.shape[0] == h.shape[-1]`, and a rank takes the wrong one: its part is narrower than
the value. So a size that is read of a part knows that of the whole value too, as far as it can be told (from weights
through linear layers and what keeps shapes), and a comparison which that would answer otherwise is noted. Where the
other side may be a count that sharding has set (`h.shape[-1] == self.heads * self.width`), ranks compare their own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from autoplan.common.code.code_place import call_name
from autoplan.common.nested import changed_inside
from autoplan.ops.elementwise import literals_say

Shape = tuple[int, ...]
Pair = tuple[float, float]
Differs = Callable[[], Callable[[Pair, Pair], None] | None]  # a weak reference: models and caches keep sizes
WholeShapes = Callable[[torch.Tensor], Shape | None]  # None: cannot be told

_KEEP_SHAPES = {"clone", "contiguous", "detach", "double", "dropout", "float", "half", "log_softmax", "softmax"}


class PartSize(int):
    """A size of a part. `whole`: of the value; None: unknown. `differs` hears of comparisons that `whole` would answer
    otherwise: what was compared here, and what it is of the whole value. `counted`: plain numbers may be counts that
    sharding has set, so that nothing is known of what is computed with them."""

    whole: int | None
    differs: Differs
    counted: bool

    @classmethod
    def of(cls, size: int, whole: int | None, differs: Differs, counted: bool) -> PartSize:
        part = cls(size)
        part.whole, part.differs, part.counted = whole, differs, counted
        return part

    def _answer(self, ask: Callable[[Any, Any], bool], other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        here = int(self), int(other) if isinstance(other, PartSize) else other
        whole, facing = self.whole, other.whole if isinstance(other, PartSize) else other
        answer = ask(*here)
        if whole is not None and facing is not None and ask(whole, facing) != answer:
            differs = self.differs()
            if differs is not None:
                differs(here, (whole, facing))
        return answer

    def __reduce__(self) -> Any:  # copies and pickles are plain ints
        return int, (int(self),)


def _computed(name: str, plain: Callable[[Any, Any], Any]) -> None:
    def operate(self: PartSize, other: Any) -> Any:
        result = plain(self, other)
        if type(result) is not int:
            return result
        both = self.whole, other.whole if isinstance(other, PartSize) else None if self.counted else other
        return PartSize.of(result, None if None in both else plain(*both), self.differs, self.counted)

    setattr(PartSize, name, operate)


def _compared(ask: Callable[[Any, Any], bool]) -> None:
    setattr(PartSize, f"__{ask.__name__}__", lambda self, other: self._answer(ask, other))


for _ask in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
    _compared(_ask)
for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _dunder in (f"__{_name}__", f"__r{_name}__"):
        _computed(_dunder, getattr(int, _dunder))


def whole_shape(function: Any, args: Any, kwargs: Any, result: Any, shapes: WholeShapes) -> Shape | None:
    """The shape that the result would have, computed from whole values; None where that cannot be told."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    whole = [shapes(tensor) for tensor in tensors]
    if not isinstance(result, torch.Tensor) or not tensors or None in whole:
        return None
    sizes = [shape for shape in whole if shape is not None]
    name = call_name(function)
    if name == "linear":
        joined = (*sizes[0][:-1], sizes[1][0])
    elif name in _KEEP_SHAPES or literals_say(name) == "elementwise" or (literals_say(name) == "nothing"):
        try:
            joined = tuple(torch.broadcast_shapes(*sizes))
        except RuntimeError:  # a rank's own number of rows meets the whole one
            return None
    else:
        return None
    return joined if fits(result, joined) else None


def plain_sizes(value: Any) -> Any:
    """Return a model's output with plain ints in place of such sizes, which its caller may compare with anything."""
    if isinstance(value, PartSize | torch.Size):
        return torch.Size(map(int, value)) if isinstance(value, torch.Size) else int(value)
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    same = all(isinstance(item, torch.Tensor) or plain_sizes(item) is item for item in items)
    return value if same else changed_inside(value, plain_sizes)


def fits(part: torch.Tensor, whole: Shape) -> bool:
    """Return whether the tensor can be a part of one of that shape."""
    return part.dim() == len(whole) and all(size <= all_of for size, all_of in zip(part.shape, whole, strict=True))

"""Outputs as they leave the model: those that the plan's trace never saw are whole on every rank, or refused.

A caller can ask a model for more than it returned when it was planned (attention weights, hidden states), or for
something else in its place (embeddings instead of logits). Most of what comes then is the same on every rank. Some is
not: attention weights of a rank's own heads, hidden states of its part of the sequence. Nothing in a tensor tells, so
the ranks compare what they hold, once for each output. What was seen is told by its features: what weights decide is as
long as it was recorded.

Where readers of such an output each give a part of its gradient, which is summed further up, its caller gives one too.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoplan.common.errors import PlanMismatchError
from autoplan.common.nested import Path, change_output, flatten_tensors
from autoplan.execute.collectives import RankGroup, all_reduce, gradient_is_summed, scale_gradient
from autoplan.values import OutputShape

__all__ = ["UnseenOutputs"]

_TOLERANCE = 1e-2  # of the largest value: ranks may round apart, parts of different heads differ altogether
_OF_LAYERS = 3  # so deep in tuples lie caches: keys of a layer


class UnseenOutputs:
    """`seen` are the paths of outputs that the plan knows, `shapes` how long those are of which weights decide,
    `names` what forward takes: caches come out and go in."""

    def __init__(
        self, seen: Iterable[Path], shapes: Iterable[OutputShape], names: Iterable[str], group: RankGroup
    ) -> None:
        self.seen, self.shapes = frozenset(seen), {shape.path: shape for shape in shapes}
        self.by_name = any(path and isinstance(path[0], str) for path in self.seen)
        self.names, self.group = frozenset((name,) for name in names), group
        self.whole: set[tuple[Any, ...]] = set()  # what was compared already

    def check(self, output: Any) -> Any:
        """Raise for an output of which each rank has another value. Compiled code is not interrupted for it."""
        if not self.seen or torch.compiler.is_compiling():
            return output
        alike = isinstance(output, dict) == self.by_name
        for path, tensor in list(flatten_tensors(output)):
            if path[:1] in self.names or (not alike and len(path) >= _OF_LAYERS):
                continue
            strange = self._strange(path, tensor) if alike and path in self.seen else ()
            if strange is None or isinstance(tensor, DTensor) and not strange or tensor.dim() == 0:
                continue
            compared = (alike, path, strange)
            if compared not in self.whole:
                if isinstance(tensor, DTensor) or not self._agrees(tensor.detach()):
                    raise _refusal(path, tensor, strange)
                self.whole.add(compared)
            if gradient_is_summed(tensor):
                part = partial(scale_gradient, vector=1.0 / self.group.size)
                output = change_output(output, path, part, "the model")
        return output

    def _strange(self, path: Path, tensor: torch.Tensor) -> tuple[tuple[int, int, int], ...] | None:
        """Features of what was seen that are not as many as they were: (dim, now, then). None: as it was seen."""
        shape = self.shapes.get(path)
        if shape is None or tensor.dim() != shape.dims:
            return None
        found = [(dim, tensor.shape[dim], size) for dim, size in shape.features]
        return tuple((dim, now, size) for dim, now, size in found if now != size) or None

    def _agrees(self, mine: torch.Tensor) -> bool:
        """All ranks come to the same answer: they would wait for each other for ever otherwise."""
        size = torch.tensor([float(mine.numel()), -float(mine.numel())], device=mine.device)
        largest, smallest = all_reduce(size, self.group, "max").tolist()
        if largest != -smallest:
            return False
        values = mine.double() if mine.dtype != torch.bool else mine.to(torch.float64)
        mean = all_reduce(values, self.group) / self.group.size
        finite = torch.isfinite(mean)
        apart = torch.where(finite, (values - mean).abs(), 0.0).max() if mine.numel() else values.new_zeros(())
        bound = torch.where(finite, mean.abs(), 0.0).max() if mine.numel() else apart
        worst = all_reduce(torch.stack([apart, bound]), self.group, "max").tolist()
        return bool(worst[0] <= _TOLERANCE * worst[1])


def _refusal(path: Path, tensor: torch.Tensor, strange: tuple[tuple[int, int, int], ...]) -> PlanMismatchError:
    name = ".".join(map(str, path)) or "output"
    for dim, now, size in strange:
        return PlanMismatchError(
            f"the sharded model returns {name!r} of shape {list(tensor.shape)}: its dim {dim} has {now} features, and "
            f"had {size} when it was planned",
            hint="where this call takes another path, plan with inputs= that show it; else the plan does not "
            "fit this model: make it again, and try it with autoplan.verify(model, plan)",
        )
    return PlanMismatchError(
        f"output {name!r} of shape {list(tensor.shape)} is not the same on all ranks: each has a part of it, and the "
        "plan knows nothing of it, since the model did not return it when it was planned",
        hint="plan with inputs= in which the arguments that ask for it are those of this call, or do without",
    )

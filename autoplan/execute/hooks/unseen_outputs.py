"""Outputs as they leave the model: those that the plan's trace never saw are whole on every rank, or refused.

A caller can ask a model for more than it returned when it was planned (attention weights, hidden states). Most of what
comes then is the same on every rank. Some is not: attention weights of a rank's own heads, hidden states of its part of
the sequence. Nothing in a tensor tells, so the ranks compare what they hold, once for each output.

Of those that were seen, the first forward compares shapes: what weights decide must be as long as it was recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoplan.common.errors import PlanMismatchError
from autoplan.common.nested import flatten_tensors
from autoplan.execute.collectives import RankGroup, all_reduce
from autoplan.values import OutputShape

__all__ = ["UnseenOutputs", "check_shapes"]

_TOLERANCE = 1e-2  # of the largest value: ranks may round apart, parts of different heads differ altogether


def check_shapes(output: Any, shapes: Iterable[OutputShape], names: Iterable[str]) -> None:
    """Raise for an output whose features are not as many as the model's weights make. Looks at shapes alone."""
    found = dict(flatten_tensors(output))
    for shape in shapes:
        tensor = found.get(shape.path)
        if tensor is None or tensor.dim() != shape.dims or shape.path[:1] in [(name,) for name in names]:
            continue
        for dim, size in shape.features:
            if tensor.shape[dim] != size:
                name = ".".join(map(str, shape.path)) or "output"
                raise PlanMismatchError(
                    f"the sharded model returns {name!r} of shape {list(tensor.shape)}: its dim {dim} has "
                    f"{tensor.shape[dim]} features, and had {size} when it was planned",
                    hint="where this call takes another path, plan with inputs= that show it; else the plan does not "
                    "fit this model: make it again, and try it with autoplan.verify(model, plan)",
                )


class UnseenOutputs:
    """`seen` are the paths of outputs that the plan knows, `names` what forward takes: caches come out and go in."""

    def __init__(self, seen: Iterable[tuple[Any, ...]], names: Iterable[str], group: RankGroup) -> None:
        self.known = set(seen)
        self.by_name = any(path and isinstance(path[0], str) for path in self.known)
        self.names, self.group = frozenset(names), group

    def check(self, output: Any) -> None:
        """Raise for an output of which each rank has another value. Compiled code is not interrupted for it."""
        if not self.known or torch.compiler.is_compiling() or isinstance(output, dict) != self.by_name:
            return
        for path, tensor in flatten_tensors(output):
            if path in self.known or path[0] in self.names or isinstance(tensor, DTensor) or tensor.dim() == 0:
                continue
            if not self._agrees(tensor.detach()):
                name = ".".join(map(str, path))
                raise PlanMismatchError(
                    f"output {name!r} of shape {list(tensor.shape)} is not the same on all ranks: each has a part of "
                    "it, and the plan knows nothing of it, since the model did not return it when it was planned",
                    hint=f"plan with inputs= that ask for it (transformers: 'output_{path[0]}': True), or do without",
                )
            self.known.add(path)

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

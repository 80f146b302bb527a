"""Which parts of split weights no trial has read: what a rank computes with them was not seen.

A table whose second half no id looks up, or an expert that gets no token, gives the same however wrongly it is cut.
What is read has a gradient, so a part is taken for unread where the unsharded model's gradient is zero all over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from autoplan.common.layout import Layout
from autoplan.common.patterns import best_match
from autoplan.values import Plan

__all__ = ["unread_parts"]


def unread_parts(gradients: Iterable[Mapping[str, torch.Tensor]], *, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Weights that a plan splits, and the ranks whose part has no gradient in any of these runs."""
    unread: dict[str, set[int]] = {}
    for found in gradients:
        for name, gradient in found.items():
            rule = best_match(plan.runtime.parameters, name)
            if rule is None or rule.dim is None or rule.layout is None or gradient.numel() == 0:
                continue
            layout, zero = Layout.parse(rule.layout), set[int]()
            if layout.size == gradient.shape[rule.dim]:
                others = [dim for dim in range(gradient.dim()) if dim != rule.dim % gradient.dim()]
                read = (gradient != 0).sum(others) if others else gradient != 0
                rows = {rank: list(layout.rows(rank, plan.ranks)) for rank in range(plan.ranks)}
                zero = {rank for rank, held in rows.items() if held and not bool(read[held].any())}
            unread[name] = unread.get(name, zero) & zero
    return {name: tuple(sorted(ranks)) for name, ranks in unread.items() if ranks}

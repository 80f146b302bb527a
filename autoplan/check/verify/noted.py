"""What exact numbers do not show of a run on ranks: were blocks checkpointed to any use, was every part read?

Gradients are exact without checkpointing too. And a table whose second half no id looks up, or an expert that gets no
token, gives the same however wrongly it is cut. What is read has a gradient, so a part is taken for unread where the
unsharded model's gradient is zero all over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autoplan.common.errors import AutoplanError
from autoplan.common.layout import Layout
from autoplan.common.patterns import best_match
from autoplan.values import Plan, Stack


def recomputed(model: Any, stacks: tuple[Stack, ...]) -> tuple[int, int]:
    """Blocks that hold a checkpoint, and how many of them ran again in a backward since.

    All blocks of `stacks` that are trained must hold one. Fewer may run again: nobody waits for the gradient of a block
    whose output is not used.
    """
    from autoplan.execute.checkpointing.blocks import runs_of

    modules = dict(model.named_modules(remove_duplicate=False))
    runs = {id(modules[name]): (name, run) for name, run in runs_of(model).items()}
    listed = {id(modules[name]): name for stack in stacks for name in stack.fqns}
    blocks = [name for name in listed.values() if any(p.requires_grad for p in modules[name].parameters())]
    again = 0
    for name in blocks:
        inside = [runs[id(part)] for part in modules[name].modules() if id(part) in runs]
        if not inside:
            raise AutoplanError(
                f"{name} was not checkpointed", hint="autoplan.applied(model).notes says what was left out"
            )
        for part, run in inside:
            if run.again > run.kept:
                raise AutoplanError(f"{part} was called {run.kept} times, and ran again {run.again} times")
        again += any(run.again for _, run in inside)
    return len(blocks), again


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

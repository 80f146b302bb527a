"""Was every block checkpointed, and to any use? Exact gradients do not tell: they are exact without as well."""

from __future__ import annotations

from typing import Any

from autoplan.common.errors import AutoplanError
from autoplan.execute.checkpointing.blocks import runs_of
from autoplan.values import Stack

__all__ = ["recomputed"]


def recomputed(model: Any, stacks: tuple[Stack, ...]) -> tuple[int, int]:
    """Blocks that hold a checkpoint, and how many of them ran again in a backward since.

    All blocks of `stacks` that are trained must hold one. Fewer may run again: nobody waits for the gradient of a block
    whose output is not used.
    """
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

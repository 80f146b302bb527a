"""Branches of a block that share a sum: what one withholds, the next one adds to its own.

Which they are is found in analyse/placement/parallel_branches.py.

A value is withheld only while its block runs. A branch that runs by itself is summed as if it had no neighbour; one
that activation checkpointing runs again by itself, to get back what it saved, gives a result that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoplan.common.errors import PlanMismatchError

__all__ = ["Branches"]

Action = Callable[[torch.Tensor], torch.Tensor]


class Branches:
    """What is withheld in each block that is running, the innermost last."""

    def __init__(self) -> None:
        self.running: list[list[torch.Tensor]] = []
        self.apart = False  # every branch is summed by itself

    def enter(self) -> None:
        """A block begins."""
        self.running.append([])

    def leave(self, name: str, failed: bool) -> None:
        """A block ends, and nothing may be left over."""
        left = self.running.pop() if self.running else []
        if left and not failed:
            raise PlanMismatchError(
                f"{name}: a branch's part of a sum was withheld, and the branch that should add it did not run",
                hint="the block ran in a way the plan's trace never saw; plan again with inputs= that show it",
            )

    def withhold(self, part: torch.Tensor, summed: Action, zeros: Action) -> torch.Tensor:
        """Zeros, while the next branch is to come."""
        if self.apart or not self.running:
            return part if not self.apart and _recomputing() else summed(part)
        self.running[-1].append(part)
        return zeros(part)

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """The part together with what was withheld."""
        held = self.running[-1] if self.running and not self.apart else []
        return part + held.pop() if held else part


def _recomputing() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1

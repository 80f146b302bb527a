"""The queue of a search: states that wait to be tried, those first whose parents came farthest."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoplan.capture.feeding.failure import Step
from autoplan.capture.feeding.messages import ranks_differ
from autoplan.capture.feeding.wants import State

_CREDIT = 5  # changes for which an added argument has credit
_STALE = 4  # ranks that a proposal loses for each change before it without progress


@dataclass(order=True, frozen=True)
class Next:
    """A state to be tried, ordered by the parent's progress, then by rank of the proposal.

    `stale`: how many changes before it made no progress. A call with one more argument, with a dim less, or with a
    plain number in place of a tensor may fail earlier: for a few changes, `credit` counts as its progress.
    """

    reached: int  # negative, since the least comes first
    late: int
    number: int
    state: State = field(compare=False)
    why: str = field(compare=False)
    stale: int = field(default=0, compare=False)
    credit: int = field(default=0, compare=False)
    left: int = field(default=0, compare=False)

    def then(self, step: Step, child: State, why: str, late: int, number: int) -> Next:
        tensors = len(list(child.leaves())) - len(list(step.state.leaves()))
        # A second argument after one without progress is a guess, but keys of a dict come one after the other.
        again = self.left == _CREDIT and len(child.wants) > len(step.state.wants)
        stale = 0 if step.reached > -self.reached or (tensors > 0 and not again) else self.stale + 1
        reached = max(step.reached, self.credit if self.left else 0)
        fewer = tensors < 0 or (ranks_differ(step.failed) and child.dims() < step.state.dims())
        left = _CREDIT if tensors > 0 or (fewer and not self.left) else max(self.left - 1, 0)
        return Next(-reached, late + _STALE * stale, number, child, why, stale, reached if left else 0, left)

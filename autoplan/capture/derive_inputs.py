"""Inputs for an unfamiliar module: a recipe that is searched for once, from which calls of two sizes are drawn.

Nothing says what `forward(x)` takes, but the code does, when it fails: what is unpacked tells how many dims, what is
multiplied a width, what is None an argument that is needed (feeding/). The search tries, within a budget, what
failures tell; its trail is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from autoplan.capture.feeding.wants import SIZES, State
from autoplan.common.dtypes import working_dtype
from autoplan.common.errors import CaptureError
from autoplan.values import Fed

if TYPE_CHECKING:  # most models are fed as their config says: what searches is imported when it is needed
    from autoplan.capture.feeding.arguments import Arguments
    from autoplan.capture.feeding.search import Search, Step

_OF_A_PART = 60  # tries
_SHOWN = 8  # tries that a message lists


@dataclass(frozen=True)
class Recipe:
    """What each argument is, in sizes and in other sizes, and how that was found. `training`: with what makes a forward
    compute its loss, where it takes that."""

    state: State
    other: State | None
    trail: tuple[Step, ...]
    training: State | None = None

    def draw(self, model: nn.Module, seed: int, *, other: bool = False) -> dict[str, dict[str, Any]]:
        """Keyword arguments by call, in the model's own dtype; `other`: in the other sizes, if it has any."""
        state = self.other if other and self.other is not None else self.state
        calls = {"forward": state}
        if self.training is not None:
            calls["forward with targets"] = replace(self.training, named=state.named)
        return {name: call.draw(seed, working_dtype(model)) for name, call in calls.items()}

    def fed(self) -> tuple[Fed, ...]:
        """What a plan keeps of it."""
        reasons: dict[str, str] = {}
        last = self.training or self.state
        others = dict(self.other.wants) if self.other is not None else {}
        for step in self.trail:
            for name, want in step.state.wants:
                if dict(last.wants).get(name) == want:
                    reasons.setdefault(name, step.why)
        return tuple(
            Fed(
                name,
                want.text(last.sizes),
                others.get(name, want).text(self.other.sizes) if self.other is not None else "",
                reasons.get(name, "the likeliest"),
            )
            for name, want in last.wants
        )


def recipe_for(model: nn.Module) -> Recipe:
    """Search. Raises CaptureError with the signature, what was tried, the line that failed, and a snippet to edit."""
    search, found = _searched(model, 0, first=False, sizes={})
    found = search.marked(found, there=False)
    other = search.other_sizes(found) if found.wants else None
    other = search.marked(other, there=True) if other is not None else None
    return Recipe(found, other, tuple(search.steps), search.with_targets(found, other))


def derive(model: nn.Module, batch: int, length: int, seed: int, *, first: bool = False) -> dict[str, Any]:
    """Keyword arguments for one forward. `first`: of a part, whose first argument is given even if it may be left out;
    there are many parts, and what is derived for one is worth fewer tries."""
    most = _OF_A_PART if first else None
    _, found = _searched(model, seed, first=first, sizes={"batch": batch, "length": length}, most=most)
    return found.draw(seed, working_dtype(model))


def _searched(
    model: nn.Module, seed: int, *, first: bool, sizes: dict[str, int], most: int | None = None
) -> tuple[Search, State]:
    from autoplan.capture.feeding.arguments import Arguments
    from autoplan.capture.feeding.search import MOST_TRIES, Search

    arguments = Arguments.of(model, first=first)
    start = arguments.start(model)
    for name, size in sizes.items():
        if size != SIZES[name]:
            start = start.with_size(name, size)
    search = Search(model, arguments, seed, MOST_TRIES if most is None else most)
    found = search.run(start) if start.wants or arguments.open else start
    if found is None:
        raise _not_found(arguments, search)
    return search, found


def _not_found(arguments: Arguments, search: Search) -> CaptureError:
    best = search.farthest
    sizes = best.state.sizes
    guess = ", ".join(f"{name!r}: {want.code(sizes)}" for name, want in best.state.wants)
    where = f"\n  failed at {best.where}" if best.where else ""
    told = sorted(search.steps, key=lambda step: -step.reached)[:_SHOWN]
    lines = "".join(f"\n    {_tried(step)}" for step in told)
    return CaptureError(
        f"no inputs could be derived for {arguments.signature}: after {len(search.steps)} tries the nearest still "
        f"ends in {best.failed}{where}\n  tried, the farthest first:{lines}",
        hint=f"edit the best guess and pass it: inputs={{{guess}}}",
    )


def _tried(step: Step) -> str:
    given = ", ".join(f"{name}={want.text(step.state.sizes)}" for name, want in step.state.wants)
    return f"{given} -> {step.failed[:120] or 'ran'}"

"""Hooks that a compiler traces inside a checkpointed block.

The problem: hooks of one run tell each other things (which module is running, how long a sequence is) by lists that are
made when a plan is applied. Inside a checkpointed block a compiler takes any change of what lies outside for one that
running the block again must repeat, and breaks its graph there; the rest of the model then runs piece by piece.

What our hooks note they take back before the block ends, so there is nothing to repeat: torch is told not to watch.
It is told for our hooks alone: what the model itself does in a block is watched as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["unwatched"]


def unwatched(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in code that is being compiled."""
    from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as call  # a slow import

    return call(function, *args)

"""What a model was fed while its plan was made: what the plan rests on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Fed"]


@dataclass(frozen=True)
class Fed:
    """One argument of the forward as it was derived.

    `given` and `also`: what it was in the two calls, in words (kind and shape); `also` is empty where no other size
    ran. `why`: what told so.
    """

    argument: str
    given: str
    also: str = ""
    why: str = ""

"""Which module has which scheme: patterns of names and of classes, as configs say them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from autoplan.values.quantised import Scheme

__all__ = ["Group", "Method", "named"]

_SAME: Literal["same"] = "same"


@dataclass(frozen=True)
class Group:
    """A scheme of a method. `experts`: that of stacks of experts; None: none. `names`: patterns; none: every linear."""

    scheme: Scheme | None
    names: tuple[str, ...] = ()
    experts: Scheme | Literal["same"] | None = _SAME

    def of(self, stacked: bool) -> Scheme | None:
        """The scheme of a matrix, or of a stack of matrices."""
        return self.experts if stacked and self.experts != _SAME else self.scheme


@dataclass(frozen=True)
class Method:
    """What a config says. The first group whose names fit a module is its group, unless it is skipped.

    `default_skips`: what the library leaves as it is when nobody says so (the output head). `in_blocks`: only what is
    inside repeated blocks is quantised, of those that `within` names, if it names any; `only`: only modules of these
    names in a block. `unbiased`: only linear layers without bias, both sizes of which are multiples of this.
    """

    name: str
    groups: tuple[Group, ...]
    skipped: tuple[str, ...] = ()
    default_skips: bool = True
    in_blocks: bool = False
    within: tuple[str, ...] = ()
    only: tuple[str, ...] = field(default=())
    unbiased: int = 0


def named(pattern: str, name: str) -> bool:
    """Does a pattern of a config mean the module of this name?

    "re:…" is a regular expression from the beginning; anything else is a name, or its end, its beginning or its middle
    from dot to dot, or an expression for its beginning.

    >>> named("visual", "model.visual.blocks.0.attn"), named("re:.*mlp.gate$", "layers.0.mlp.gate_proj")
    (True, False)
    >>> named("model.layers.1", "model.layers.11.mlp"), named("lm_head", "lm_head")
    (False, True)
    """
    if pattern.startswith("re:"):
        return _compiled(pattern[3:]).match(name) is not None
    if f".{pattern}." in f".{name}.":
        return True
    if re.escape(pattern).replace(r"\.", ".") == pattern.replace(r"\.", "."):  # nothing in it but letters and dots
        return False
    return _compiled(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))").match(name) is not None


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)

"""Which tensor of a checkpoint becomes which tensor of a model.

The problem: names differ. Tied weights are stored once; a base model's checkpoint lacks the prefix its user adds, or
has one too many; and libraries rename, merge and split checkpoint tensors on the way in (one file entry per expert
becomes one packed weight). The first two are settled here; the last by the library's own rules, unchanged
(`conventions().checkpoint_names`). Whatever then has no partner is listed, never guessed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from autoplan.common.conventions import CheckpointNames, Conversion, conventions
from autoplan.common.errors import PlanMismatchError
from autoplan.execute.weights.joined import Joined

__all__ = ["Matched", "match_keys", "refuse_unmatched"]

_SHOWN = 5  # names printed per kind of mismatch


@dataclass
class Matched:
    """The outcome: targets read as they are, conversions, and what has no partner."""

    direct: dict[str, str] = field(default_factory=dict)  # name in the model -> key in the files
    joined: list[Joined] = field(default_factory=list)
    converted: list[Conversion] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def converted_names(self) -> set[str]:
        return {one.name for one in self.joined} | {name for one in self.converted for name in one.targets()}


def match_keys(
    model: nn.Module,
    groups: Sequence[Sequence[str]],
    passing: Iterable[str],
    keys: Iterable[str],
    read: Callable[..., torch.Tensor],
    shape: Callable[[str], tuple[int, ...]],
) -> Matched:
    """Find a source for each group of names (one tensor each). `passing`: names of buffers that are not saved.

    A group is served by the first of its names that the checkpoint has. `read` and `shape` are asked with a key.
    """
    names = {name for group in groups for name in group}
    known = conventions().checkpoint_names(model)
    prefix = known.prefix
    matched, conversions, joins = Matched(), dict[str, Conversion](), dict[str, Joined]()
    for key in sorted(keys, key=_numbered):  # experts in order, as converters expect
        name, pattern = known.rename(key)
        name = _with_or_without(prefix, name, names)
        if name not in names and _with_or_without(prefix, key, names) in names:
            name, pattern = _with_or_without(prefix, key, names), None
        if pattern is None and name in names:
            matched.direct[name] = key
        elif pattern is not None and name not in conversions and (join := known.join(pattern)) is not None:
            joins.setdefault(name, Joined(name, join)).add(key, pattern, partial(read, key), shape(key))
        elif pattern is not None:
            if name not in conversions:
                conversions[name] = known.conversion(pattern, name)
            conversions[name].add(name, key, pattern, shape(key))
        else:
            matched.unexpected.append(key)
    for joined in joins.values():
        if joined.name not in names:
            matched.unexpected += joined.keys
        elif joined.name not in matched.direct:
            matched.joined.append(joined)
    for conversion in conversions.values():
        if any(name in names for name in conversion.targets()):
            matched.converted.append(conversion)
        else:
            matched.unexpected += conversion.keys
    found = set(matched.direct) | matched.converted_names()
    matched.missing = [group[0] for group in groups if not found & set(group)]
    _forget_ignored(known, matched, set(passing))
    return matched


def _numbered(key: str) -> list[tuple[int, str]]:
    """Sorts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]


def _with_or_without(prefix: str, name: str, names: set[str]) -> str:
    """The name as the model has it, when only the base model's prefix is too much or lacking."""
    if name in names:
        return name
    if name.startswith(f"{prefix}.") and name.removeprefix(f"{prefix}.") in names:
        return name.removeprefix(f"{prefix}.")
    return f"{prefix}.{name}" if f"{prefix}.{name}" in names else name


def _forget_ignored(known: CheckpointNames, matched: Matched, passing: set[str]) -> None:
    """Old checkpoints hold buffers that are no longer saved; a model may name further keys as harmless."""
    missing = [re.compile(text) for text in known.may_lack]
    surplus = [re.compile(text) for text in known.may_exceed]
    matched.missing = [name for name in matched.missing if not any(rule.search(name) for rule in missing)]
    matched.unexpected = [
        key
        for key in matched.unexpected
        if _with_or_without(known.prefix, key, passing) not in passing and not any(rule.search(key) for rule in surplus)
    ]


def refuse_unmatched(matched: Matched, wrong_shapes: Sequence[str], where: str) -> None:
    """One error that lists everything, with the nearest name of the other side for each."""
    texts = []
    if matched.missing:
        texts.append(_listed("missing", matched.missing, matched.unexpected))
    if matched.unexpected:
        texts.append(_listed("unexpected", matched.unexpected, matched.missing))
    if wrong_shapes:
        texts.append(f"{len(wrong_shapes)} of other shapes or numbers: " + "; ".join(wrong_shapes[:_SHOWN]))
    if texts:
        raise PlanMismatchError(
            f"{where} is not this model's checkpoint: " + ". ".join(texts),
            hint="strict=False loads what fits" if not wrong_shapes else "",
        )


def _listed(kind: str, names: Sequence[str], others: Sequence[str]) -> str:
    shown = []
    for name in names[:_SHOWN]:
        near = difflib.get_close_matches(name, others, n=1, cutoff=0.5)
        shown.append(f"{name} (nearest: {near[0]})" if near else name)
    return f"{len(names)} {kind}: " + ", ".join(shown) + (", …" if len(names) > _SHOWN else "")

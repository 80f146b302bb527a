"""Boxes of a plan that somebody wrote: what it does to each weight, what came of it, and where two plans differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoplan.common.patterns import matches
from autoplan.emit.pages.drawing import tone_of
from autoplan.emit.pages.picture import Block, Box, BoxRow, Scene, branches
from autoplan.values import CutsOf, Drawn, Finding

Cut = tuple[int | None, str]
_TONES = {"wrong": "bad", "costlier": "a6", "dead": "whole"}


def scene_of_side(
    drawn: Drawn, side: CutsOf, other: CutsOf | None = None, words: Mapping[str, str] | None = None,
    findings: Sequence[Finding] = (),
) -> Scene:  # fmt: skip
    """`other`: the side that it is held against; `words`: verdicts by pattern, as an audit gives them."""
    blocks = []
    for part in drawn.flow:
        rows = []
        for parent, columns in branches(part):
            boxes = []
            for column in columns:
                named = [(step.rpartition(".")[2], ".".join(filter(None, (part.block, step)))) for step in column]
                told = (_box(name or path, path, side, other, words or {}, findings) for name, path in named)
                boxes.append(tuple(told))
            rows.append(BoxRow(parent, tuple(boxes)))
        blocks.append(Block(part.block or "outside of blocks", part.blocks, tuple(rows)))
    return Scene(tuple(blocks), ())


def _box(
    name: str, path: str, side: CutsOf, other: CutsOf | None, words: Mapping[str, str], findings: Sequence[Finding]
) -> Box:
    cuts, others = _cuts(side, path), _cuts(other, path) if other is not None else None
    said = list(dict.fromkeys(word for pattern, word in words.items() if _about(pattern, path)))
    lit = others is not None and cuts != others
    tone = next((_TONES[word] for word in said if word in _TONES), _tone(cuts)) + " lit" * lit
    found = tuple(n for n, one in enumerate(findings, 1) if any(_about(about, path) for about in one.about))
    lines = (
        *dict.fromkeys(text for _, text in cuts.values()),
        *(f"plan: {word}" for word in said),
        *(("differs",) if lit else ()),
    )
    return Box(name, path, lines, findings=found, tone=tone)


def _cuts(side: CutsOf, path: str) -> dict[str, Cut]:
    """What is done to each parameter of a module."""
    found = {}
    for pattern, dim, text in side.cuts:
        module, _, name = pattern.rpartition(".")
        if matches(module, path):
            found[name] = (dim, text)
    return found


def _about(pattern: str, path: str) -> bool:
    return bool(pattern) and (matches(pattern, path) or matches(pattern.rpartition(".")[0], path))


def _tone(cuts: Mapping[str, Cut]) -> str:
    dims = [dim for dim, _ in cuts.values() if dim is not None]
    return tone_of(max(dims, default=-1))

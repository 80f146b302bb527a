"""Reasons why a stream of blocks is not sharded along its sequence, or is replicated somewhere: words with sentences.

See also `not_placed.py`, which has the words for obstacles to a tensor-parallel split. A reason is recorded where the
stream is walked, and read by findings, audits and scoreboards; it becomes text only here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WholeWhy = Literal[
    "reads-across",
    "picks",
    "parts",
    "places",
    "two-positions",
    "enters-split",
    "told-length",
    "told-shard",
    "meets-whole",
    "meets-empty",
    "shared-value",
    "shared-parameter",
    "merged-at-start",
    "merged-taken-in",
    "merged-returned",
    "runs-both-ways",
    "made-whole-for",
    "unsettled",
    "no-positions",
    "no-blocks",
    "blocks-apart",
]

_SENTENCES: dict[WholeWhy, str] = {
    "reads-across": "{call} in {place} reads across the sequence",
    "picks": "{call} in {place} picks positions",
    "parts": "{call} in {place} parts positions",
    "places": "{call} in {place} writes positions to places of their own",
    "two-positions": "{call} in {place} meets two positions at once",
    "enters-split": "{call} in {place} enters a split region",
    "told-length": "{call} in {place} is told the length of the sequence",
    "told-shard": "{call} in {place} is told the length of a shard",
    "meets-whole": "{call} in {place} meets a whole value",
    "meets-empty": "{call} in {place} meets a value of {maker} that was recorded empty, of which nothing can be read",
    "shared-value": "{call} in {place} uses a value that others use whole",
    "shared-parameter": "{call} in {place} uses {parameter} on the whole sequence, others use it on shards",
    "merged-at-start": "the stream's sequence is merged with another dim where the first block begins",
    "merged-taken-in": "the sequence is merged with another dim where {place} takes it in",
    "merged-returned": "what the model returns has its sequence merged with another dim",
    "runs-both-ways": "{place} runs on shards and on the whole sequence",
    "made-whole-for": "{place} runs on shards and on the whole sequence, which {call} in {maker} made",
    "unsettled": "the boundaries of the stream did not settle",
    "no-positions": "nothing that {place} takes in has a dim of positions",
    "no-blocks": "the model has no repeated blocks whose stream could be cut",
    "blocks-apart": "its blocks are not cut alike, and cannot be recorded one by one: {error}",
}


@dataclass(frozen=True)
class WholeSequence:
    """One reason. `place` is the module that it is about, `maker` the one that made the value replicated there.

    `at`: the module that takes in the full sequence for it; `stack`: all of these blocks do; `inside`: no module
    boundary comes before the call at which the sequence could be gathered. `error`: the error of the recording.
    """

    why: WholeWhy
    place: str = ""
    call: str = ""
    parameter: str = ""
    maker: str = ""
    at: str | None = None
    stack: str | None = None
    inside: bool = False
    error: str = ""

    def __str__(self) -> str:
        place, maker = self.place or "the model", self.maker or "the model"
        details = {"call": self.call, "parameter": self.parameter, "error": self.error}
        text = _SENTENCES[self.why].format(place=place, maker=maker, **details)
        text += ", and no module boundary lies before it" if self.inside else ""
        if self.stack is not None:
            return f"all of {self.stack or 'the stack'}: {text}"
        return text if self.at is None else f"{self.at}: {text}"

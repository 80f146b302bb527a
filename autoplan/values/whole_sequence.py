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
    "summed-before",
    "runs-both-ways",
    "made-whole-for",
    "unsettled",
    "no-positions",
    "no-blocks",
    "blocks-apart",
    "differed",
]

_SENTENCES: dict[WholeWhy, str] = {
    "reads-across": "{call} in {place} reads across the sequence",
    "picks": "{call} in {place} selects positions",
    "parts": "{call} in {place} splits the sequence",
    "places": "{call} in {place} scatters positions",
    "two-positions": "{call} in {place} combines two positions",
    "enters-split": "{call} in {place} enters a tensor-parallel region",
    "told-length": "{call} in {place} is passed the full sequence length",
    "told-shard": "{call} in {place} is passed the local sequence length",
    "meets-whole": "{call} in {place} uses a replicated value",
    "meets-empty": "{call} in {place} uses a value of {maker} that was recorded empty, so its placement is unknown",
    "shared-value": "{call} in {place} uses a value that other calls need in full",
    "shared-parameter": "{call} in {place} uses {parameter} on the full sequence, other calls use it on shards",
    "merged-at-start": "the sequence dim is merged with another dim where the first block begins",
    "merged-taken-in": "the sequence dim is merged with another dim at the input of {place}",
    "merged-returned": "the sequence dim is merged with another dim in the model's output",
    "summed-before": "the gradient of what {place} takes in is a part of a sum that comes before it",
    "runs-both-ways": "{place} runs both on shards and on the full sequence",
    "made-whole-for": "{place} runs on shards, and on the full sequence made by {call} in {maker}",
    "unsettled": "no consistent boundaries were found for the stream",
    "no-positions": "no input of {place} has a sequence dim",
    "no-blocks": "the model has no repeated blocks whose stream could be sharded",
    "differed": "sharded along their sequence as well, the tiny clone's results differed on simulated ranks",
    "blocks-apart": "its blocks are sharded differently and cannot be recorded one by one: {error}",
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
        text += ", and no module boundary precedes it" if self.inside else ""
        if self.stack is not None:
            return f"all blocks of {self.stack or 'the stack'}: {text}"
        return text if self.at is None else f"{self.at}: {text}"

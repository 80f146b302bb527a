"""Why something is not split, as closed lists of words, each with its sentence.

`Obstacle`s of tensor parallelism are what no mechanism can handle on ranks. `NotPlaced` (values/reasons.py) holds one
of these words with the place where it was met. Sentences name the aten op as {op}, the called function as {call}, an
argument of it as {argument}, a number as {count:g}.

Reasons why a stream of blocks is not sharded along its sequence, or is replicated somewhere, are recorded where the
stream is walked, and read by findings, audits and scoreboards; they become text only here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unplaceable = Literal[
    "across", "averaged", "head-width", "told-its-heads", "matrix-power", "inside-groups", "held-together",
    "row-otherwise", "length-inside", "norm-inside", "variance-inside", "sums-of-several-kinds", "added-to-partial",
    "partial-is-read", "some-results-partial", "counted", "sizes-of-another", "length-is-read", "stretched",
    "attention-argument", "weights-of-each-head", "shards-given", "cut-between-no-heads",
    "call-not-seen", "into-whole-and-cut", "written-in-place", "norm-weight-whole", "table-outside-module",
    "no-product-to-gather", "bias-of-others", "mixed-gradients", "differs-between-runs", "sizes-compared",
    "several-values", "ready-made", "logits-not-returned",
]  # fmt: skip

SENTENCES: dict[Unplaceable, str] = {
    # ops and calls that cannot run on shards
    "across": "{op} over a sharded dim",
    "averaged": "{op} averages over a sharded dim",
    "head-width": "attention over a sharded head dim",
    "told-its-heads": "{call} is passed its number of heads and slices its packed weight internally",
    "matrix-power": "matrix powers need the full square matrix",
    "inside-groups": "a transposed convolution sharded inside its groups",
    "held-together": "a sum over an axis of which several ranks hold the same part",
    "row-otherwise": "a row of a sharded table that is read by something else than table[number]",
    "length-inside": "a vector length over a sharded axis inside {call}",
    "norm-inside": "a norm over a sharded axis inside {call}",
    "variance-inside": "a variance over a sharded axis inside {call}",
    # between the ops of one call
    "sums-of-several-kinds": "different kinds of reductions inside {call}",
    "added-to-partial": "inside {call}, {op} adds a replicated value to a partial sum",
    "partial-is-read": "inside {call}, {op} reads a partial sum",
    "some-results-partial": "only some outputs of {call} are partial sums",
    "counted": "inside {call}, {count:g} is a count along a sharded axis",
    "sizes-of-another": "{call} takes sizes from a value that is sharded differently",
    "length-is-read": "{call} reads the length of a sharded value",
    "stretched": "{call} expands a replicated value along a sharded axis",
    "several-values": "a sum in {call}, which has several outputs",
    # attention in one call
    "attention-argument": "{call} with {argument} is not supported on a shard of the heads",
    "weights-of-each-head": "{call} returns attention weights for each head",
    "shards-given": "an input of {call} other than its weights is sharded",
    "cut-between-no-heads": "{call} slices its packed weight internally, and not between heads",
    # sums without a place
    "call-not-seen": "no call is seen to return the values, as under torch.vmap",
    "into-whole-and-cut": "a replicated value feeds both sharded and replicated results",
    "written-in-place": "an in-place sum over a sharded axis",
    "norm-weight-whole": "a norm over a sharded axis with a replicated weight",
    "table-outside-module": "a row lookup in a table that no module of its own holds",
    "no-product-to-gather": "the output to gather is not from a matmul or a convolution",
    "bias-of-others": "a bias added to a partial sum that is not a parameter of its own",
    "mixed-gradients": "replicated rows of a partly sharded value with both partial and full gradients",
    "ready-made": "a constant made outside the trace is used along a sharded axis",
    "logits-not-returned": "the head's product is not a module's output, so it could not be gathered for a loss",
    # the model's own Python
    "differs-between-runs": "{call} needs different changes in different runs",
    "sizes-compared": "Python compares sizes that sharding changes",
}


WholeWhy = Literal[
    "reads-across", "picks", "parts", "places", "two-positions", "enters-split", "told-length", "told-shard",
    "meets-whole", "meets-empty", "shared-value", "shared-parameter", "merged-at-start", "merged-taken-in",
    "merged-returned", "summed-before", "summed-inside", "runs-both-ways", "made-whole-for", "unsettled",
    "no-positions", "no-blocks", "blocks-apart", "differed", "begins-again", "returns-others",
]  # fmt: skip

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
    "summed-inside": "the output of {call} in {place} is summed over ranks inside that module, and so is whole on each",
    "runs-both-ways": "{place} runs both on shards and on the full sequence",
    "made-whole-for": "{place} runs on shards, and on the full sequence made by {call} in {maker}",
    "returns-others": "output {call} of the model is sharded in some calls, and a loss or another value in others",
    "begins-again": "{call} in {place} makes the input of another round of the same blocks",
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
    `summed`: with nothing of the module split, there is no such sum.
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
    summed: bool = False

    def __str__(self) -> str:
        place, maker = self.place or "the model", self.maker or "the model"
        details = {"call": self.call, "parameter": self.parameter, "error": self.error}
        text = _SENTENCES[self.why].format(place=place, maker=maker, **details)
        text += ", and no module boundary precedes it" if self.inside else ""
        if self.stack is not None:
            return f"all blocks of {self.stack or 'the stack'}: {text}"
        return text if self.at is None else f"{self.at or 'the model'}: {text}"

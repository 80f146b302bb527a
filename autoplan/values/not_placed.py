"""Obstacles to a split that no mechanism can handle on ranks: a closed list of words, each with its sentence.

`NotPlaced` (values/reasons.py) holds one of these words with the place where it was met. Sentences name the aten op as
{op}, the called function as {call}, an argument of it as {argument}, a number as {count:g}.
"""

from __future__ import annotations

from typing import Literal

Unplaceable = Literal[
    "across",
    "averaged",
    "head-width",
    "told-its-heads",
    "matrix-power",
    "inside-groups",
    "held-together",
    "row-otherwise",
    "length-inside",
    "norm-inside",
    "variance-inside",
    "sums-of-several-kinds",
    "added-to-partial",
    "partial-is-read",
    "some-results-partial",
    "counted",
    "sizes-of-another",
    "length-is-read",
    "stretched",
    "attention-argument",
    "mask-of-each-head",
    "weights-of-each-head",
    "shards-given",
    "cut-between-no-heads",
    "call-not-seen",
    "into-whole-and-cut",
    "written-in-place",
    "norm-weight-whole",
    "table-outside-module",
    "no-product-to-gather",
    "bias-of-others",
    "mixed-gradients",
    "mixed-inside",
    "differs-between-runs",
    "sizes-compared",
    "several-values",
    "ready-made",
    "logits-not-returned",
]

SENTENCES: dict[Unplaceable, str] = {
    # ops and calls that cannot run on shards
    "across": "{op} over a split dimension",
    "averaged": "{op} averages over a split dimension",
    "head-width": "attention over a split head width",
    "told-its-heads": "{call} is told its number of heads and cuts its packed weight by itself",
    "matrix-power": "powers are of whole square matrices",
    "inside-groups": "a transposed convolution over channels inside its groups",
    "held-together": "a sum over an axis that several ranks hold together",
    "row-otherwise": "a row of a split table that is taken otherwise than by table[number]",
    "length-inside": "lengths over a split axis within {call}",
    "norm-inside": "a norm over a split axis within {call}",
    "variance-inside": "a variance over a split axis within {call}",
    # between the ops of one call
    "sums-of-several-kinds": "several kinds of sums within {call}",
    "added-to-partial": "within {call}, {op} adds something else to a partial sum",
    "partial-is-read": "within {call}, {op} works on a partial sum",
    "some-results-partial": "only some results of {call} are partial sums",
    "counted": "within {call}, {count:g} is counted along a split axis",
    "sizes-of-another": "{call} takes sizes from a value that is cut otherwise",
    "length-is-read": "{call} reads off how long a value is that is cut",
    "stretched": "{call} stretches a whole value along a split axis",
    "several-values": "a sum in {call}, which returns several values",
    # attention in one call
    "attention-argument": "{call} with {argument} is not known on a shard of the heads",
    "mask-of-each-head": "{call} has a mask for each head",
    "weights-of-each-head": "{call} hands out the weights of each head",
    "shards-given": "{call} is given shards of something else than its weights",
    "cut-between-no-heads": "{call} cuts its packed weight by itself, and not between heads",
    # sums without a place
    "call-not-seen": "no call is seen to hand on its values, as under torch.vmap",
    "into-whole-and-cut": "a whole value goes into results that are cut and into others that are not",
    "written-in-place": "a sum over a split axis written in place",
    "norm-weight-whole": "a norm over a split axis with a weight that is whole",
    "table-outside-module": "a table looked up by rows outside a module of its own",
    "no-product-to-gather": "a product to gather that is neither a matrix product nor a convolution",
    "bias-of-others": "a bias added to a partial sum that is not a parameter of its own",
    "mixed-gradients": "whole rows of a partly split value with partial and full gradients",
    "mixed-inside": "whole rows of a partly split value, inside a module",
    "ready-made": "a ready-made constant meets a split axis",
    "logits-not-returned": "the head's product is not what a module returns, so it could not be gathered for a loss",
    # the model's own Python
    "differs-between-runs": "{call} needs different work from run to run",
    "sizes-compared": "Python compares sizes that a split changes",
}

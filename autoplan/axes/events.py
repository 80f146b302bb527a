"""Events: the complete table of what ops do along an axis, as op rules leave it on leaves.

Whether an axis may be sharded over ranks depends only on what the model does along it. Each op rule says so by leaving
one of these words on the axis. After those in `FORBIDDING`, positions along the axis are no longer independent, so that
no rank could work on its shard alone; the others cost a reduction, or nothing.
"""

from __future__ import annotations

from enum import StrEnum


class Event(StrEnum):
    """One event for each meaning; several ops share one when they mean the same for a split."""

    # products
    CONTRACT_W = "contract_w"  # summed over in a product with a weight (the input features of a linear)
    CONTRACT_A = "contract_a"  # summed over in a product of two activations (head width in q @ k)
    CONTRACT_MIXED = "contract_mixed"  # a summed concatenation carries this axis in some of its segments only
    BATCH_W = "batch_w"  # batch position of a product with a weight (packed experts)
    BATCH_A = "batch_a"  # batch position of a product of two activations (heads in q @ k)
    FREE_A = "free_a"  # row or column of a product of two activations (query and key positions)
    CONV_GROUP = "conv_group"  # groups of a convolution, single channels of a depthwise one
    EXPERT_BATCH = "expert_batch"  # selects the weight of a grouped product (experts in _grouped_mm)
    EXPERTS = "experts"  # every position is an expert that computes for the tokens that chose it, and for no others
    SOLVE = "solve"  # a triangular system is solved along it
    # sums and comparisons along the axis
    REDUCE_LIN = "reduce_lin"  # sum, mean: a partial result per rank can be summed
    REDUCE_MAX = "reduce_max"  # max, min, amax, amin, median
    REDUCE_ARG = "reduce_arg"  # argmax, argmin: the result is a position
    REDUCE_LOGIC = "reduce_logic"  # any, all
    VARIANCE = "variance"  # var, std: ranks exchange the mean and variance of their shards
    REDUCE_VAR = "reduce_var"  # var_mean, and the statistics of batch and group norms
    LENGTH = "length"  # vector norms of order 2: the squares of ranks' shards are summed
    REDUCE_NORM = "reduce_norm"  # other vector norms, and distances
    REDUCE_LOGSUMEXP = "reduce_logsumexp"
    REDUCE_PROD = "reduce_prod"
    NORM = "norm"  # layer norm, RMS norm, group norm, weight norm: statistics over the axis
    SOFTMAX = "softmax"  # softmax, log-softmax, attention over keys
    TOPK = "topk"  # the largest along it, or the resulting axis of ranks
    SORT = "sort"  # sort, unique, histogram
    CUMSUM = "cumsum"  # each position depends on those before it (cumsum, cumprod, cummax, linear recurrences)
    # positions along the axis are looked up or rearranged
    EMBED_INDEX = "embed_index"  # rows of a table looked up by integers (embedding, table[number])
    INDEX_W = "index_w"  # positions of a weight looked up by a tensor of integers
    INDEX = "index"  # positions of an activation looked up by integers or a mask, or turned into integers
    GATHER = "gather"
    SCATTER = "scatter"
    SELECT = "select"  # one position by index, or each separately (select, unbind)
    TWICE = "twice"  # a value has it in two dims (the product of something with itself)
    STACK = "stack"  # made by stacking separate tensors
    CUT = "cut"  # sliced inside one block of a product: no clean axis is left
    STRIDED = "strided"  # sliced with a step that is no divisor, or windows
    PAD = "pad"
    FLIP = "flip"
    ROLL = "roll"
    TRIANGLE = "triangle"  # values are kept or dropped by position (tril, triu)
    CONV_K = "conv_k"  # inside the kernel of a convolution
    CONV_SP = "conv_sp"  # neighbours along it are mixed (convolution, pooling, resizing)
    JOINS_DATA = "joins_data"  # concatenated with input data (learned tokens before the sequence)
    # values made in forward
    CREATED = "created"  # made in forward with values that vary along it (arange, linspace, eye)
    CONST = "const"  # a constant tensor lies along it (slopes, masks from a literal)
    RANDOM = "random"  # random numbers are drawn along it (dropout, noise)
    GATHERED = "gathered"  # replicated by an all-gather
    # unknown to the analysis
    CLASH = "clash"  # two structures met that cannot be one
    BADVIEW = "badview"  # a reshape that mixes it with its neighbours
    OPAQUE = "opaque"  # an op without an exact rule touched it


FORBIDDING: frozenset[Event] = frozenset(Event) - {
    Event.CONTRACT_W,
    Event.CONTRACT_A,
    Event.BATCH_W,
    Event.BATCH_A,
    Event.EXPERTS,
    Event.FREE_A,
    Event.CONV_GROUP,
    Event.REDUCE_LIN,
    Event.VARIANCE,
    Event.LENGTH,
    Event.NORM,
    Event.CREATED,
    Event.CONST,
    Event.RANDOM,
}

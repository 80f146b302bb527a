"""The moves of sequence parallelism, differentiable, for any length.

In: a rank's positions of a value. Out: all of them, or this rank's part of a sum. May import: what execute may.
"""

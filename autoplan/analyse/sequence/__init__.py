"""Sequence parallelism: which stretches of the residual stream lie cut along the sequence, and at which boundaries.

In: the calls of a trace and the needed sums. Out: instructions at the boundaries. May import: what analyse may.
"""

"""Is what the plan cuts right? Pairs, layouts, units, heads, statistics, gradients, ties, experts, sequences.

In: an Audited, and the findings before. Out: findings. May import: what check may.
"""

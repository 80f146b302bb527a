"""What carrying the plan out shows: numbers on simulated ranks, rounding, what a plan of ours does besides.

In: an Audited, and the findings before. Out: findings. May import: what check may.
"""

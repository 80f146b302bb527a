"""Proofs on the recorded graph: the permutation law, and the graph once more on imagined ranks.

In: a recording and its splits. Out: findings that name the op and the error. May import: what check may.
"""

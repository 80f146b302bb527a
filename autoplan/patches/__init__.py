"""Temporary changes in other packages, each scoped and undone.

In: a block of code to run. Out: the same block, with caches, kernels or dtypes of other packages replaced. May import:
values, common.
"""

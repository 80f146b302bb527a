"""What autoplan changes in other packages for a while, each change scoped and undone.

In: a block of code to run. Out: the same block, with caches, kernels or dtypes of others held still. May import:
values, common.
"""

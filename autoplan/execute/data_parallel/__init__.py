"""Data parallelism on top of tensor parallelism: mesh dims, FSDP2 units, gradient norms.

In: a model that is sharded over tp, and a mesh. Out: the model in FSDP2 units. May import: what execute may.
"""

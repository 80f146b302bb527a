"""What lies besides tensor parallelism: the dims of a mesh, FSDP2 units, norms of gradients, Megatron-FSDP.

In: a model that is sharded over tp, and a mesh. Out: the model in FSDP2 units. May import: what execute may.
"""

"""Parameters and buffers on ranks: sharded, read locally, gathered, saved and loaded under the checkpoint's names.

In: a module and the plan's parameter rules. Out: DTensors that the module's code sees as plain tensors. May import:
what execute may.
"""

"""Parameters and buffers on ranks: cut, read locally, put back together, saved and loaded under the checkpoint's names.

In: a module and the plan's parameter rules. Out: DTensors that the module's code sees as plain ones.
May import: what execute may.
"""

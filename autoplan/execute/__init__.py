"""Shard a live module as its plan says; nothing in this package decides anything.

In: a module, a mesh, a Plan. Out: the module, fully sharded or left as it was. May import: values, common, patches,
ops.
"""

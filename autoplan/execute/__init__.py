"""Run a model on shards: what a plan says, done to a live module. Nothing in here decides anything.

In: a module, a mesh, a Plan. Out: the module, sharded whole or left as it was. May import: values, common, patches,
ops.
"""

"""Hold a sharded model to the paths through its code for which its plan was recorded and tried.

In: a plan's `paths` and the arguments of a call. Out: nothing, or a refusal. May import: what execute may.
"""

"""Holds a sharded model to the ways through its code for which its plan was recorded and tried.

In: a plan's `paths` and what a call is given. Out: nothing, or a refusal. May import: what execute may.
"""

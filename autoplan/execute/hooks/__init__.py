"""Hooks that carry out the plan at the boundaries of modules, and at single calls amid a module's own Python.

In: the plan's instructions for one module. Out: one pre-hook, one post-hook, and a function mode for its forward only.
May import: what execute may.
"""

"""Hooks that carry out the plan at the boundaries of modules.

In: the plan's instructions for one module. Out: one pre-hook and one post-hook. May import: what execute may.
"""

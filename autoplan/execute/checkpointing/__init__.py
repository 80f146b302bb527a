"""Activation checkpointing: which modules, how, and what that saves.

In: stacks of blocks. Out: blocks that keep their inputs and are recomputed in backward. May import: what execute may.
"""

"""Activation checkpointing: which modules, how, and what that saves.

In: stacks of blocks. Out: blocks that keep their inputs and run again when gradients are due.
May import: what execute may.
"""

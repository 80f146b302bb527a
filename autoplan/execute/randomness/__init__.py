"""Whose random numbers: the same on every rank where a value is whole, different where it is sharded.

In: the calls that draw. Out: the same draws as the unsharded model's, by name of stream. May import: what execute may.
"""

"""Verify that a sharded model computes what the model computes, on a tiny clone, with simulated ranks.

In: a source and a plan. Out: a Report with the error of every output and gradient. May import: what check may.
"""

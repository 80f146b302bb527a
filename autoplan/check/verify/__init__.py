"""Does the sharded model compute what the model computes? A tiny clone, with the code that ships, on simulated ranks.

In: a source and a plan. Out: a Report with the error of every output and gradient. May import: what check may.
"""

"""Plan and verify every architecture of a transformers mapping, one line each.

In: the name of a mapping. Out: a Scoreboard. May import: what check may.
"""

"""Every architecture of a transformers mapping, planned and verified, one line each.

In: the name of a mapping. Out: a Scoreboard. May import: what check may.
"""

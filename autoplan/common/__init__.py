"""Shared by all rooms: layouts of dims (layout), names with `*` (patterns), one family of errors, tensors inside nested
values, places in code, random numbers that leave generators as they were.

In: nothing of a model. Out: small functions without state. May import: values. Layout, patterns and errors load no
torch.
"""

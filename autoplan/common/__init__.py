"""What every room may use: how a dim lies on ranks (layout), names with `*` (patterns), one family of errors, tensors
inside nested values, places in code, random numbers that disturb nobody.

In: nothing of a model. Out: small functions without state. May import: values. Layout, patterns and errors load no
torch.
"""

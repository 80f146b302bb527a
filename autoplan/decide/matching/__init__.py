"""Which box of a picture is what: rules matched, claims settled, boxes turned back into parameters.

In: a Flow and rules. Out: names for parameters. May import: what decide may.
"""

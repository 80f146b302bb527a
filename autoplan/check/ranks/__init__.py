"""N ranks without N machines: as threads, or as processes that talk over gloo.

In: a function of the rank. Out: what each rank returned. May import: what check may.
"""

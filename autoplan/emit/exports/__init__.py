"""A plan in the words of other systems.

In: a Plan. Out: text for a file, or an error that names what the system cannot say. May import: what emit may.
"""

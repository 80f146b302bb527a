"""A simplified picture of a run: few boxes in a networkx graph, and the stacks of repeated blocks.

In: a Trace, or a tree of modules. Out: a Flow of boxes, which rules are matched against; Blocks. May import: values,
common, ops, its own files.
"""

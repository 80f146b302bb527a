"""Choose the axes to split: the candidates, their layouts, and the integers and ends of the model that go with them.

In: the axes of a trace. Out: marks on axes, and integers that Python must pass. May import: what analyse may.
"""

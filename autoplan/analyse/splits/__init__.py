"""Which axes are cut: the candidates, their layouts, and the integers and ends of the model that go with them.

In: the axes of a trace. Out: marks on axes, and what Python must pass instead. May import: what analyse may.
"""

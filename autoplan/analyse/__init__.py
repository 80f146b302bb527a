"""Axes of a trace, the splits that they allow, and the cost of each split. Pure Python over plain data.

In: a Trace. Out: a Solution (`solve.py`): facts about parameters, and the instructions that make them true at run time.
May import: values, common, axes, ops. No torch.
"""

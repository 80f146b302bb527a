"""Decisions on the findings of analysis: rules name the boxes of the picture, users' choices are applied, a plan is
written.

In: a Solution, rule documents, written plans. Out: a Plan. May import: values, common, axes, ops, analyse. No torch.
"""

"""What is done with what was found: rules name the boxes of the picture, choices of people are heard, a plan is
written.

In: a Solution, rule documents, written plans. Out: a Plan. May import: values, common, axes, ops, analyse. No torch.
"""

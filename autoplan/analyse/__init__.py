"""What each tensor dimension of a trace is, what can be split, and what each split costs. Pure Python over plain data.

In: a Trace. Out: a Solution (`solve.py`): facts on parameters, and the instructions that make them true at run time.
May import: values, common, axes, ops. No torch.
"""

"""What to call a model with so that its forward runs and touches what there is to plan.

In: a module, its config. Out: feeds: named calls with their arguments. May import: what hf may.
"""

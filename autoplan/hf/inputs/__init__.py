"""Make inputs on which a model's forward runs and reaches everything to be planned.

In: a module, its config. Out: feeds: named calls with their arguments. May import: what hf may.
"""

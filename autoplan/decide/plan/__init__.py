"""Write the plan: one entry for each module that is split, nothing left out, each with its reason and its cost.

In: a Solution and the names that rules gave. Out: a Plan. May import: what decide may.
"""

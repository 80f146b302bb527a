"""Instructions for a live model at run time: a closed union of small frozen classes, one for each thing done.

`INSTRUCTIONS` are all of them by name, as plan files write them. docs/howto/add-an-instruction.md says how to add one.

In: plain fields. Out: frozen values that say what they take, give, cost and move. May import: what values may.
"""

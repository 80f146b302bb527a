"""What a config says before anything is built from it: is it sane, and which of its fields count experts?

In: the values of a config. Out: errors, counts. May import: what hf may.
"""

"""What a config says before anything is built from it: is it sane, and which of its fields count experts?

In: the values of a config. Out: errors, counts. May import: hf/tiny_sizes.py and what lies below hf/.
"""

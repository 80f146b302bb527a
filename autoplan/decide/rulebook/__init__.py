"""Rules are documents: how they are read, what their patterns and conditions mean, and whether their examples hold.

In: rules/roles/*.toml. Out: Rule values. May import: what decide may.
"""

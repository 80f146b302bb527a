"""The rulebook: read rule documents, interpret their patterns and conditions, and check their examples.

In: rules/roles/*.toml. Out: Rule values. May import: what decide may.
"""

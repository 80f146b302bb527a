"""Views for a terminal, a pull request or a code-review tool.

In: values. Out: rich tables and text. May import: what emit may.
"""

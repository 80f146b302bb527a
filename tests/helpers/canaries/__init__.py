"""Everything undocumented that autoplan uses of other packages, each with a canary; and the page that lists it all.

A new version of torch or transformers may move any of it without a word. These are tests, so they lie next to them:
`tests/patches/test_canaries.py` runs each by its name, `limits.py` writes docs/limits.md.
"""

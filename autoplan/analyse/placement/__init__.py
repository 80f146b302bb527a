"""Where ranks talk: each partial sum and each partial gradient reduced once, in as few places as possible.

In: the axes that are cut. Out: instructions at module boundaries and at calls. May import: what analyse may.
"""

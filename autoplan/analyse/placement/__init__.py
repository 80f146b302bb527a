"""Place the communication: each partial sum and partial gradient is reduced once, in as few places as possible.

In: the axes that are split. Out: instructions at module boundaries and at calls. May import: what analyse may.
"""

"""Models as people write them outside transformers: small, in the styles of well-known code bases, names and all.

Each module has a `build()` that returns a model with random weights; its forward takes `ids`.
"""

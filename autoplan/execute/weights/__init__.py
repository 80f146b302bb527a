"""A sharded model filled from a folder of safetensors, each rank reading only what it holds.

In: a planned model, a folder. Out: the model with the checkpoint's values. May import: what execute may.
"""

"""Fill a sharded model from a folder of safetensors, each rank reading only its own shards, and save it again.

In: a planned model, a folder. Out: the model with the checkpoint's values. May import: what execute may.
"""

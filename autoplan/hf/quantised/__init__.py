"""Quantised models, from their config alone.

In: a config with `quantization_config`, the plain model on meta. Out: for each of its weights the tensors that a
checkpoint holds in its place (`values/quantised.py`). May import: what hf may.
"""

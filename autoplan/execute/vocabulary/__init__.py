"""Logits that lie sharded over the vocabulary: losses, sampling, log-probabilities without a gather.

In: a rank's columns of logits. Out: what the whole logits would give, forward and backward.
May import: what execute may.
"""

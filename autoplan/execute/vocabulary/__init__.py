"""Logits sharded over the vocabulary: losses, sampling and log-probabilities without a gather.

In: a rank's columns of logits. Out: the results of the gathered logits, forward and backward. May import: what execute
may.
"""

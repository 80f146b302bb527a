"""Does the plan reach the model? Keys that match nothing, words that nobody knows, how much is split.

In: an Audited, and the findings before. Out: findings. May import: what check may.
"""

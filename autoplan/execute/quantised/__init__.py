"""Quantised weights at run time: the numbers that packed tensors stand for.

In: packed tensors, or a folder that holds them, and how they are stored (`values/quantised.py`). Out: plain numbers,
for a whole weight or for the rows of it that a rank holds. May import: what execute may.
"""

"""Quantised weights at run time: the plain numbers of packed tensors.

In: packed tensors, or a folder that holds them, and how they are stored (`values/quantised.py`). Out: plain numbers, of
a full weight or of a rank's rows of it. May import: what execute may.
"""

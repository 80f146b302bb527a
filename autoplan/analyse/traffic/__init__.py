"""What each block moves between ranks, beside the least that its split owes.

In: a trace, its splits and instructions. Out: Traffic. May import: what analyse may.
"""

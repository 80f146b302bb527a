"""What each block moves between ranks, compared with the least that its split needs.

In: a trace, its splits and instructions. Out: Traffic. May import: what analyse may.
"""

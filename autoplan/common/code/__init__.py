"""The code of models: hashes of it, places in it, ways through it.

In: functions, frames, classes. Out: text and plain values. May import: what common may.
"""

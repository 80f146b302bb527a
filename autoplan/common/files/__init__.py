"""Files that others wrote, read as plain values; our own files, written completely or not at all.

In: a path, or text. Out: plain values, or one error that names file and place. May import: what common may. No torch.
"""

"""One step, written down.

    world (fake ranks) ── record (ops, storages, messages: a Tape) ── program (stretches) ── depth (all blocks)

In: a sharded copy without storage. Out: a Program of all that it does. May import: all rooms below forecast, its own
files.
"""

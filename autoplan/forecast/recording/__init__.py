"""One step, written down: a sharded copy without storage comes in, a Program of all that it does goes out.

    world (fake ranks) ── record (ops, storages, messages: a Tape) ── program (stretches) ── depth (all blocks)

May import whatever forecast may, but nothing else of it.
"""

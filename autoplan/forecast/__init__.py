"""What a step costs on a mesh, and which mesh to take.

    record (a folded, sharded copy without storage runs one step) ── Tape ── timeline ── Estimate ── choose ── Choice

One recording of a step holds every value at its size on a rank, when it comes and when it goes. Data parallelism,
optimizers and the depth of the model are laid over it by arithmetic, so a sweep over meshes records little.

In: a model, a mesh or a number of GPUs. Out: an Estimate, a DryRun or a Choice. May import: all rooms below.
"""

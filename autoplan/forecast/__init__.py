"""What a step costs on a mesh, and which mesh to take: a model comes in, an Estimate or a Choice goes out.

    record (a folded, sharded copy without storage runs one step) ── Tape ── timeline ── Estimate ── choose ── Choice

One recording of a step holds every value at its size on a rank, when it comes and when it goes. Data parallelism,
optimizers and the depth of the model are laid over it by arithmetic, so a sweep over meshes records little. May import
every room below the package's front.
"""

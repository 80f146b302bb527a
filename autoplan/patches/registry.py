"""Everything of other packages that autoplan replaces, and everything undocumented that it uses.

The problem: a new version of torch or transformers may move any of it without a word. So each entry has a canary, which
the tests run (`tests/patches/test_canaries.py`), and `docs/limits.md` lists them all. What replaces something outside
this folder, or uses a private name that stands in no entry, fails a test.
"""

from __future__ import annotations

from autoplan.patches.classes import CLASSES
from autoplan.patches.double_precision import DOUBLE_PRECISION
from autoplan.patches.kernels import KERNEL_GUARDS, REFERENCE_PATH
from autoplan.patches.optimizers import OPTIMIZERS
from autoplan.patches.patched import Patch, Private
from autoplan.patches.private_engines import ENGINES
from autoplan.patches.private_others import OTHERS
from autoplan.patches.private_torch import TORCH
from autoplan.patches.simulated_ranks import GENERATOR, WORLD
from autoplan.patches.uncached import UNCACHED

__all__ = ["ENTRIES", "PATCHES", "PRIVATE"]

PATCHES: tuple[Patch, ...] = (
    OPTIMIZERS,
    CLASSES,
    KERNEL_GUARDS,
    REFERENCE_PATH,
    UNCACHED,
    DOUBLE_PRECISION,
    WORLD,
    GENERATOR,
)
PRIVATE: tuple[Private, ...] = (*TORCH, *ENGINES, *OTHERS)
ENTRIES: tuple[Patch | Private, ...] = (*PATCHES, *PRIVATE)

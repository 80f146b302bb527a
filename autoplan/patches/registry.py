"""Everything of other packages that autoplan replaces.

The problem: a new version of torch or transformers may move any of it without a word. So each entry has a canary, which
the tests run (`tests/patches/test_canaries.py`), and `docs/limits.md` lists them all, next to the undocumented names
that are used (autoplan/doctor/). What replaces something outside this folder fails a test.
"""

from __future__ import annotations

from autoplan.patches.classes import CLASSES, UNCACHED, UNSCRIPTED
from autoplan.patches.kernels import KERNEL_GUARDS, KERNEL_STAND_INS, REFERENCE_PATH, UNPACKED
from autoplan.patches.patched import Patch
from autoplan.patches.seeding import DOUBLE_PRECISION, SEEDING
from autoplan.patches.sharding_rules import COMPILED_LOSS, OPS_BY_WHOLE, SHARDING_RULES, UNTRACED_LOGITS
from autoplan.patches.simulated_ranks import GENERATOR, HOST_GENERATORS, PROCESS_GROUP, RANK_BACKEND, WORLD
from autoplan.patches.tensors import (
    FULL_STATE_DICTS,
    OPTIMIZERS,
    PARAMETER_DATA,
    PICKED_ROWS,
    SAFETENSORS_STORAGE,
    TOTAL_NORM,
)

PATCHES: tuple[Patch, ...] = (
    OPTIMIZERS,
    TOTAL_NORM,
    PARAMETER_DATA,
    PICKED_ROWS,
    FULL_STATE_DICTS,
    SAFETENSORS_STORAGE,
    SHARDING_RULES,
    OPS_BY_WHOLE,
    COMPILED_LOSS,
    UNTRACED_LOGITS,
    CLASSES,
    KERNEL_GUARDS,
    KERNEL_STAND_INS,
    REFERENCE_PATH,
    UNPACKED,
    UNCACHED,
    UNSCRIPTED,
    DOUBLE_PRECISION,
    SEEDING,
    WORLD,
    GENERATOR,
    HOST_GENERATORS,
    RANK_BACKEND,
    PROCESS_GROUP,
)

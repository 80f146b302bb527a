"""Everything of other packages that autoplan replaces.

The problem: a new version of torch or transformers may move any of it without a word. So each entry has a canary, which
the tests run (`tests/patches/test_canaries.py`), and `docs/limits.md` lists them all, next to the undocumented names
that are used (autoplan/doctor/). What replaces something outside this folder fails a test.
"""

from __future__ import annotations

from autoplan.patches.classes import CLASSES
from autoplan.patches.compiled_loss import COMPILED_LOSS, UNTRACED_LOGITS
from autoplan.patches.double_precision import DOUBLE_PRECISION
from autoplan.patches.full_state_dicts import FULL_STATE_DICTS
from autoplan.patches.kernels import KERNEL_GUARDS, KERNEL_STAND_INS, REFERENCE_PATH, UNPACKED
from autoplan.patches.optimizers import OPTIMIZERS
from autoplan.patches.parameter_data import PARAMETER_DATA
from autoplan.patches.patched import Patch
from autoplan.patches.process_group import PROCESS_GROUP
from autoplan.patches.recorded_code import UNCACHED, UNSCRIPTED
from autoplan.patches.safetensors_storage import SAFETENSORS_STORAGE
from autoplan.patches.seeding import SEEDING
from autoplan.patches.sharding_rules import SHARDING_RULES
from autoplan.patches.simulated_ranks import GENERATOR, HOST_GENERATORS, RANK_BACKEND, WORLD
from autoplan.patches.total_norm import TOTAL_NORM

__all__ = ["PATCHES"]

PATCHES: tuple[Patch, ...] = (
    OPTIMIZERS,
    TOTAL_NORM,
    PARAMETER_DATA,
    FULL_STATE_DICTS,
    SAFETENSORS_STORAGE,
    SHARDING_RULES,
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

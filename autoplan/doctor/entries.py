"""All entries: what is replaced, and what is used though nobody documents it."""

from __future__ import annotations

from autoplan.doctor.private import Private
from autoplan.doctor.private_engines import ENGINES
from autoplan.doctor.private_fsdp import FSDP
from autoplan.doctor.private_modules import MODULES
from autoplan.doctor.private_others import OTHERS
from autoplan.doctor.private_torch import TORCH
from autoplan.patches.patched import Patch
from autoplan.patches.registry import PATCHES

__all__ = ["ENTRIES", "PATCHES", "PRIVATE"]

PRIVATE: tuple[Private, ...] = (*TORCH, *MODULES, *FSDP, *ENGINES, *OTHERS)
ENTRIES: tuple[Patch | Private, ...] = (*PATCHES, *PRIVATE)

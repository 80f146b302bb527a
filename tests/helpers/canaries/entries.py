"""All entries: what is replaced, and what is used though nobody documents it."""

from __future__ import annotations

from autoplan.patches.patched import Patch
from autoplan.patches.registry import PATCHES
from canaries.private import Private
from canaries.private_engines import ENGINES
from canaries.private_fsdp import FSDP
from canaries.private_others import OTHERS
from canaries.private_torch import TORCH

__all__ = ["ENTRIES", "PATCHES", "PRIVATE"]

PRIVATE: tuple[Private, ...] = (*TORCH, *FSDP, *ENGINES, *OTHERS)
ENTRIES: tuple[Patch | Private, ...] = (*PATCHES, *PRIVATE)

"""The transformers config of a module.

The problem: `.config` is a name that everybody uses. nanoGPT keeps a dataclass there, others a dict or what argparse
read, and none of them has a model type, sub-configs or an attention implementation. Whoever needs what only a
transformers config has asks here. Rooms without torch ask too, so nothing is imported for it: while transformers is not
loaded, nobody holds a config of its own.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

__all__ = ["config_of"]


def config_of(module: nn.Module) -> PretrainedConfig | None:
    """The transformers config of a module; None where `.config` is nothing, or anything else."""
    library = sys.modules.get("transformers.configuration_utils")
    found = getattr(module, "config", None)
    return found if library is not None and isinstance(found, library.PretrainedConfig) else None

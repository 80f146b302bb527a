"""The transformers config of a module.

The problem: `.config` is a name that everybody uses. nanoGPT keeps a dataclass there, others a dict or what argparse
read, and none of them has a model type, sub-configs or an attention implementation. Whoever needs what only a
transformers config has asks here.
"""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

__all__ = ["config_of"]


def config_of(module: nn.Module) -> PretrainedConfig | None:
    """The transformers config of a module; None where `.config` is nothing, or anything else."""
    found = getattr(module, "config", None)
    return found if isinstance(found, PretrainedConfig) else None

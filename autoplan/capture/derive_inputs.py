"""Inputs for a plain module, from its signature and from the first consumer of each argument."""

from __future__ import annotations

from typing import Any

from torch import nn

from autoplan.errors import CaptureError

__all__ = ["derive"]


def derive(model: nn.Module, batch: int, length: int, seed: int) -> dict[str, Any]:
    """Keyword arguments for one forward."""
    raise CaptureError(f"no inputs known for {type(model).__name__}", hint="pass inputs={argument: tensor}")

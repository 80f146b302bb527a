"""Surroundings in which models are read and tried: what the caller has switched on around us is theirs.

People plan where they build: under `torch.device("meta")`, `torch.no_grad()`, inference mode, autocast. A clone that is
made there has no numbers, or no gradients, and what is then found wrong is not the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def plain_surroundings() -> Iterator[None]:
    """Tensors on the CPU unless asked otherwise, with gradients, each in its own dtype."""
    with ExitStack() as stack:
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield

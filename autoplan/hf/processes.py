"""What a new process must be told about transformers before it runs a model that was built elsewhere."""

from __future__ import annotations

import sys

from torch import nn

PRELOADED = "transformers.modeling_utils"  # what takes long to import


def note_what_is_collected(model: nn.Module) -> None:
    """transformers notes, while it builds a model, which inner outputs it may collect. One that was sent to this
    process was not built here."""
    library = sys.modules.get("transformers.utils.output_capturing")
    notes = getattr(library, "_CAN_RECORD_REGISTRY", {})
    for module in model.modules():
        if hasattr(module, "_can_record_outputs"):
            notes[str(type(module)) if type(notes) is dict else module] = module._can_record_outputs


def say_less() -> None:
    """No warnings of transformers' own."""
    from transformers import logging

    logging.set_verbosity_error()

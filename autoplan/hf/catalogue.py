"""Which architectures transformers knows, by what they are for."""

from __future__ import annotations

from transformers.models.auto import modeling_auto

from autoplan.common.errors import SourceError

__all__ = ["MAPPINGS", "architectures", "class_name_of"]

# In the order in which a model type without `architectures` is looked up.
MAPPINGS: dict[str, str] = {
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image_text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}


def architectures(mapping: str) -> list[tuple[str, str]]:
    """(model type, class name) of every architecture of a mapping, in transformers' order."""
    if mapping not in MAPPINGS:
        raise SourceError(f"there is no mapping {mapping!r}", hint=f"use one of {', '.join(MAPPINGS)}")
    pairs = []
    for model_type, classes in getattr(modeling_auto, MAPPINGS[mapping]).items():
        for name in classes if isinstance(classes, tuple | list) else (classes,):
            pairs.append((model_type, name))
    return pairs


def class_name_of(model_type: str) -> str | None:
    """The class for a bare model type: from the first mapping that has it."""
    for mapping in MAPPINGS:
        for known, name in architectures(mapping):
            if known == model_type:
                return name
    return None

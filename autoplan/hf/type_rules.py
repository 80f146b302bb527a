"""Help that a model type needs to be built or fed: `rules/inputs/<type>.toml`, data only.

    why = "..."                    # required: what goes wrong without the file
    dtype = "float32"              # where the model's own code cannot run in float64
    [default]                      # fields without which the type's default config does not build
    [tiny]                         # fields of the tiny clone; "=2*heads" is a product of numbers and sizes,
    [tiny.text_config]             #   "=default" leaves the field to its class; tables reach into sub-configs
    [inputs.pixel_values]          # one argument of the first entry: kind, shape, low, high; or drop = true
    kind = "normal"                # ids | normal | uniform | zeros | ones | rows (one `row`, repeated) | or `value`
    shape = ["batch", 3, "config.vision_config.image_size"]
    [prompts.image.pixel_values]   # one argument of the entry with a picture (audio, video) in its prompts: as above;
    kind = "normal"                #   placeholder tokens are counted and put into the text by autoplan, unless
                                   #   [prompts.image.placeholders] says how many: size = "batch*16"
    [parts."codec.decoder".latents]   # one argument of a part that forward does not run and that is called alone
    shape = ["batch", 3, 28, 28]

A file may name a model type; it never makes a decision.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from autoplan.common.errors import SourceError
from autoplan.common.rules_folder import rules_folder

__all__ = ["TypeRules", "type_rules"]

_KEYS = {"why", "dtype", "default", "tiny", "inputs", "prompts", "parts"}


@dataclass(frozen=True)
class TypeRules:
    """One file of `rules/inputs`; empty for a type that needs no help."""

    why: str = ""
    dtype: str = "float64"
    default: dict[str, Any] = field(default_factory=dict)
    tiny: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    prompts: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    parts: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)


@lru_cache(maxsize=1024)
def type_rules(model_type: str) -> TypeRules:
    """The rules of a model type. Raises SourceError for a file that cannot be read or has an unknown key."""
    if not re.fullmatch(r"[\w.-]+", model_type):
        return TypeRules()
    path = rules_folder() / "inputs" / f"{model_type}.toml"
    if not path.is_file():
        return TypeRules()
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise SourceError(f"{path}: {error}", hint="mend the TOML") from error
    unknown = sorted(set(data) - _KEYS)
    if unknown or not data.get("why"):
        problem = f"unknown keys {', '.join(unknown)}" if unknown else "`why` is missing"
        raise SourceError(f"{path}: {problem}", hint=f"a file has {', '.join(sorted(_KEYS))}")
    return TypeRules(**data)

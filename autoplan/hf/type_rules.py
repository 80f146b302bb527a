"""Rules for model types: the catalogue of types, and documents in rules/inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from transformers.models.auto import modeling_auto

from autoplan.common.errors import SourceError
from autoplan.common.files.decode import misshapen
from autoplan.common.files.plain import NotPlain, read_plain
from autoplan.common.files.rule_files import rules_folders

# The architectures of transformers, by task.

# Ordered as a model type without `architectures` is looked up.
MAPPINGS: dict[str, str] = {
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image_text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}


def architectures(mapping: str) -> list[tuple[str, str]]:
    """Return (model type, class name) of every architecture of a mapping, in transformers' order."""
    if mapping not in MAPPINGS:
        raise SourceError(f"there is no mapping {mapping!r}", hint=f"use one of {', '.join(MAPPINGS)}")
    classes = getattr(modeling_auto, MAPPINGS[mapping]).items()
    return [(model_type, name) for model_type, own in classes for name in ((own,) if isinstance(own, str) else own)]


def class_name_of(model_type: str) -> str | None:
    """Return the class for a bare model type, from the first mapping that has it."""
    pairs = (pair for mapping in MAPPINGS for pair in architectures(mapping))
    return next((name for other, name in pairs if other == model_type), None)


# `rules/inputs/<type>.toml` helps to build a small model of a type or to feed it, and `rules/defaults.toml` fills in
# what the type's default config leaves open. docs/howto/feed-a-model.md explains the keys. No file decides a plan.

_KEYS = {"applies_to", "why", "tiny", "inputs", "prompts", "parts"}
_DEFAULT_KEYS = {"applies_to", "why", "fields"}

_SIZE = (int, str)
_ARGUMENT = {
    **{"kind": str, "dtype": str, "drop": bool, "shape": [_SIZE], "size": _SIZE, "low": _SIZE, "high": _SIZE},
    "row": [(float, bool, [(float, bool)])],
}
_SHAPE = {
    **{"applies_to": [str], "why": str, "tiny": {}, "inputs": {"*": _ARGUMENT}, "prompts": {"*": {"*": _ARGUMENT}}},
    **{"parts": {"*": {"*": _ARGUMENT}}, "fields": {}},
}


Found = TypeVar("Found")


@dataclass(frozen=True)
class TypeRules:
    """One file of `rules/inputs`; empty for a type that needs no help."""

    why: str = ""
    tiny: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    prompts: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    parts: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)


def type_rules(model_type: str) -> TypeRules:
    """Return the rules of a model type. Raise SourceError for a file that cannot be read or has an unknown key."""
    return _first(rule_files, model_type) or TypeRules()


def open_fields(model_type: str) -> dict[str, Any]:
    """Return fields that the default config of a model type leaves open, with values."""
    return _first(_defaults, model_type) or {}


def _first(files: Callable[[Path], dict[str, Found]], model_type: str) -> Found | None:
    """Return the first non-empty rule among the search paths."""
    return next((rules[model_type] for folder in rules_folders() if model_type in (rules := files(folder))), None)


@lru_cache(maxsize=16)
def rule_files(folder: Path) -> dict[str, TypeRules]:
    """Return all files of `folder/inputs`, by the model types that they are for."""
    files: dict[str, TypeRules] = {}
    for path in sorted((folder / "inputs").glob("*.toml")):
        data = _read(path)
        types = _checked(path, data, _KEYS).pop("applies_to", [path.stem])
        _add(path, types, TypeRules(**data), files)
    return files


@lru_cache(maxsize=16)
def _defaults(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "defaults.toml"
    defaults: dict[str, dict[str, Any]] = {}
    data = _read(path) if path.is_file() else {"defaults": []}
    if problem := misshapen(data, {"defaults": [{}]}):
        raise SourceError(f"{path}: {problem}", hint="write [[defaults]] before each")
    for entry in data.get("defaults", []):
        types = _checked(path, entry, _DEFAULT_KEYS).get("applies_to", [])
        _add(path, types, entry.get("fields", {}), defaults)
    return defaults


def _read(path: Path) -> dict[str, Any]:
    return read_plain(path, NotPlain(error=SourceError, hint="fix the TOML"), notation="toml")


def _checked(path: Path, data: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    unknown = sorted(set(data) - keys)
    if unknown or not data.get("why"):
        problem = f"unknown keys {', '.join(unknown)}" if unknown else "`why` is missing"
        raise SourceError(f"{path}: {problem}", hint=f"it has {', '.join(sorted(keys))}")
    wrong = partial(SourceError, hint="compare it with another file of rules/inputs")
    if problem := misshapen(data, _SHAPE):
        raise wrong(f"{path}: {problem}")
    tables = (data.get("inputs", {}), *data.get("prompts", {}).values(), *data.get("parts", {}).values())
    for name, argument in (pair for table in tables for pair in table.items()):
        if not {"value", "size", "shape", "drop"} & argument.keys():
            raise wrong(f"{path}: {name!r} has no shape")
        if argument.get("kind") == "rows" and not argument.get("row"):
            raise wrong(f"{path}: {name!r} is made of rows, but has no row")
    return data


def _add(path: Path, types: list[str], rules: Any, files: dict[str, Any]) -> None:
    for model_type in types:
        if model_type in files:
            raise SourceError(f"{path}: another file is also for {model_type}", hint="one document for a model type")
        files[model_type] = rules

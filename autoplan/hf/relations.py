"""Relations between the sizes of a config that a tiny clone must keep, where the code relies on them.

Some hold by their meaning: layers that are read must exist, rotary sections must fill half a head.

A tiny clone's widths differ from each other on purpose: a layout cannot hide behind a coincidence. But some code needs
an inner width of four times the outer one, or the width of another tower, and its config says so only by its numbers.
So where a clone with free widths does not run, another is tried in which widths that are multiples of one another
stay such multiples, and stages whose widths are listed one by one keep all their widths.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from autoplan.hf.tiny_sizes import is_layer_count

__all__ = [
    "HEADS",
    "HIDDEN",
    "ROTARY_WIDTHS",
    "first_of",
    "fit_rotary_lists",
    "has_listed_stages",
    "related_width",
    "sections_of_depth",
    "smaller_sections",
    "vision_layers",
]

HIDDEN = ("hidden_size", "d_model", "n_embd", "hidden_dim", "dim", "embed_dim")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "attention_heads")
ROTARY_WIDTHS = ("qk_rope_head_dim", "head_dim")  # of latent attention only a part of a head turns
_WIDTHS = ("hidden", "narrow", "intermediate", "expert_width")  # sizes of tiny_sizes.Sizes
_STAGE_LISTS = re.compile(r"(_per_stage|^depths|^out_channels|^hidden_sizes|^stage_\w+)$")
_VISION_LAYERS = re.compile(r"^(vision_feature_layers?|insert_layer_id)$")
_LARGEST_RATIO = 16


def related_width(value: int, size: str, widths: Iterable[int], tiny: int) -> int | None:
    """The same multiple, or the same part, of `tiny` as `value` is of the first of `widths` that it is one of.

    >>> related_width(5120, "intermediate", [1280], 128)
    512
    """
    if size not in _WIDTHS:
        return None
    for width in widths:
        if value % width == 0 and value // width <= _LARGEST_RATIO:
            return value // width * tiny
        if width % value == 0 and width // value <= _LARGEST_RATIO and tiny % (width // value) == 0:
            return tiny // (width // value)
    return None


def has_listed_stages(fields: Mapping[str, Any]) -> bool:
    """Are there several stages, each with a number of its own in a list?"""
    return any(
        _STAGE_LISTS.search(name) and isinstance(value, list | tuple) and len(value) > 1
        for name, value in fields.items()
    )


def sections_of_depth(fields: Mapping[str, Any], depth: int) -> dict[str, int]:
    """The counts of layers that make up the depth among themselves, where there are three or more: the layers before
    a loop, in it and after it. Two numbers may sum to a third by chance."""
    counts = {name: value for name, value in fields.items() if type(value) is int and is_layer_count(name) == "depth"}
    sections = {name: count for name, count in counts.items() if 0 < count < depth}
    return sections if len(sections) > 2 and sum(sections.values()) == depth else {}


def smaller_sections(sections: Mapping[str, int], depth: int) -> dict[str, int]:
    """The same sections of a model of so many layers, none of them empty.

    >>> smaller_sections({"n_input_layers": 8, "n_recurrent_layers": 20, "n_output_layers": 8}, 4)
    {'n_input_layers': 1, 'n_recurrent_layers': 2, 'n_output_layers': 1}
    """
    more = _shared_out(depth - len(sections), [count - 1 for count in sections.values()])
    return {name: 1 + count for name, count in zip(sections, more, strict=True)}


def vision_layers(fields: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Fields that say which layers of a vision tower are read, for a tower of `depth` layers; only what must change."""
    found = {}
    for name, value in fields.items():
        if _VISION_LAYERS.search(name) and isinstance(value, int | list | tuple) and not isinstance(value, bool):
            numbers = [value] if isinstance(value, int) else value
            there = [_nearest_layer(number, depth) for number in numbers if isinstance(number, int)]
            if there != list(numbers):
                found[name] = there[0] if isinstance(value, int) else type(value)(there)
    return found


def _nearest_layer(number: int, depth: int) -> int:
    """The layer of that number, counted from either end, or the last one that there is."""
    return max(number, -depth) if number < 0 else min(number, depth - 1)


def first_of(fields: dict[str, Any], cls: type[PretrainedConfig], names: tuple[str, ...]) -> int | None:
    values = (fields.get(cls.attribute_map.get(name, name)) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)


def equal_widths(config: PretrainedConfig, small: Mapping[str, Any]) -> dict[str, int]:
    """Fields that were as wide as the model and stayed so, made as wide as the small one: its class may ask for it."""
    width = next((name for name in HIDDEN if isinstance(small.get(name), int)), "")
    now, then = vars(config).get(width), small.get(width)
    if not isinstance(now, int) or not isinstance(then, int) or now == then:
        return {}
    return {name: then for name, value in small.items() if value == now == vars(config).get(name) and value is not True}


def fit_rotary_lists(fields: dict[str, Any], cls: type[PretrainedConfig]) -> None:
    """Lists in rope parameters that have one number per rotary frequency must fit the tiny head width."""
    rope = fields.get("rope_parameters")
    heads, hidden, width = (first_of(fields, cls, names) for names in (HEADS, HIDDEN, ROTARY_WIDTHS))
    head_dim = width or (hidden // heads if hidden and heads else None)
    if not isinstance(rope, dict) or not head_dim:
        return
    for parameters in [x for x in rope.values() if isinstance(x, dict)] or [rope]:
        part = parameters.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
        half = int(head_dim * part) // 2
        old = parameters.get("mrope_section")
        file = inspect.getsourcefile(cls) or ""
        if sum(old or ()) != half and (old or _modeling_mentions(file, "mrope_section")):
            parameters["mrope_section"] = _shared_out(half, old or [1, 1, 1])
        for name in ("short_factor", "long_factor"):
            if isinstance(parameters.get(name), list):
                parameters[name] = parameters[name][:half]


def _shared_out(total: int, old: list[int]) -> list[int]:
    """Integers in the proportions of `old` that sum to `total`; what rounding leaves goes to the largest shares."""
    shares = [total * part / sum(old) for part in old]
    new = [int(share) for share in shares]
    for i in sorted(range(len(old)), key=lambda i: new[i] - shares[i])[: total - sum(new)]:
        new[i] += 1
    return new


@lru_cache(maxsize=1024)
def _modeling_mentions(config_file: str, word: str) -> bool:
    """Does the modeling code next to a config use the word? (It may have a default for it that is too wide.)"""
    files = sorted(Path(config_file).parent.glob("modeling_*.py"))
    return any(word in file.read_text(encoding="utf-8") for file in files)

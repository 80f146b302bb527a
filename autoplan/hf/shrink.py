"""Shrink the config of a real model to a tiny one that makes the same choices (one kv head stays one, tied stays tied,
every type of layer occurs). A field that the class derives from others is left out, to be derived again."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from autoplan.common.errors import SourceError
from autoplan.hf.tiny_sizes import (
    HEADS,
    HIDDEN,
    ROTARY_WIDTHS,
    VARIANTS,
    Sizes,
    amount,
    equal_widths,
    field_rule,
    first_of,
    fit_rotary_lists,
    fitted,
    has_listed_stages,
    is_layer_count,
    is_token_id,
    related_width,
    sections_of_depth,
    smaller_sections,
    vision_layers,
)
from autoplan.hf.type_rules import type_rules

_DEPTH = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "depth")
_PERIODS = (
    "full_attention_interval", "attn_layer_period", "layer_group_size", "global_attn_every_n_layers",
    "no_rope_layer_interval", "sliding_window_pattern", "_sliding_window_pattern", "encoder_sparse_step",
    "decoder_sparse_step",
)  # fmt: skip
_PER_LAYER = re.compile(r"types?$|layers_block_type|pattern|layers_config|no_rope_layers")
_LAYER_INDEX = re.compile(r"layer|index|idx|indices")
_STAGES = "out_indices"  # stages whose output a backbone returns, kept in a private field
_SHARED = "num_kv_shared_layers"  # number of last layers that read the keys and values of earlier ones
_MOST_LAYERS, _MOST_PERIOD = 4, 8
# Fields of every config that a clone decides for itself.
_OWN_BUSINESS = {"transformers_version", "dtype", "torch_dtype", "quantization_config", "use_cache", "auto_map"}


@dataclass
class _Shrinking:
    """One shrinking of a config with all configs inside it: equal special tokens stay equal across them."""

    sizes: Sizes
    widths_stay: bool = False
    related: tuple[int, ...] = ()  # the real model's widths, where other widths stay multiples of them
    token_ids: dict[int, int] = field(default_factory=dict)
    ranks: tuple[int, int] | None = None  # ranks of the plan, and of the trial

    def token(self, value: int) -> int:
        """Return an id below the tiny vocabulary; small ids stay, large ones move to the top, equal ones stay equal."""
        if value < 100:
            return value
        return self.token_ids.setdefault(value, self.sizes.vocab - 1 - len(self.token_ids) % (self.sizes.vocab // 3))


def tiny_config(
    config: PretrainedConfig, variant: int = 0, shrink: str = "all", ranks: tuple[int, int] | None = None
) -> PretrainedConfig:
    """Return a tiny config of the same class. `ranks`: of the plan, and of the trial, whose ranks hold of a clone what
    the plan's hold of the model.

    `shrink="related"` keeps widths multiples of each other, "depth" every width, "nothing" the layers too. Raise
    SourceError when the class refuses the shrunk fields.
    """
    if shrink == "nothing":
        return copy.deepcopy(config)
    if not 0 <= variant < len(VARIANTS):
        raise SourceError(f"no tiny variant {variant}", hint=f"use 0 to {len(VARIANTS) - 1}")
    towers = all_configs(config) if shrink == "related" else []
    widths = tuple(dict.fromkeys(width for tower in towers if (width := _first_int(tower, HIDDEN))))
    tiny = _shrunk(copy.deepcopy(config), _Shrinking(VARIANTS[variant], shrink == "depth", widths, ranks=ranks), {})
    for section in all_configs(tiny):
        fit_rotary_lists(vars(section), type(section))
        # Layers of the vision tower that are read by number must exist in the tiny tower
        tower = vars(tiny).get("vision_config", section)
        depth = _depth(tower) if isinstance(tower, PretrainedConfig) else None
        for name, value in vision_layers(vars(section), depth).items() if depth else ():
            setattr(section, name, value)
    # Resolutions are multiples of a tile, whose side is the vision tower's image: as many tiny tiles
    old, new = (next((n for c in all_configs(version) if isinstance(n := _read(c, "image_size"), int)), 0)
                for version in (config, tiny))  # fmt: skip
    pinpoints = vars(tiny).get("image_grid_pinpoints")
    if pinpoints and old:
        resolutions = vars(config)["image_grid_pinpoints"]
        tiny.image_grid_pinpoints = _map_ints(resolutions, lambda pixels: max(1, pixels // old) * new)
    return tiny


def sub_configs(config: PretrainedConfig) -> dict[str, PretrainedConfig]:
    """Return the configs inside a config, by field."""
    return {name: value for name, value in vars(config).items() if isinstance(value, PretrainedConfig)}


def _shrunk(config: PretrainedConfig, work: _Shrinking, overrides: dict[str, Any]) -> PretrainedConfig:
    """Shrink one config and the ones inside it, then build it again."""
    overrides = _merged(type_rules(config.model_type or "").tiny, overrides)
    inner = sub_configs(config)
    if work.ranks is not None:
        work = dataclasses.replace(work, sizes=fitted(work.sizes, vars(config), *work.ranks))
    keywords = _chosen_fields(config)
    layers = _layers_needed(config)
    keywords = {name: _small(name, value, config, layers, work) for name, value in keywords.items()}
    if (sections := sections_of_depth(vars(config), _depth(config) or 0)) and len(layers) < sum(sections.values()):
        keywords |= {n: v for n, v in smaller_sections(sections, len(layers)).items() if n in keywords}
    keywords |= _single_layers(config, layers, work)
    for name, sub in inner.items():
        keywords[name] = _shrunk(sub, work, overrides.get(name, {}))
    for name, value in overrides.items():
        if name in inner:
            continue
        if value == "=default":
            keywords.pop(name, None)
        else:
            keywords[name] = _read_sizes(value, work.sizes)
    rope = vars(config).get("rope_parameters")
    if keywords.keys() & ROTARY_WIDTHS and isinstance(rope, dict) and "mrope_section" in rope:
        keywords.setdefault("rope_parameters", copy.deepcopy(rope))  # the class may look at both while it is built
        fit_rotary_lists(keywords, type(config))
    try:
        return _built(config, keywords, layers, work)
    except Exception as error:  # a config class may raise anything
        alike = equal_widths(config, keywords)
        if alike:
            with suppress(Exception):  # the first refusal is reported
                return _built(config, {**keywords, **alike}, layers, work)
        small = {name: value for name, value in keywords.items() if isinstance(value, int | list)}
        hint = f"tried {small}; set what it needs in rules/inputs/{config.model_type}.toml under [tiny]"
        raise SourceError(f"{type(config).__name__} rejects the sizes of a tiny clone: {error}", hint=hint) from error


def _built(config: PretrainedConfig, keywords: dict[str, Any], layers: list[int], work: _Shrinking) -> PretrainedConfig:
    """Build a config of these fields. Fields that the class sets itself are shrunk if they point at layers left out."""
    built = type(config)(**keywords)
    others = {name: value for name, value in vars(built).items() if name not in keywords}
    past_the_end = {
        name: _small(name, value, config, layers, work)
        for name, value in others.items()
        if vars(config).get(name) == value and _point_at_layers(name, value, layers, _depth(config))
    }
    return type(config)(**keywords, **past_the_end) if past_the_end else built


# Fields that were chosen


def _defaults(cls: type) -> dict[str, Any]:
    """Return every field that the class can be built with, and its default."""
    missing, defaults = dataclasses.MISSING, dict[str, Any]()
    for item in dataclasses.fields(cls):
        default = item.default if item.default_factory is missing else item.default_factory()
        defaults[item.name] = None if default is missing else default
    for parameter in inspect.signature(cls).parameters.values():  # remote code often has its own __init__
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            defaults.setdefault(parameter.name, None if parameter.default is parameter.empty else parameter.default)
    aliases = getattr(cls, "attribute_map", {})  # alias -> the name under which the value is stored
    return {aliases.get(name, name): default for name, default in defaults.items()}


def _chosen_fields(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields with a value, except those that the class derives itself to the same value."""
    defaults = _defaults(type(config))
    inner = set(sub_configs(config))
    current = {n: v for n, v in vars(config).items() if n not in inner and n not in _OWN_BUSINESS}
    if stages := current.get(f"_{_STAGES}"):
        current[_STAGES] = stages
    fixed: dict[str, Any] = {}
    open_fields: dict[str, Any] = {}
    for name, value in current.items():
        default = defaults.get(name)
        if name.startswith("_") or value is None and default is None:
            continue
        derived = default is None or isinstance(default, str) and not isinstance(value, str)
        (open_fields if derived else fixed)[name] = value
    try:
        baseline = vars(type(config)(**copy.deepcopy({**fixed, **sub_configs(config)})))
    except Exception:  # the class needs an open field to be built: then every field counts as chosen
        baseline = {}
    depth = _depth(config)
    chosen = {
        name: value
        for name, value in open_fields.items()
        if name not in baseline or baseline[name] != value or (name in defaults and _per_layer(value, depth))
    }
    return copy.deepcopy({**fixed, **chosen})


# Tiny values


def _small(name: str, value: Any, config: PretrainedConfig, layers: list[int], work: _Shrinking) -> Any:
    """Return the tiny value of one field. `layers`: the real layers that the clone keeps."""
    if isinstance(value, bool) or not isinstance(value, int | list | tuple):
        return value
    if is_token_id(name):
        return value if work.widths_stay else _map_ints(value, work.token)
    depth = _depth(config)
    if isinstance(value, int):
        counts = is_layer_count(name)
        if counts and name == _SHARED:
            return sum(i >= (depth or 0) - value for i in layers)
        if counts:
            return min(value, len(layers) if counts == "depth" or value == depth else 1)
        return _size(name, value, config, work)
    if depth and _per_layer(value, depth) and depth > len(layers):
        return type(value)(_map_ints(value[i], lambda x: _size(name, x, config, work)) for i in layers)
    if name == _STAGES and depth and len(layers) < depth and max(value) <= depth:
        after_the_last = len(layers) + 1  # stage 0 is the input of the first layer
        return type(value)(range(after_the_last - len(value), after_the_last))
    if _point_at_layers(name, value, layers, depth):
        return type(value)(x for x in value if x < len(layers)) or type(value)([len(layers) - 1])
    if name in ("image_size", "crop_size", "img_size"):
        return _map_ints(value, lambda x: _size(name, x, config, work))
    return value


def _point_at_layers(name: str, value: Any, layers: list[int], depth: int | None) -> bool:
    """Return whether these are numbers of layers, some of which the clone does not have."""
    if not isinstance(value, list | tuple) or not value or "feature_layer" in name or not _LAYER_INDEX.search(name):
        return False
    return depth is not None and all(type(x) is int for x in value) and len(layers) <= max(value) <= depth


def _size(name: str, value: int, config: PretrainedConfig, work: _Shrinking) -> int:
    """Return the tiny value of one integer that counts or measures something."""
    size, how = field_rule(name)
    sizes = work.sizes
    hidden, heads = _first_int(config, HIDDEN), _first_int(config, HEADS)
    if work.widths_stay or how == "keep" or value <= 1:
        return value
    if how == "one":
        return 1
    if how == "image":
        patch = _read(config, "patch_size") or 14
        patch = patch[0] if isinstance(patch, list | tuple) else patch
        return min(value, 4 * patch)
    if work.related and has_listed_stages(vars(config)):
        return value
    target: int = getattr(sizes, size)
    widths = (*([hidden] if hidden else []), *work.related) if work.related else ()
    if width := related_width(value, size, widths, sizes.hidden):
        return width
    if how == "exact" or size == "hidden" and value == hidden and how == "most":
        return target
    if how == "kv":
        return sizes.heads if heads and value >= heads else target
    if how == "head" and hidden and heads and heads * value != hidden:
        return min(value, sizes.wide_head_dim)
    if how == "width" and (not hidden or value == hidden):
        target = sizes.hidden
    if how == "double":
        target = 2 * sizes.hidden
    return min(value, target)


def _per_layer(value: Any, depth: int | None) -> bool:
    return isinstance(value, list | tuple) and depth is not None and len(value) == depth > 2


def _layers_needed(config: PretrainedConfig) -> list[int]:
    """Return the first layers that show every type of layer; if these are too many, the first layer of each type."""
    depth = _depth(config) or 2
    lists = {n: v for n, v in vars(config).items() if _PER_LAYER.search(n) and isinstance(v, list | tuple)}
    kinds = list(zip(*(map(str, value) for value in lists.values() if _per_layer(value, depth)), strict=True))
    shared = _read(config, _SHARED) or 0
    outputs = len(vars(config).get(f"_{_STAGES}") or ())
    if 0 < shared < depth and kinds:
        return first_of_each(kinds[: depth - shared], 0) + first_of_each(kinds[depth - shared :], depth - shared)
    first = first_of_each(kinds, 0)
    needed = first[-1] + 1 if first else 0
    if len(first) < 2:
        periods = [p for name in _PERIODS if isinstance(p := _read(config, name), int)]
        # A cycle of layer types repeats over the depth.
        texts = [v for v in lists.values() if all(isinstance(x, str) for x in v)]
        cycles = [v for v in texts if len(set(v)) > 1 and len(v) < depth]
        needed = max([needed, outputs, *periods, *map(len, cycles)])
    if needed <= _MOST_LAYERS:
        least = max(2, len(sections_of_depth(vars(config), depth)))
        return list(range(min(max(needed, least), max(depth, 1))))
    return first if len(first) > 1 else list(range(min(needed, _MOST_PERIOD)))


def first_of_each(kinds: list[tuple[str, ...]], start: int) -> list[int]:
    return sorted({kind: start + i for i, kind in reversed(list(enumerate(kinds)))}.values())


def _single_layers(config: PretrainedConfig, layers: list[int], work: _Shrinking) -> dict[str, Any]:
    """Return fields that differ for single layers, shrunk so that they still differ from the other layers'."""
    single = getattr(vars(config).get("_heterogeneity_spec"), "per_layer_overrides", None) or {}
    result: dict[int, dict[str, Any]] = {}
    for place, layer in enumerate(layers):
        for name, value in single.get(layer, {}).items():
            common = vars(config).get(name)
            small, usual = (_small(name, v, config, layers, work) for v in (value, common))
            if isinstance(small, int) and small == usual and value != common and small > 1:
                more = work.sizes.heads if field_rule(name)[1] == "kv" else 2 * small
                small = more if value > common else small // 2
            result.setdefault(place, {})[name] = small
    return {"per_layer_config": result} if result else {}


def _depth(config: PretrainedConfig) -> int | None:
    """Return the number of layers: a number, or the length of the list of their types."""
    types = _read(config, "layer_types")
    return _first_int(config, _DEPTH) or (len(types) if isinstance(types, list | tuple) else None)


def _first_int(config: PretrainedConfig, names: tuple[str, ...]) -> int | None:
    return first_of(vars(config), type(config), names)


def _read(config: PretrainedConfig, name: str) -> Any:
    """Return a field under its own or its common name, as stored: neither properties nor per-layer values are read."""
    return vars(config).get(type(config).attribute_map.get(name, name))


def _map_ints(value: Any, change: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_map_ints(x, change) for x in value)
    return change(value) if isinstance(value, int) and not isinstance(value, bool) else value


# Overrides


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge two tables, also inside; `above` wins."""
    result = dict(below)
    for name, value in above.items():
        old = result.get(name)
        result[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _read_sizes(value: Any, sizes: Sizes) -> Any:
    if isinstance(value, list):
        return [_read_sizes(x, sizes) for x in value]
    if isinstance(value, dict):
        return {name: _read_sizes(x, sizes) for name, x in value.items()}
    return amount(value, sizes) if isinstance(value, str) and value.startswith("=") else value


def all_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    return [config] + [inner for sub in sub_configs(config).values() for inner in all_configs(sub)]

"""Sizes of a tiny clone, and the relations between fields of a config that they must keep."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

# Sizes of a tiny clone, and the size of each config field. All sizes differ, so that no layout is right by coincidence;
# heads are divisible by 2 and 4; two variants show more than one. The first pattern that matches decides.


@dataclass(frozen=True)
class Sizes:
    """The sizes of one variant. `hidden == heads * head_dim` and `2 * hidden == state_heads * head_dim`."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    wide_head_dim: int  # where a config is free to have heads * head_dim != hidden
    narrow: int  # an embedding that is smaller than hidden
    intermediate: int
    vocab: int
    experts: int
    expert_width: int
    state_heads: int
    linear_key_heads: int
    linear_value_heads: int
    query_rank: int
    kv_rank: int
    value_dim: int
    rope_dim: int = 8
    state: int = 12
    rank: int = 6
    groups: int = 2
    top_k: int = 2
    chunk: int = 16
    latents: int = 4
    queries: int = 20  # chosen among the places of a small picture, which are few
    codebook: int = 32
    positions: int = 64
    filters: int = 4


VARIANTS = (
    Sizes(8, 4, 16, 128, 32, 96, 224, 160, 12, 80, 16, 4, 16, 56, 40, 20),
    Sizes(12, 4, 16, 192, 48, 144, 352, 224, 16, 112, 24, 4, 8, 88, 72, 28),
)

# (pattern of the field's name, size, how). How: "most" caps; "exact" replaces anything above 1; shrink.py answers the
# rest: "kv" (relative to the heads), "head" (relative to hidden / heads), "width" (relative to hidden), "image".
FIELDS: tuple[tuple[str, str, str], ...] = (
    (r"^(type_vocab_sizes?|shape_vocab_size|pronunciation_vocab_size)$", "", "keep"),
    (r"^(num_channels|in_channels|n_codebooks|num_codebooks|num_mel_bins|n_mel_bins|num_mel_filters)$", "", "keep"),
    (r"^(sliding_window|attention_window_size|sliding_window_size|window_size|index_topk|swa_window)$", "", "keep"),
    (r"^(local_attention|attention_chunk_size)$", "", "keep"),
    (r"vocab(_size)?(_\w+)?$|_vocab_size", "vocab", "most"),
    (r"^(codebook_size|num_embeddings|base_channels)$", "codebook", "most"),
    (r"^(num_filters|n_filters)$", "filters", "most"),
    (r"(key_value_heads|kv_heads|num_query_groups|multi_query_group_num)$", "kv_heads", "kv"),
    (r"^linear_(num_)?key_heads$|^linear_num_key_heads$", "linear_key_heads", "exact"),
    (r"^linear_num_value_heads$", "linear_value_heads", "exact"),
    (r"^(mamba|ssm)_(num_|n_)?heads$|^n_mamba_heads$", "state_heads", "exact"),
    (r"^index_n_heads$", "kv_heads", "exact"),
    (r"(^|_)(num_)?(\w+_)?(attention_)?heads$|^n_heads?$|_num_heads$", "heads", "exact"),
    (r"qk_rope_head_dim", "rope_dim", "most"),
    (r"^rotary_dim$", "rope_dim", "most"),
    (r"^(v_head_dim|value_head_dim)$", "value_dim", "most"),
    (r"(linear_\w*head_dim|mamba_\w*head_?dim|qk_nope_head_dim|mamba_d_head)$", "head_dim", "most"),
    (r"(head_dim|_head_size|d_kv|dim_head|d_head|headdim|kv_channels|head_size)$", "head_dim", "head"),
    (r"q_lora_rank$", "query_rank", "most"),
    (r"(lora_rank|hc_lowrank|laurel_rank|adapter_rank|embedding_rank|gated_norm_rank)$", "kv_rank", "most"),
    (r"topk_group$", "", "one"),
    (r"(group|groups)$", "groups", "exact"),
    (r"(experts_per_tok|top_k|topk|num_experts_per_token|moe_k)$", "top_k", "most"),
    (r"(shared_experts?)$", "", "one"),
    (r"(num_experts|local_experts|routed_experts|moe_num_experts|expert_num)$", "experts", "exact"),
    (r"expert_capacity", "chunk", "most"),
    (r"(moe|expert)\w*(intermediate_size|ffn_hidden_size|_dim)$", "expert_width", "most"),
    (r"(intermediate_size|intermediate_dim|ffn_dim|d_ff|dff|dim_ff|mlp_dim|n_inner)$", "intermediate", "most"),
    (r"ffn_hidden_size$", "intermediate", "most"),
    (r"(feed_forward_size|d_inner|intermediate_size_mlp|ffn_inner_dim|ff_dim)$", "intermediate", "most"),
    (r"(d_state|state_size|ssm_state_size)$", "state", "most"),
    (r"chunk_size$", "chunk", "most"),
    (r"(mamba_dt_rank|time_step_rank)$", "rank", "most"),
    (r"^(embedding_size|intra_bottleneck_size|word_embed_proj_dim|emb_dim)$", "narrow", "width"),
    (
        r"^(\w*hidden_size\w*|d_model|d_model_\w+|n_embd|\w*embed_dim|hidden_dim|projection_dim|\w*embedding_size|"
        r"\w*output_dim|out_hidden_size|lru_width|dim|d_latents|hidden_channels|embedding_dim|encoder_dim|decoder_dim|"
        r"projector_input_dim|projector_output_dim|adapter_out_dim|adapter_in_dim|adapter_input_size|true_hidden_size|"
        r"text_dim|input_dim|output_channels|width|\w*_channel|conv_channels|model_dim|projection_hidden_dim|"
        r"input_embedding_size)$",
        "hidden",
        "most",
    ),
    (r"^mamba_d_ssm$", "hidden", "double"),
    (r"(num_query_tokens|num_latents|latent_query_num|n_latents)$", "latents", "most"),
    (r"(num_image_tokens|query_num|mm_tokens_per_image)$", "latents", "most"),
    (r"^num_(object_)?queries$", "queries", "most"),
    (r"max_source_positions$", "positions", "most"),
    (r"^(image_size|crop_size|img_size)$", "", "image"),
)

_LAYERS = re.compile(
    r"^((num_)?(\w+_)?(hidden_|num_)*layers|depth|n_layers?|num_blocks|\w*_depth|num_self_attends_per_block|"
    r"num_nextn_predict_layers|aligner_num_add_layers|num_mem_blocks)$"
)
_AT_MOST_ONE = re.compile(
    r"(num_kv_shared_layers|no_rope_layers|every_n_layers|global_layers|dense_layers|first_k_dense_replace|"
    r"rope_scaling_layers|kv_source|cross_attention_layers|mlp_only|sparse_\w+_layers|num_residual_layers|"
    r"moe_layer_start_index)$"
)
_KEEP = re.compile(r"(vision_feature_layer|num_feat_extract_layers|num_conv_layers|max_window_layers)$")
_TOKEN_ID = re.compile(
    r"(_token_ids?|token_index|_token_idx|_tokens?_id|_start_id|_end_id|_newline_id|pad_index|bos_index|eos_index|"
    r"unk_index|mask_index|_patch_id)$"
)
_UNITS = ("heads", "kv_heads", "linear_key_heads", "linear_value_heads", "experts")  # never cut
_LEADING = {"kv_heads": "heads", "linear_key_heads": "linear_value_heads"}  # unit -> the more numerous one


def leaves_single_units(fields: Mapping[str, object], ranks: int) -> bool:
    """Return whether one of so many ranks holds a single head or expert of a config, or shares one with others.

    >>> leaves_single_units({"num_attention_heads": 32, "num_key_value_heads": 8}, 8)
    True
    """
    return any(count == ranks or unit != "experts" and ranks % count == 0 for unit, count in _counts(fields).items())


def parts_units(fields: Mapping[str, object], ranks: int) -> bool:
    """Return whether a config has heads that are not divisible by so many ranks, and that ranks cannot share.

    >>> parts_units({"num_attention_heads": 12}, 8)
    True
    """
    return any(_parted(count, ranks) for unit, count in _counts(fields).items() if unit != "experts")


def _parted(count: int, ranks: int) -> bool:
    return count % ranks != 0 and ranks % count != 0


def fitted(sizes: Sizes, fields: Mapping[str, object], ranks: int, tried: int) -> Sizes:
    """Return sizes that leave on each of `tried` ranks what a config leaves on each of `ranks`: one unit, several, a
    shared one, or a number that is not divisible.

    >>> fitted(VARIANTS[0], {"num_attention_heads": 32}, 32, 4).heads
    4
    >>> fitted(VARIANTS[0], {"num_attention_heads": 12}, 8, 2).heads
    5
    >>> fitted(VARIANTS[0], {"num_attention_heads": 4, "num_key_value_heads": 2}, 8, 4).heads
    2
    """
    counts = _counts(fields)
    chosen = {unit: _alike(real, getattr(sizes, unit), ranks, tried) for unit, real in counts.items()}
    if counts.get("experts", ranks) < ranks or _parted(counts.get("experts", ranks), ranks):
        chosen["experts"] = sizes.experts  # these are cut inside each expert
    for unit, leading in _LEADING.items():
        if unit in counts and counts[unit] < counts.get(leading, 0) < ranks and not _parted(counts[leading], ranks):
            chosen[unit] = max(1, chosen[leading] // 2)
        elif unit in counts and counts[unit] < counts.get(leading, 0):
            several = (chosen[unit] * times for times in range(2, 9))
            even = not _parted(counts[leading], ranks)
            if chosen[leading] % (chosen[unit] * (2 if even else 1)) or even == _parted(chosen[leading], tried):
                chosen[leading] = next((n for n in several if even != _parted(n, tried)), 2 * chosen[unit])
    heads = chosen.get("heads", sizes.heads)
    hidden = sizes.hidden if heads < sizes.heads and sizes.hidden % heads == 0 else heads * sizes.head_dim
    if heads != sizes.heads:
        wide = sizes.wide_head_dim // sizes.head_dim * (hidden // heads)
        chosen |= {"hidden": hidden, "head_dim": hidden // heads, "wide_head_dim": wide, "state_heads": 2 * heads}
    pairs = 2 * tried  # gated layers halve their width
    chosen |= {name: -(-getattr(sizes, name) // pairs) * pairs for name in ("intermediate", "expert_width")}
    return replace(sizes, **chosen)


def _counts(fields: Mapping[str, object]) -> dict[str, int]:
    numbers = {name: value for name, value in fields.items() if isinstance(value, int) and value > 1}
    return {unit: value for name, value in numbers.items() if (unit := field_rule(name)[0]) in _UNITS}


def _alike(real: int, tiny: int, ranks: int, tried: int) -> int:
    if _parted(real, ranks):
        return (tiny // 4 * 2 + 1) * tried // 2
    if real == ranks:
        return tried
    if real < ranks:
        return max(tried // 2, 1)
    return tiny if tiny % tried == 0 and tiny > tried else 2 * tried


def field_rule(name: str) -> tuple[str, str]:
    """Return (size, how) of a config field; ("", "keep") for a field that no pattern matches."""
    return next(((size, how) for pattern, size, how in FIELDS if re.search(pattern, name)), ("", "keep"))


def is_layer_count(name: str) -> str:
    """Return "depth" for a number of layers, "one" for a number of layers of which one is enough, "" for any other."""
    if _KEEP.search(name):
        return ""
    return "one" if _AT_MOST_ONE.search(name) else "depth" if _LAYERS.search(name) else ""


def is_token_id(name: str) -> bool:
    return bool(_TOKEN_ID.search(name))


def amount(text: str, sizes: Sizes) -> int:
    """Read a size written in a rule file: a product of numbers and size names.

    >>> amount("=2*heads", VARIANTS[0])
    16
    """
    names, factors = asdict(sizes), map(str.strip, text.removeprefix("=").split("*"))
    return prod(int(factor) if factor.isdigit() else names[factor] for factor in factors)


# Relations that a tiny clone must keep. If one with free widths does not run, another is tried in which widths that are
# multiples of each other stay so, and widths of stages listed one by one are kept.

HIDDEN = ("hidden_size", "d_model", "n_embd", "hidden_dim", "dim", "embed_dim")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "attention_heads")
ROTARY_WIDTHS = ("qk_rope_head_dim", "head_dim")  # latent attention rotates only a part of a head
_WIDTHS = ("hidden", "narrow", "intermediate", "expert_width")  # sizes of tiny_sizes.Sizes
_STAGE_LISTS = re.compile(r"(_per_stage|^depths|^out_channels|^hidden_sizes|^stage_\w+)$")
_VISION_LAYERS = re.compile(r"^(vision_feature_layers?|insert_layer_id)$")
_LARGEST_RATIO = 16


def related_width(value: int, size: str, widths: Iterable[int], tiny: int) -> int | None:
    """Return the same multiple, or fraction, of `tiny` as `value` is of the first of `widths` that it fits.

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
    """Return whether there are several stages, each with its own number in a list."""
    lists = {name: value for name, value in fields.items() if isinstance(value, list | tuple) and len(value) > 1}
    return any(map(_STAGE_LISTS.search, lists))


def sections_of_depth(fields: Mapping[str, Any], depth: int) -> dict[str, int]:
    """Return three or more counts of layers that sum to the depth (before, in and after a loop), else nothing."""
    counts = {name: value for name, value in fields.items() if type(value) is int and is_layer_count(name) == "depth"}
    sections = {name: count for name, count in counts.items() if 0 < count < depth}
    return sections if len(sections) > 2 and sum(sections.values()) == depth else {}


def smaller_sections(sections: Mapping[str, int], depth: int) -> dict[str, int]:
    """Return the same sections of a model of so many layers, none of them empty.

    >>> smaller_sections({"n_input_layers": 8, "n_recurrent_layers": 20, "n_output_layers": 8}, 4)
    {'n_input_layers': 1, 'n_recurrent_layers': 2, 'n_output_layers': 1}
    """
    more = _shared_out(depth - len(sections), [count - 1 for count in sections.values()])
    return {name: 1 + count for name, count in zip(sections, more, strict=True)}


def vision_layers(fields: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Return fields that say which layers of a vision tower are read, changed to fit `depth`; only what must change."""
    layers = {}
    for name, value in fields.items():
        if _VISION_LAYERS.search(name) and isinstance(value, int | list | tuple) and not isinstance(value, bool):
            numbers = [value] if isinstance(value, int) else value
            # The layers of these numbers, counted from either end, or the last existing ones.
            there = [max(n, -depth) if n < 0 else min(n, depth - 1) for n in numbers if isinstance(n, int)]
            if there != list(numbers):
                layers[name] = there[0] if isinstance(value, int) else type(value)(there)
    return layers


def first_of(fields: dict[str, Any], cls: type[PretrainedConfig], names: tuple[str, ...]) -> int | None:
    values = (fields.get(cls.attribute_map.get(name, name)) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)


def equal_widths(config: PretrainedConfig, small: Mapping[str, Any]) -> dict[str, int]:
    """Return fields as wide as the model that were not shrunk, with the tiny width: the class may require that."""
    width = next((name for name in HIDDEN if isinstance(small.get(name), int)), "")
    now, then = vars(config).get(width), small.get(width)
    if not isinstance(now, int) or not isinstance(then, int) or now == then:
        return {}
    return {name: then for name, value in small.items() if value == now == vars(config).get(name) and value is not True}


def fit_rotary_lists(fields: dict[str, Any], cls: type[PretrainedConfig]) -> None:
    """Fit lists in rope parameters, with one number per rotary frequency, to the tiny head width."""
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
    """Return integers in the proportions of `old` that sum to `total`; the largest remainders are rounded up."""
    shares = [total * part / sum(old) for part in old]
    new = [int(share) for share in shares]
    for i in sorted(range(len(old)), key=lambda i: new[i] - shares[i])[: total - sum(new)]:
        new[i] += 1
    return new


@lru_cache(maxsize=1024)
def _modeling_mentions(config_file: str, word: str) -> bool:
    """Return whether the modeling code next to a config uses the word. (Its default may be too wide.)"""
    files = sorted(Path(config_file).parent.glob("modeling_*.py"))
    return any(word in file.read_text(encoding="utf-8") for file in files)

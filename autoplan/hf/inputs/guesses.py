"""Guess arguments by transformers' names for them: several shapes each, the likeliest first, tried on a copy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from autoplan.capture.draw import Draw
from autoplan.capture.dry_run import Twin, depends_on_data, tried
from autoplan.common.errors import CaptureError
from autoplan.hf.shrink import all_configs

_BANDS = ("num_mel_bins", "n_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "num_mel_filters")
_BANDS_LATER = ("d_mel", "feature_size", "input_dim", "input_size")
_FRAMES = (128, 64, 200)
_MASKS = ("input_features_mask", "feature_attention_mask", "padding_mask")


def sounds(
    configs: Sequence[Any], takes: Callable[[str], bool], draw: Draw, batch: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield arguments that pass one sound per prompt, the likeliest first."""
    bands = bands_of(configs)[0]
    # exactly two frames per position
    exact = [2 * n for c in configs if (n := positive_int(c, "max_source_positions"))]
    for frames in dict.fromkeys((*exact, *_FRAMES)):
        masks = {name: torch.ones(batch, frames, dtype=torch.long) for name in _MASKS if takes(name)}
        for shape in ((batch, bands, frames), (batch, frames, bands)):
            features = draw.normal(shape)
            yield {"input_features": features, **masks}
            if masks:
                yield {"input_features": features}


def bands_of(configs: Sequence[Any]) -> list[int]:
    """Return what the configs may give as the number of bands of a spectrogram, the likeliest first."""
    bands = [v for names in (_BANDS, _BANDS_LATER) for c in configs for n in names if (v := positive_int(c, n))]
    return list(dict.fromkeys(bands)) or [80]


def positive_int(config: Any, name: str) -> int | None:
    """Return a field of a config that is an integer above 0; None for any other."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


_GRID = ("image_grid_thw", "image_grid_hws", "grid_thw")
_SIDE = 2  # merged patches per side
_TILES = ((), (1,), (3,), (2,), (5,))


def pictures(
    config: PretrainedConfig, vision: Any, takes: Callable[[str], bool], draw: Draw, batch: int
) -> Iterator[dict[str, Any]]:
    """Yield arguments that pass one image per prompt, the likeliest first."""
    patch = _number(vision, "patch_size", 14)
    channels = _number(vision, "num_channels", 0) or _number(vision, "in_channels", 3)
    grid = next((name for name in _GRID if takes(name)), None)
    if grid is not None:
        # All patches in one row, and their numbers per image in time, height and width.
        side = _SIDE * _number(vision, "spatial_merge_size", 2)
        width = channels * _number(vision, "temporal_patch_size", 1) * patch * patch
        rows = torch.tensor([1, side, side]).repeat(batch, 1)
        for frames in (1, 2):  # an image may be passed as two equal frames
            yield {"pixel_values": draw.normal((batch * side * side, frames * width)), grid: rows}
        yield {"pixel_values": draw.normal((batch * side * side, channels, patch, patch)), grid: rows}
        return
    size = getattr(vision, "image_size", None) or 4 * patch
    height, width = size[-2:] if isinstance(size, list | tuple) else (size, size)
    sizes = {"image_sizes": torch.tensor([height, width]).repeat(batch, 1)} if takes("image_sizes") else {}
    for tiles in _TILES:
        pixels = draw.normal((batch, *tiles, channels, height, width))
        yield {"pixel_values": pixels, **sizes}
        if sizes and not tiles:
            yield {"pixel_values": pixels}


def _number(config: Any, name: str, otherwise: int) -> int:
    value = getattr(config, name, None)
    value = value[0] if isinstance(value, list | tuple) and value else value
    return value if isinstance(value, int) else otherwise


NAMES = (
    "input_values", "decoder_input_values", "input_features", "input_features_mask", "pixel_values",
    "pixel_values_videos", "bbox", "latents", "inputs", "inputs_embeds",
)  # fmt: skip
_ONLY_IF_REQUIRED = ("inputs", "inputs_embeds")
_MOST_RUNS = 48
_SAMPLES = (4000, 3840, 32000)  # the second is a multiple of many hops
_FILM = ("num_frames", "frames_per_clip", "tubelet_size")
_ABSENT = object()

Way = tuple[int | str, ...]  # sizes, then "ids" or "long" if it is no float tensor


def usual(name: str, configs: Sequence[Any], picture: Sequence[int], length: int) -> list[Way]:
    """Return the usual shapes of an argument, without the batch. `picture`: channels, height, width."""
    channels, height, width = image = tuple(picture)
    frames = next((n for c in configs for field in _FILM if (n := positive_int(c, field)) and n > 1), 4)
    sound: list[Way] = [(_SAMPLES[0],), (1, _SAMPLES[1]), (1, _SAMPLES[2]), (_SAMPLES[1],), (_SAMPLES[2],)]
    exact = [2 * n for c in configs if (n := positive_int(c, "max_source_positions"))]
    exact += [n for c in configs if (n := positive_int(c, "max_length")) and n <= 4096]
    bands = bands_of(configs)
    spectra: list[Way] = [shape for t in (*exact, *_FRAMES) for n in bands[:2] for shape in ((t, n), (n, t))]
    fields = ("hidden_size", "codebook_dim", "latent_dim", "d_model")
    widths = dict.fromkeys(n for c in configs for field in fields if (n := positive_int(c, field)))
    latents: list[Way] = [shape for n in widths for shape in ((length, n), (n, length))]
    masks: list[Way] = [(t, "long") for t in (*exact, *_FRAMES)]
    ways: dict[str, list[Way]] = {
        "input_values": [*sound[:3], *spectra[:2], *latents, *sound[3:]],
        "decoder_input_values": [*latents, *spectra[:1]],
        "input_features": [*spectra, *((1, t, n) for t in exact or _FRAMES[:1] for n in bands[:1])],
        "input_features_mask": masks,
        "pixel_values": [image, (frames, *image), (channels, 8 * height, 8 * width), (2, *image)],
        "pixel_values_videos": [(frames, *image)],
        "bbox": [(length, 4, "ids"), (length, 4), (length, 8)],
        "latents": latents,
        "inputs": latents,
        "inputs_embeds": latents,
    }
    return ways.get(name, [])


def first_that_runs(
    model: nn.Module,
    main: Mapping[str, Any],
    configs: Sequence[Any],
    picture: Sequence[int],
    sizes: tuple[int, int],
    takes: Callable[[str], bool],
    requires: Callable[[str], bool],
    draw: Draw,
) -> dict[str, Any] | None:
    """Return `main` with other arguments of the usual shapes such that the model runs; None if no combination does."""
    batch, length = sizes
    names = [name for name in NAMES if takes(name) and usual(name, configs, picture, length)]
    names = [name for name in names if requires(name) or name not in _ONLY_IF_REQUIRED]
    ways = [
        [*(() if name in main or requires(name) else (_ABSENT,)), *usual(name, configs, picture, length)]
        for name in names
    ]
    twin = Twin(model)
    # Combinations by their distance from the likeliest choice of each.
    places = sorted(product(*(range(len(choices)) for choices in ways)), key=lambda place: (sum(place), place))
    for place in places[:_MOST_RUNS]:
        feed = dict(main)
        for name, choices, index in zip(names, ways, place, strict=True):
            way = choices[index]
            if way is not _ABSENT:
                shape = [batch, *(size for size in way if isinstance(size, int))]
                if "ids" in way:
                    feed[name] = draw.integers(0, 8, shape)
                else:
                    feed[name] = torch.ones(shape, dtype=torch.long) if "long" in way else draw.normal(shape)
        try:
            twin.run(twin.module, feed)
        except Exception as error:  # someone else's forward may raise anything
            if not depends_on_data(error):
                continue
        return feed
    return None


# Put an image, a sound or a video into a prompt, so that a text model's towers and projectors run.
#
# The prompt must hold as many placeholder tokens as the tower makes features. The model's own `get_image_features` (or
# its like), run on a copy, tells how many.

_TOKEN_TYPES = ("mm_token_type_ids", "moe_mm_token_type_ids")
_ALONG_TEXT = ("input_ids", *_TOKEN_TYPES)
_NOT_LEARNED = -100  # the label that torch's cross entropy ignores


@dataclass(frozen=True)
class Modality:
    """Content of a prompt: main argument, config names of its placeholder token, method that makes features."""

    name: str
    argument: str
    tokens: tuple[str, ...] = ()
    features: str = ""
    token_type: int = 1  # its number in `mm_token_type_ids`


MODALITIES = (
    Modality(
        "image", "pixel_values",
        ("image_token_id", "image_token_index", "media_placeholder_token_id", "image_patch_id", "im_patch_id"),
        "get_image_features",
    ),
    Modality("audio", "input_features", ("audio_token_id", "audio_token_index"), "get_audio_features", 3),
    Modality("video", "pixel_values_videos", ("video_token_id", "video_token_index"), "get_video_features", 2),
)  # fmt: skip


def prompt_feed(
    modality: Modality,
    model: nn.Module,
    config: PretrainedConfig,
    text: torch.Tensor,
    guesses: Iterable[Mapping[str, Any]],
    takes: Callable[[str], bool],
) -> dict[str, Any]:
    """Return keyword arguments for prompts with one image (sound, video) each. Raise CaptureError if none run."""
    token = _token(modality, config)
    tried = list(guesses)
    first: Exception | None = None
    for folded in (True, False):
        twin = Twin(model, folded=folded)
        for inputs in tried:
            feed = _tried(modality, twin, token, text, dict(inputs), takes)
            if not isinstance(feed, Exception):
                return feed
            first = first or feed
    if first is None:
        raise CaptureError(f"no rule for making {modality.argument!r}")
    reason = " ".join(str(first).split())[:200]
    raise CaptureError(f"the {modality.name} path does not run: {type(first).__name__}: {reason}") from first


def together(model: nn.Module, feeds: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the feeds merged into one, if the model then reads parameters that it reads with none of them."""
    merged: dict[str, Any] = {}
    for name, value in (pair for feed in feeds.values() for pair in feed.items()):
        joins = name in merged and name in _ALONG_TEXT
        merged[name] = torch.cat([merged[name], value], dim=1) if joins else value
    merged_run = tried(model, merged, *feeds.values())
    return {"_".join(feeds): merged} if merged_run.failure is None and merged_run.used else {}


def labels_of(ids: torch.Tensor, config: PretrainedConfig | None) -> torch.Tensor:
    """Return the labels: each token except placeholders, which may lie outside of the vocabulary."""
    tokens = [_token(modality, config) for modality in MODALITIES] if config is not None else []
    labels = ids.clone()
    for token in tokens:
        if token is not None:
            labels[ids == token] = _NOT_LEARNED
    return labels


def _token(modality: Modality, config: PretrainedConfig) -> int | None:
    """Return the placeholder token of the config, or of the first inner config that has one."""
    tokens = (getattr(part, name, None) for part in all_configs(config) for name in modality.tokens)
    return next((value for value in tokens if isinstance(value, int)), None)


def _tried(
    modality: Modality,
    twin: Twin,
    token: int | None,
    text: torch.Tensor,
    passed: dict[str, Any],
    takes: Callable[[str], bool],
) -> dict[str, Any] | Exception:
    """Return the complete call if it runs on the twin, else the exception."""
    feed: dict[str, Any] = {}
    try:
        # The method that makes the features, of the outermost module that takes the most arguments.
        named = modality.features or "-"
        methods = [method for part in twin.module.modules() if callable(method := getattr(part, named, None))]
        maker = max(methods, key=lambda method: len(_named(method) & passed.keys()), default=None)
        ids, count = text, passed.pop("placeholders", None)
        if count is None and maker is not None and token is not None:
            names = _named(maker)
            arguments = {name: value for name, value in passed.items() if not names or name in names}
            count = _features(twin.run(maker, arguments))
        if count is not None and token is not None:
            # Some text, the placeholders, more text
            rows = text.shape[0]
            if count % rows:
                raise CaptureError(f"{count} features for {rows} prompts")
            ids = torch.cat([text[:, :2], torch.full((rows, count // rows), token), text[:, 2:]], dim=1)
        places: Any = ids == token
        if isinstance(places, torch.Tensor):
            passed |= {name: places.long() * modality.token_type for name in _TOKEN_TYPES if takes(name)}
        feed = {"input_ids": ids, **passed}
        twin.run(twin.module, feed)
    except Exception as error:  # someone else's forward, tried on a guess, may raise anything
        if not (feed and depends_on_data(error)):
            return error
    return feed


def _named(method: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(method).parameters.values()
    return {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _features(output: Any) -> int:
    """Return the number of feature vectors: models return a tensor, nested lists, or an output with a pooled part."""
    for part in ("pooler_output", "deepstack_features", "last_hidden_state"):
        if (features := getattr(output, part, None)) is not None:
            return _features(features[0] if part == "deepstack_features" else features)
    if isinstance(output, torch.Tensor):
        return output.numel() // output.shape[-1]
    if isinstance(output, list | tuple) and output:
        return sum(_features(item) for item in output if not isinstance(item, int))
    raise CaptureError(f"the features are a {type(output).__name__}")

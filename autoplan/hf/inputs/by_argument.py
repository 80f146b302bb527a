"""What arguments usually are, by the names that transformers gives them: several ways each, the likeliest first.

A waveform comes with a channel or without, a spectrogram either way round, a picture alone, in pairs or as a film; and
which of it a model takes is said in prose. So the ways are tried, one after the other, on a copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from autoplan.capture.draw import Draw
from autoplan.capture.dry_run import Twin, depends_on_data
from autoplan.hf.inputs.sounds import bands_of

NAMES = (
    "input_values",
    "decoder_input_values",
    "input_features",
    "input_features_mask",
    "pixel_values",
    "pixel_values_videos",
    "bbox",
    "latents",
    "inputs",
    "inputs_embeds",
)
_ONLY_IF_REQUIRED = ("inputs", "inputs_embeds")
_MOST_RUNS = 48
_SAMPLES = (4000, 3840, 32000)  # the second is a multiple of many hops
_FRAMES = (128, 64, 200)
_FILM = ("num_frames", "frames_per_clip", "tubelet_size")
_ABSENT = object()

Way = tuple[int | str, ...]  # sizes; "bool" and "long" at the end say what kind, floats otherwise


def usual(name: str, configs: Sequence[Any], picture: Sequence[int], length: int) -> list[Way]:
    """Shapes without the batch. `picture`: channels, height, width."""
    channels, height, width = picture
    film = next((n for c in configs for field in _FILM if (n := _int(c, field)) and n > 1), 4)
    sound: list[Way] = [(_SAMPLES[0],), (1, _SAMPLES[1]), (1, _SAMPLES[2]), (_SAMPLES[1],), (_SAMPLES[2],)]
    exact = [2 * n for c in configs if (n := _int(c, "max_source_positions"))]
    exact += [n for c in configs if (n := _int(c, "max_length")) and n <= 4096]
    bands = bands_of(configs)
    spectra: list[Way] = [shape for t in (*exact, *_FRAMES) for n in bands[:2] for shape in ((t, n), (n, t))]
    widths = _widths(configs)
    latents: list[Way] = [shape for n in widths for shape in ((length, n), (n, length))]
    masks: list[Way] = [(t, "long") for t in (*exact, *_FRAMES)]
    ways: dict[str, list[Way]] = {
        "input_values": [*sound[:3], *spectra[:2], *latents, *sound[3:]],
        "decoder_input_values": [*latents, *spectra[:1]],
        "input_features": [*spectra, *((1, t, n) for t in exact or _FRAMES[:1] for n in bands[:1])],
        "input_features_mask": masks,
        "pixel_values": [
            (channels, height, width),
            (film, channels, height, width),
            (channels, 8 * height, 8 * width),
            (2, channels, height, width),
        ],
        "pixel_values_videos": [(film, channels, height, width)],
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
    """`main` with other arguments of the usual kinds, such that the model runs; None where no way was found."""
    batch, length = sizes
    names = [name for name in NAMES if takes(name) and usual(name, configs, picture, length)]
    names = [name for name in names if requires(name) or name not in _ONLY_IF_REQUIRED]
    ways = [
        [*(() if name in main or requires(name) else (_ABSENT,)), *usual(name, configs, picture, length)]
        for name in names
    ]
    twin = Twin(model)
    for chosen in _nearest_first(ways):
        feed = dict(main)
        for name, way in zip(names, chosen, strict=True):
            if way is not _ABSENT:
                feed[name] = _drawn(way, batch, draw)
        try:
            twin.run(twin.module, feed)
        except Exception as error:  # someone else's forward may raise anything
            if not depends_on_data(error):
                continue
        return feed
    return None


def _nearest_first(ways: list[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Combinations by how far they are from the likeliest of each."""
    places = sorted(product(*(range(len(of_one)) for of_one in ways)), key=lambda place: (sum(place), place))
    for place in places[:_MOST_RUNS]:
        yield tuple(of_one[index] for of_one, index in zip(ways, place, strict=True))


def _drawn(way: Way, batch: int, draw: Draw) -> torch.Tensor:
    shape = [batch, *(size for size in way if isinstance(size, int))]
    if "ids" in way:
        return draw.integers(0, 8, shape)
    return torch.ones(shape, dtype=torch.long) if "long" in way else draw.normal(shape)


def _widths(configs: Sequence[Any]) -> list[int]:
    found = [
        n
        for c in configs
        for field in ("hidden_size", "codebook_dim", "latent_dim", "d_model")
        if (n := _int(c, field))
    ]
    return list(dict.fromkeys(found))


def _int(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

"""Guesses of how a model wants one picture for each prompt: as patches with a grid, as an image, as tiles of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PretrainedConfig

from autoplan.capture.draw import Draw

_GRID = ("image_grid_thw", "image_grid_hws", "grid_thw")
_SIDE = 2  # merged patches per side
_TILES = ((), (1,), (3,), (2,), (5,))


def pictures(
    config: PretrainedConfig, vision: Any, takes: Callable[[str], bool], draw: Draw, batch: int
) -> Iterator[dict[str, Any]]:
    """Ways to hand over one picture for each prompt, the likeliest first."""
    patch = _number(vision, "patch_size", 14)
    channels = _number(vision, "num_channels", 0) or _number(vision, "in_channels", 3)
    grid = next((name for name in _GRID if takes(name)), None)
    if grid is not None:
        yield from _patches(grid, vision, patch, channels, draw, batch)
        return
    size = getattr(vision, "image_size", None) or 4 * patch
    height, width = size[-2:] if isinstance(size, list | tuple) else (size, size)
    sizes = {"image_sizes": torch.tensor([height, width]).repeat(batch, 1)} if takes("image_sizes") else {}
    for tiles in _TILES:
        pixels = draw.normal((batch, *tiles, channels, height, width))
        yield {"pixel_values": pixels, **sizes}
        if sizes and not tiles:
            yield {"pixel_values": pixels}


def _patches(
    grid: str, vision: Any, patch: int, channels: int, draw: Draw, batch: int
) -> Iterator[dict[str, torch.Tensor]]:
    """All patches in one row, and how many of them each picture has in time, height and width."""
    side = _SIDE * _number(vision, "spatial_merge_size", 2)
    width = channels * _number(vision, "temporal_patch_size", 1) * patch * patch
    rows = torch.tensor([1, side, side]).repeat(batch, 1)
    for frames in (1, 2):  # a picture may be handed over as two equal frames
        yield {"pixel_values": draw.normal((batch * side * side, frames * width)), grid: rows}
    yield {"pixel_values": draw.normal((batch * side * side, channels, patch, patch)), grid: rows}


def _number(config: Any, name: str, otherwise: int) -> int:
    value = getattr(config, name, None)
    value = value[0] if isinstance(value, list | tuple) and value else value
    return value if isinstance(value, int) else otherwise

"""A prompt with a picture: what makes a text model's vision tower and projector run.

The prompt must hold exactly as many placeholder tokens as the tower makes features. How many that is, only the model
knows: so its own `get_image_features` is run on a copy without storage, and the whole call is tried on that copy
before it is offered as an entry.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from autoplan.capture.draw import Draw
from autoplan.capture.dry_run import cheapest_real, depends_on_data, own, quiet
from autoplan.capture.random_values import untouched_randomness
from autoplan.errors import CaptureError

__all__ = ["picture_entry"]

_PLACEHOLDER = ("image_token_id", "image_token_index", "media_placeholder_token_id")
_GRID = ("image_grid_thw", "image_grid_hws", "grid_thw")
_SIDE = 2  # merged patches per side


def picture_entry(
    model: nn.Module,
    config: PretrainedConfig,
    vision: Any,
    takes: Callable[[str], bool],
    text: Callable[[], torch.Tensor],
    draw: Draw,
    batch: int,
) -> dict[str, Any]:
    """Keyword arguments for one prompt with a picture. Raises CaptureError that says what stands in the way."""
    token = next((value for name in _PLACEHOLDER if isinstance(value := getattr(config, name, None), int)), None)
    if token is None or not hasattr(model, "get_image_features"):
        raise CaptureError("no placeholder token, or no get_image_features, is known for pictures")
    mode, twin = cheapest_real(model)
    first: Exception | None = None
    for pixels in _pictures(config, vision, takes, draw, batch):
        entry: dict[str, Any] = {}
        try:
            with untouched_randomness(0), quiet(), mode, torch.no_grad():
                entry.update(_prompt(text(), token, _count(twin, pixels, takes, batch), takes), **pixels)
                twin(**{name: own(value) for name, value in entry.items()})
        except Exception as error:  # someone else's forward, tried on a guess, may raise anything
            if not (entry and depends_on_data(error)):
                first = first or error
                continue
        return entry
    reason = " ".join(str(first).split())[:200]
    raise CaptureError(f"the picture's path does not run: {type(first).__name__}: {reason}") from first


def _count(twin: nn.Module, pixels: dict[str, Any], takes: Callable[[str], bool], batch: int) -> int:
    """Features for each prompt. A tower that reads its grid's values cannot run without storage; its grid is ours."""
    known = inspect.signature(twin.get_image_features).parameters
    given = {name: own(value) for name, value in pixels.items() if name in known}
    try:
        return _features(twin.get_image_features(**given)) // batch
    except Exception as error:
        if depends_on_data(error) and any(name in pixels for name in _GRID):
            return _SIDE * _SIDE
        raise


def _pictures(
    config: PretrainedConfig, vision: Any, takes: Callable[[str], bool], draw: Draw, batch: int
) -> Iterator[dict[str, Any]]:
    """Ways to hand over one picture for each prompt: as patches with a grid, as an image, as one tile of an image."""
    patch = _number(vision, "patch_size", 14)
    channels = _number(vision, "num_channels", 0) or _number(vision, "in_channels", 3)
    grid = next((name for name in _GRID if takes(name)), None)
    if grid is not None:
        merge = _number(vision, "spatial_merge_size", 2)
        side = _SIDE * merge
        width = channels * _number(vision, "temporal_patch_size", 1) * patch * patch
        rows = torch.tensor([1, side, side]).repeat(batch, 1)
        for frames in (1, 2):  # a picture may be handed over as two equal frames
            yield {"pixel_values": draw.normal((batch * side * side, frames * width)), grid: rows}
        yield {"pixel_values": draw.normal((batch * side * side, channels, patch, patch)), grid: rows}
        return
    size = getattr(vision, "image_size", None) or 4 * patch
    height, width = size[-2:] if isinstance(size, list | tuple) else (size, size)
    sizes = {"image_sizes": torch.tensor([height, width]).repeat(batch, 1)} if takes("image_sizes") else {}
    for tiles in ((), (1,), (3,), (2,), (5,)):
        pixels = draw.normal((batch, *tiles, channels, height, width))
        yield {"pixel_values": pixels, **sizes}
        if sizes and not tiles:
            yield {"pixel_values": pixels}


def _number(config: Any, name: str, otherwise: int) -> int:
    value = getattr(config, name, None)
    value = value[0] if isinstance(value, list | tuple) and value else value
    return value if isinstance(value, int) else otherwise


def _features(made: Any) -> int:
    """How many feature vectors: models return them plain, in a list, or as an output's pooled part."""
    made = getattr(made, "pooler_output", made)
    if isinstance(made, torch.Tensor):
        return made.numel() // made.shape[-1]
    if isinstance(made, list | tuple) and made and all(isinstance(x, torch.Tensor) for x in made):
        return sum(x.numel() // x.shape[-1] for x in made)
    raise CaptureError(f"get_image_features returned {type(made).__name__}")


def _prompt(words: torch.Tensor, token: int, features: int, takes: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Some text, the picture's placeholders, more text."""
    ids = torch.cat([words[:, :2], torch.full((words.shape[0], features), token), words[:, 2:]], dim=1)
    return {"input_ids": ids, **({"mm_token_type_ids": (ids == token).long()} if takes("mm_token_type_ids") else {})}

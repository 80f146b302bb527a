"""Put an image, a sound or a video into a prompt, so that a text model's towers and projectors run.

The prompt must hold as many placeholder tokens as the tower makes features. The model's own `get_image_features` (or
its like), run on a copy, tells how many.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from autoplan.capture.dry_run import Twin, depends_on_data, tried
from autoplan.common.errors import CaptureError
from autoplan.hf.shrink import all_configs

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
        "image",
        "pixel_values",
        ("image_token_id", "image_token_index", "media_placeholder_token_id", "image_patch_id", "im_patch_id"),
        "get_image_features",
    ),
    Modality("audio", "input_features", ("audio_token_id", "audio_token_index"), "get_audio_features", 3),
    Modality("video", "pixel_values_videos", ("video_token_id", "video_token_index"), "get_video_features", 2),
)


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
    for feed in feeds.values():
        for name, value in feed.items():
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
        part_output = getattr(output, part, None)
        if part_output is not None:
            return _features(part_output[0] if part == "deepstack_features" else part_output)
    if isinstance(output, torch.Tensor):
        return output.numel() // output.shape[-1]
    if isinstance(output, list | tuple) and output:
        return sum(_features(item) for item in output if not isinstance(item, int))
    raise CaptureError(f"the features are a {type(output).__name__}")

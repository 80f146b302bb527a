"""Guesses of how a model wants one sound for each prompt: a spectrogram either way round, with a mask of its frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autoplan.capture.draw import Draw

_BANDS = ("num_mel_bins", "n_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "num_mel_filters")
_BANDS_LATER = ("d_mel", "feature_size", "input_dim", "input_size")
_FRAMES = (128, 64, 200)
_MASKS = ("input_features_mask", "feature_attention_mask", "padding_mask")


def sounds(
    configs: Sequence[Any], takes: Callable[[str], bool], draw: Draw, batch: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Ways to hand over one sound for each prompt, the likeliest first."""
    bands = spectrum(configs)
    exact = [2 * n for c in configs if (n := _int(c, "max_source_positions"))]  # two frames per position, no fewer
    for frames in dict.fromkeys((*exact, *_FRAMES)):
        masks = {name: torch.ones(batch, frames, dtype=torch.long) for name in _MASKS if takes(name)}
        for shape in ((batch, bands, frames), (batch, frames, bands)):
            features = draw.normal(shape)
            yield {"input_features": features, **masks}
            if masks:
                yield {"input_features": features}


def spectrum(configs: Sequence[Any]) -> int:
    """How many bands a spectrogram has."""
    return bands_of(configs)[0]


def bands_of(configs: Sequence[Any]) -> list[int]:
    """What the configs may mean by the number of bands, the likeliest first."""
    found = [v for names in (_BANDS, _BANDS_LATER) for c in configs for n in names if (v := _int(c, n))]
    return list(dict.fromkeys(found)) or [80]


def _int(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

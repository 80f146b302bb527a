"""bitsandbytes' double quantisation: the largest number of each block is a code, in blocks with numbers of their own.

A packed model holds these largest numbers as float32, since a block of them (16384 weights) would hardly ever be a
rank's own. Codes become numbers where files are read, and the same codes where they are written. (Not in formats.py:
what is here is no way to store a weight, and goes both ways.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoplan.common.errors import AutoplanError

__all__ = ["QuantisedTwice", "stored_twice"]

_STATE = ".quant_state."
_ENDS = (_STATE, ".absmax")


@dataclass(frozen=True)
class QuantisedTwice:
    """How the largest numbers of one weight are stored: the largest of each block of them, what codes mean, and the
    weight's state as it is stored, of which it is told where numbers begin and how many share a block."""

    largest: torch.Tensor
    values: torch.Tensor
    state: torch.Tensor
    offset: float
    block: int

    def numbers(self, codes: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """What codes at these places stand for."""
        return self.values.float()[codes.int()] * self._scales(places) + self.offset

    def codes(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of all numbers, the codes that they were made of: those nearest, or one beside where rounding went astray."""
        places, rising = torch.arange(len(numbers)), self.values.float().argsort()
        sought = (numbers - self.offset) / self._scales(places)
        near = torch.searchsorted(self.values.float()[rising], sought.nan_to_num())
        tried = torch.stack([rising[(near + step).clamp(0, len(rising) - 1)] for step in (-1, 0, 1)])
        right = torch.stack([self.numbers(codes, places) == numbers for codes in tried])
        if not right.any(0).all():
            raise AutoplanError(
                "largest numbers of blocks are not those that were loaded, and have no codes",
                hint="save the weights plain: load the folder with dequantise=True",
            )
        return tried.gather(0, right.int().argmax(0, keepdim=True))[0].to(torch.uint8)

    def _scales(self, places: torch.Tensor) -> torch.Tensor:
        return self.largest.float()[places // self.block]


def stored_twice(entries: Mapping[str, Any], known: Mapping[str, QuantisedTwice]) -> dict[str, Any]:
    """Tensors of a checkpoint, those of weights that are quantised twice as bitsandbytes writes them."""
    found: dict[str, Any] = {}
    for entry, value in entries.items():
        weight, end = next(((entry[: entry.index(end)], end) for end in _ENDS if end in entry), (entry, ""))
        twice = known.get(weight)
        if twice is None or not end:
            found[entry] = value
        elif end == _STATE:
            found[entry] = twice.state
        else:
            found |= {entry: twice.codes(value), f"{weight}.nested_absmax": twice.largest}
            found[f"{weight}.nested_quant_map"] = twice.values
    return found

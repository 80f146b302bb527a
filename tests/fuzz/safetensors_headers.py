"""Spoilt safetensors headers: `python tests/fuzz/safetensors_headers.py --count N --seed S`.

A small file's header is spoilt as values, as text and in its length; the folder is opened, and every tensor that it
names is read, whole and by rows.
"""

from __future__ import annotations

import json
import random
from typing import Any

import torch
from fuzzing import Counts, as_json, folder, fuzz, main, spoil, spoil_text

HEADER = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]},
    "a.bias": {"dtype": "BF16", "shape": [4], "data_offsets": [96, 104]},
    "b.weight": {"dtype": "I64", "shape": [2, 2], "data_offsets": [104, 136]},
}
LENGTHS = (0, 1, 7, 8, 100, 2**20, 2**31, 2**40, 2**63, 2**64 - 1)


def make(chance: random.Random) -> bytes:
    """A file."""
    text = as_json(spoil(HEADER, chance) if chance.random() < 0.7 else HEADER)
    if chance.random() < 0.3:
        text = spoil_text(text, chance)
    header = text.encode("utf-8", "surrogatepass")
    length = len(header) if chance.random() < 0.8 else chance.choice(LENGTHS)
    file = length.to_bytes(8, "little") + header + bytes(136)
    return file if chance.random() < 0.8 else file[: chance.randrange(len(file) + 1)]


def run(count: int, seed: int) -> Counts:
    from autoplan.execute.weights.files import CheckpointFiles

    assert json.loads(as_json(HEADER)) == HEADER
    torch.zeros(1)
    with folder() as place:

        def attempt(case: bytes) -> None:
            (place / "model.safetensors").write_bytes(case)
            files: Any = CheckpointFiles(place)
            for key in files.keys:
                shape = files.shape(key)
                files.read(key)
                if shape and shape[0] > 1:
                    files.read(key, {0: range(1, min(shape[0], 4))})

        return fuzz("safetensors headers", make, attempt, count, seed)


if __name__ == "__main__":
    main(run)

"""A folder of a quantised checkpoint, read as if its weights were plain.

The problem: whoever fills a plain model asks for rows of a weight, and the files hold packed numbers with a scale for
each block. Here each packed weight is one key with the shape of the plain one. What is asked for is read block by
block: the packed tensors of the blocks that hold these rows, and no others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import lcm, prod
from pathlib import Path

import torch

from autoplan.common.conventions import conventions
from autoplan.execute.quantised.formats import dequantise
from autoplan.execute.weights.files import CheckpointFiles
from autoplan.values.quantised import PackedTensor, PackedWeight

__all__ = ["DequantisedFiles"]

_AT_ONCE = 2**24  # numbers of a matrix that is stored row by row, of which columns are wanted
_NESTED_BLOCK = 256


class DequantisedFiles(CheckpointFiles):
    """The tensors of a folder, packed weights by the names and shapes of plain ones."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        shape, read = super().shape, super().read
        stored = conventions().stored_weights(self.folder, super().keys, shape, read)
        self.packed = {weight.name: weight for weight in stored}
        self._parts = {f"{w.owner}.{tensor.name}" for w in stored for tensor in w.tensors}

    @property
    def keys(self) -> tuple[str, ...]:
        others = (key for key in super().keys if key not in self._parts and not self._is_beside(key))
        return (*others, *self.packed)

    def _is_beside(self, key: str) -> bool:
        """Something else that belongs to a packed weight ("….weight.quant_state")."""
        return key.rpartition(".")[0] in self.packed or key.partition(".quant_state.")[0] in self.packed

    def shape(self, key: str) -> tuple[int, ...]:
        return self.packed[key].shape if key in self.packed else super().shape(key)

    def dtype(self, key: str) -> torch.dtype:
        return torch.float32 if key in self.packed else super().dtype(key)

    def read(self, key: str, rows: Mapping[int, Sequence[int]] | None = None) -> torch.Tensor:
        if key not in self.packed:
            return super().read(key, rows)
        weight = self.packed[key]
        wanted = {dim: tuple(held) for dim, held in (rows or {}).items()}
        if weight.is_flat:
            return self._read_flat(weight, wanted)
        return self._read_blocks(weight, wanted)

    def _read_blocks(self, weight: PackedWeight, rows: Mapping[int, tuple[int, ...]]) -> torch.Tensor:
        covers = {dim: _cover(weight, dim, held) for dim, held in rows.items()}
        parts = {tensor.name: self._part(weight, tensor, covers) for tensor in weight.tensors}
        shape = tuple(len(covers[dim]) if dim in covers else size for dim, size in enumerate(weight.shape))
        found = dequantise(weight, parts, shape)
        for dim, held in rows.items():
            if covers[dim] != held:
                places = {row: place for place, row in enumerate(covers[dim])}
                found = found.index_select(dim, torch.tensor([places[row] for row in held], dtype=torch.long))
        return found

    def _part(self, weight: PackedWeight, tensor: PackedTensor, covers: Mapping[int, tuple[int, ...]]) -> torch.Tensor:
        """A stored tensor, or what of it belongs to the blocks that hold these rows."""
        wanted: dict[int, Sequence[int]] = {}
        for place, dim in enumerate(tensor.dims):
            if dim.of and dim.of[0] in covers:
                blocks = dict.fromkeys(row // dim.factor for row in covers[dim.of[0]])
                wanted[place] = [block * dim.each + one for block in blocks for one in range(dim.each)]
        return super().read(f"{weight.owner}.{tensor.name}", wanted)

    # ------------------------------------------------------------------------ matrices that are stored as one long row

    def _read_flat(self, weight: PackedWeight, rows: Mapping[int, tuple[int, ...]]) -> torch.Tensor:
        """Some rows at a time, and of each of them the columns that are wanted."""
        outputs, inputs = weight.shape
        held = rows.get(0, tuple(range(outputs)))
        columns = torch.tensor(rows[1]) if 1 in rows else None
        step = max(1, _AT_ONCE // inputs)
        pieces = []
        for start in range(0, len(held), step):
            some = held[start : start + step]
            piece = self._flat_rows(weight, min(some), max(some) + 1)[[row - min(some) for row in some]]
            pieces.append(piece if columns is None else piece.index_select(1, columns))
        return torch.cat(pieces)

    def _flat_rows(self, weight: PackedWeight, start: int, stop: int) -> torch.Tensor:
        """Consecutive rows. Blocks may begin in one row and end in the next."""
        inputs = weight.shape[1]
        block = lcm(*(dim.factor for tensor in weight.tensors for dim in tensor.dims))
        first = start * inputs // block * block
        last = min(-(-stop * inputs // block) * block, prod(weight.shape))
        parts = {}
        for tensor in weight.tensors:
            flat = next((place for place, dim in enumerate(tensor.dims) if dim.of), None)
            factor = tensor.dims[flat].factor if flat is not None else 1
            wanted = {} if flat is None else {flat: range(first // factor, -(-last // factor))}
            parts[tensor.name] = self._unnested(weight, tensor, wanted)
        numbers = dequantise(weight, parts, (last - first,))
        return numbers[start * inputs - first : stop * inputs - first].reshape(stop - start, inputs)

    def _unnested(self, weight: PackedWeight, tensor: PackedTensor, wanted: Mapping[int, range]) -> torch.Tensor:
        """Largest numbers of blocks that are themselves stored in blocks, as numbers."""
        key = f"{weight.owner}.{tensor.name}"
        found = super().read(key, wanted)
        nested = f"{weight.name}.nested_absmax"
        if not key.endswith(".absmax") or nested not in super().keys:
            return found
        values = super().read(f"{weight.name}.nested_quant_map").float()[found.int()]
        places = torch.tensor(list(wanted[0])) // _NESTED_BLOCK
        return values * super().read(nested).float()[places] + self._offset(weight)

    def _offset(self, weight: PackedWeight) -> float:
        state = next(key for key in super().keys if key.startswith(f"{weight.name}.quant_state."))
        return float(json.loads(bytes(super().read(state).tolist()).decode("utf-8"))["nested_offset"])


def _cover(weight: PackedWeight, dim: int, rows: tuple[int, ...]) -> tuple[int, ...]:
    """All rows of the blocks that these rows are in, in their order."""
    factors = (one.factor for tensor in weight.tensors for one in tensor.dims if one.of == (dim,))
    block, size = lcm(*factors), weight.shape[dim]
    blocks = dict.fromkeys(row // block for row in rows)
    return tuple(row for one in blocks for row in range(one * block, min((one + 1) * block, size)))

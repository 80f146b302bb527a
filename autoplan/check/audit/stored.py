"""Do the tensors of a quantised weight part when a foreign plan cuts each of them by itself? Arithmetic proves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoplan.check.audit.lines import ForeignPlan, Line
from autoplan.check.audit.subject import Said, plain_rows, said_by
from autoplan.values.quantised import PackedDim, PackedTensor, PackedWeight


@dataclass(frozen=True)
class Parting:
    """A stored tensor that does not follow its weight, with the numbers that show it."""

    weight: str
    line: Line
    message: str
    proof: str


def partings(
    plan: ForeignPlan, packed: tuple[PackedWeight, ...], modules: Mapping[str, Any], tp: int
) -> tuple[Parting, ...]:
    """The weights that part at a size, each with its first tensor that does."""
    parted = []
    for weight in packed:
        line = plan.line_for(weight.name)
        if line is not None:
            said = said_by(plan, line, weight.name, weight.shape, modules, tp)
            one = parting(weight, said, tp)
            if one is not None:
                parted.append(one)
    return tuple(parted)


def parting(weight: PackedWeight, said: Said, tp: int) -> Parting | None:
    """What is wrong with the stored tensors of a weight that is cut so; None: they follow it."""
    if said.dim is None or said.line is None:
        return None
    for tensor in weight.tensors:
        if not tensor.dims:
            continue  # a number is left whole
        place = said.dim if len(tensor.dims) >= len(weight.shape) else -1
        dim = tensor.dims[place]
        if dim.of and dim.of != (said.dim,):
            text = f"{tensor.name} has its dims in another order: dim {said.dim} of it is not that of the weight"
            return Parting(weight.name, said.line, text, f"{tensor.name} is {list(tensor.shape)}")
        if not dim.of and len(tensor.dims) <= len(weight.shape):
            text = f"{tensor.name} has {dim.size} for all of dim {said.dim}, which every rank needs"
            held = ", ".join(str(len(rows)) for rows in plain_rows(dim.size, 1, tp))
            return Parting(weight.name, said.line, text, f"{tensor.name} is cut to [{held}]")
        if dim.of and dim.factor > 1:
            found = _apart(weight, tensor, dim, said, tp)
            if found is not None:
                return found
    return None


def _apart(weight: PackedWeight, tensor: PackedTensor, dim: PackedDim, said: Said, tp: int) -> Parting | None:
    """Does each rank hold exactly the blocks of its rows?"""
    assert said.dim is not None and said.line is not None
    held = plain_rows(dim.size, said.parts, tp)
    segments = weight.segments if said.dim == weight.rows else ()
    for rank, rows in enumerate(said.rows):
        wanted = list(dict.fromkeys(_block(row, dim.factor, segments) for row in rows))
        mine = list(dict.fromkeys(row // dim.each for row in held[rank]))
        if wanted != mine:
            size, local = weight.shape[said.dim], len(rows) // said.parts
            text = (
                f"a rank holds {local} of {size // said.parts} along dim {said.dim}, {local / dim.factor:g} blocks of "
                f"{dim.factor}"
            )
            counts = ", ".join(str(len(one) // dim.each) for one in held)
            proof = (
                f"{tensor.name} is cut to [{counts}]; rank {rank} needs {_said(wanted)} and holds {_said(held[rank])}"
            )
            return Parting(weight.name, said.line, text, proof)
    return None


def _block(row: int, block: int, segments: tuple[int, ...]) -> int:
    """The block that a row is in, where each segment begins with a block of its own."""
    before = 0
    for size in segments[:-1]:
        if row < size:
            break
        before, row = before + -(-size // block), row - size
    return before + row // block


def _said(rows: Any) -> str:
    found = list(rows)
    if not found:
        return "none"
    return f"{found[0]}–{found[-1]}" if found == list(range(found[0], found[-1] + 1)) else str(found)

"""Ops that only query a tensor and touch none of its dims; and how literals of a call affect its result."""

from __future__ import annotations

from typing import Literal

from autoplan.ops.elementwise import elementwise
from autoplan.ops.records.answers import NEVER, Linear
from autoplan.ops.records.on_shards import as_written
from autoplan.ops.records.record import call_record, nothing, op, op_record, unknown
from autoplan.ops.records.site import Answer, Site
from autoplan.ops.records.sizes import NO_SIZES, Lengths, PieceCount


@op("_assert_tensor_metadata", "sym_size", "sym_numel", "sym_stride", "sym_storage_offset",
    sizes=NO_SIZES, reduces=nothing, linear=Linear.NO, random=NEVER, runs=as_written)  # fmt: skip
def asks(_: Site) -> Answer:
    """Return no tensors, and mark nothing."""
    return []


op("_local_scalar_dense",
   sizes=NO_SIZES, reduces=nothing, linear=Linear.NO, random=NEVER, runs=as_written, tells=True)(unknown)  # fmt: skip


def literals_say(name: str) -> Literal["nothing", "elementwise", "function", "numbers", "pieces", "all"]:
    """Return which literals of a call affect its result on a shard. Elementwise ops behave alike for any number; rates
    are tried in both modes. "pieces": the first number is the number or the length of the pieces, and a dim may
    follow."""
    record = call_record(name)
    if isinstance(record.sizes, Lengths) or (isinstance(record.sizes, PieceCount) and record.sizes.dim is None):
        return "pieces"
    if op_record(record.becomes or name).dims is elementwise:
        if record.linear is not Linear.NO:
            return "nothing"
        return "elementwise" if record.random.when == "never" else "function"
    return "numbers" if record.random.when == "rate" else "all"

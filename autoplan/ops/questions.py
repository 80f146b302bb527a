"""Ops that only ask about a tensor and touch none of its dims."""

from __future__ import annotations

from autoplan.ops.records.answers import NEVER, Linear
from autoplan.ops.records.on_shards import as_written
from autoplan.ops.records.record import nothing, op, unknown
from autoplan.ops.records.site import Answer, Site
from autoplan.ops.records.sizes import NO_SIZES

__all__ = ["asks"]


@op("_assert_tensor_metadata", "sym_size", "sym_numel", "sym_stride", "sym_storage_offset",
    sizes=NO_SIZES, reduces=nothing, linear=Linear.NO, random=NEVER, runs=as_written)  # fmt: skip
def asks(_: Site) -> Answer:
    """It gives no tensor, and leaves no mark."""
    return []


op("_local_scalar_dense",
   sizes=NO_SIZES, reduces=nothing, linear=Linear.NO, random=NEVER, runs=as_written, tells=True)(unknown)  # fmt: skip

"""A batch of which each rank of context parallelism has its own positions, for a model that expects all of them.

The model sees the full length. Token ids, labels and masks are small, so they are gathered where they are read. This
saves loading: a rank need not have the tokens of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.layout import chunk
from autoplan.execute.collectives import RankGroup
from autoplan.execute.vocabulary.own_positions import OwnStream, PositionLogits, Rule, position_logits

_Batch = TypeVar("_Batch")


class OwnBatch(PositionLogits):
    """A rank's own positions of a tensor of a batch. Without the other ranks only the full length is known."""

    rules: ClassVar[dict[Any, Rule]] = OwnStream.rules
    what, way_out = "tensors of a batch", ""


def shard_batch(batch: _Batch, mesh: DeviceMesh, *, length: int | None = None, dim: int = 1) -> _Batch:
    """Return this rank's own positions, by the mesh dim "cp", of every tensor in `batch` that has the dim `dim`.

    Pass the result to a model that was parallelised with `plan(cp_size=N)`, as you would pass a full batch (which such
    a model takes as well: then shard nothing). Each tensor is marked as a shard, so that the model does not take it for
    the full one. With `length` the batch holds this rank's positions already, of sequences of that length. Tensors with
    fewer dims are left as they are.
    """
    dims = (mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else ()
    if "cp" not in dims:
        raise PlanMismatchError(
            f"the mesh has no dim named 'cp' (dims: {list(dims)})",
            hint='pass the mesh on which the model was parallelised, with a dim "cp"',
        )
    group = RankGroup.of(mesh["cp"])
    lengths: dict[int, str] = {}

    def own(value: Any, path: str) -> Any:
        if isinstance(value, PositionLogits):
            raise AutoplanError(f"{path or 'the batch'} is already sharded", hint="shard it once, before the model")
        if isinstance(value, Mapping):
            return type(value)({key: own(item, f"{path}.{key}".strip(".")) for key, item in value.items()})  # type: ignore[call-arg]
        if type(value) in (tuple, list):
            return type(value)(own(item, f"{path}.{place}".strip(".")) for place, item in enumerate(value))
        if not isinstance(value, torch.Tensor) or value.dim() <= dim:
            return value
        lengths.setdefault(value.shape[dim], path)
        if len(lengths) > 1:
            (size, first), (other, second) = lengths.items()
            raise AutoplanError(
                f"dim {dim} has size {size} in {first or 'the batch'}, but {other} in {second}",
                hint="shard only tensors along one sequence; pass the others to the model unchanged",
            )
        whole = value.shape[dim] if length is None else length
        mine = chunk(whole, group.size, group.rank)
        if length is not None and value.shape[dim] != len(mine):
            raise AutoplanError(
                f"{path or 'the batch'} has {value.shape[dim]} positions, but rank {group.rank} of "
                f"{group.size} has {len(mine)} of {length}",
                hint="omit length if the batch is not sharded",
            )
        part = value if length is not None else value.narrow(dim, mine.start, len(mine)).contiguous()
        return position_logits(part, dim - value.dim(), whole, group, OwnBatch)

    result: _Batch = own(batch, "")
    return result

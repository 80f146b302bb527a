"""How transformers itself would shard a model: by its own code, so that its plans are judged by what they really do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["known_styles", "shard_as_transformers", "slice_of"]


def known_styles() -> frozenset[str]:
    """The styles of the installed transformers."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    return frozenset(ALL_PARALLEL_STYLES.keys())


def slice_of(tensor: Any, whole: Any) -> Any:
    """What the loader would read of `whole` for this rank, where `tensor` is the DTensor to fill."""
    from transformers.distributed.sharding_utils import DtensorShardOperation

    return DtensorShardOperation(tensor).shard_tensor(whole)


def shard_as_transformers(model: Any, mesh: Any, *, plan: dict[str, str]) -> Any:
    """Untie, shard, slice, tie: the order in which a checkpoint is loaded."""
    from transformers.distributed.mixin import DistributedMixin
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    ties = list(_untied(model))
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expanded = DistributedMixin._expand_parallel_plan(model, plan)
    apply_tensor_parallelism(model, mesh, expanded)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "placements"):
            _set_local(parameter, slice_of(parameter, whole[name]))
    for name, first in ties:
        owner, _, leaf = name.rpartition(".")
        holder, _, theirs = first.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = model.get_submodule(holder)._parameters[theirs]
    return model


def _untied(model: Any) -> Iterator[tuple[str, str]]:
    """Give every further name of a tied parameter a parameter of its own: (name, the first name)."""
    from torch import nn

    seen: dict[int, str] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        first = seen.setdefault(id(parameter), name)
        if first != name:
            owner, _, leaf = name.rpartition(".")
            own = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            model.get_submodule(owner)._parameters[leaf] = own
            yield name, first


def _set_local(parameter: Any, local: Any) -> None:
    """Fill a DTensor with the slice that the library's loader would read for this rank."""
    import torch

    with torch.no_grad():
        held = parameter.to_local()
        held.copy_(local)

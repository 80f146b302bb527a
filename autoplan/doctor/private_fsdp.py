"""The undocumented parts of FSDP2 that autoplan uses, with their canaries."""

from __future__ import annotations

import inspect

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state

from autoplan.doctor.private import Private

__all__ = ["FSDP"]

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
_WALKED = "a rank that skips a unit gathers and frees it all the same"


def _takes(function: object, *parameters: str) -> bool:
    return tuple(inspect.signature(function).parameters) == parameters  # type: ignore[arg-type]


def _zeros_for_unused() -> bool:
    """The caller's own wish is kept by each group of parameters, under this name; torch 2.11 knows no such wish."""
    source = inspect.getsource(_fsdp_param_group.FSDPParamGroup.__init__)
    kept = "self.reduce_scatter_unused_params" in source
    return getattr(_fsdp_state.FSDPState(), "_fsdp_param_groups", None) == [] if kept else torch.__version__ < "2.12"


FSDP = (
    Private(
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
        "what FSDP2 knows of a unit",
        lambda: _takes(FSDPModule._get_fsdp_state, "self"),
    ),
    Private(
        f"{_STATE}._pre_forward",
        _WALKED,
        lambda: _takes(_fsdp_state.FSDPState._pre_forward, "self", "module", "args", "kwargs"),
    ),
    Private(
        f"{_STATE}._post_forward",
        _WALKED,
        lambda: _takes(_fsdp_state.FSDPState._post_forward, "self", "module", "input", "output"),
    ),
    Private(f"{_STATE}._fsdp_param_groups", "has the caller asked for zeros of unused parameters?", _zeros_for_unused),
)

"""Optimizer states of sharded parameters in the checkpoint's shapes and row order.

The problem: a packed weight lies in rank order, so do its momenta, and a run that is resumed at another tp size would
read them shuffled, without an error. Model hooks do not see optimizer states. So every optimizer that is given
parameters of a parallelized model translates its own state dict: into checkpoint order when one is made, back when one
is loaded (from DTensors of any mesh, or from whole tensors, such as a run on one device saves).

torch has hooks for an optimizer's state dict but none for its creation, so `Optimizer.__init__` tells us of new ones
(`following.py`), for as long as there are parameters of a parallelized model. Optimizers of other parameters are not
touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autoplan.common.errors import AutoplanError
from autoplan.execute.parameters.counted import note_repeating
from autoplan.execute.parameters.held import Held, held_by
from autoplan.execute.parameters.optimizer_steps import watch_steps
from autoplan.execute.parameters.state_dict import as_held, in_checkpoint_order

__all__ = ["follow"]

_FOLLOWED = "_autoplan_followed"


def follow(optimizer: Optimizer) -> None:
    """Translate the state dicts of this optimizer, if it has marked parameters."""
    if getattr(optimizer, _FOLLOWED, False) or not any(held_by(p) is not None for p in _parameters(optimizer)):
        return
    setattr(optimizer, _FOLLOWED, True)
    note_repeating(optimizer)
    watch_steps(optimizer, _parameters(optimizer))
    optimizer.register_state_dict_post_hook(_to_checkpoint)
    optimizer.register_load_state_dict_pre_hook(_from_checkpoint)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _to_checkpoint(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _translated(optimizer, state_dict, _saved)


def _from_checkpoint(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _translated(optimizer, state_dict, _loaded)


def _translated(optimizer: Optimizer, state_dict: dict[str, Any], translate: Any) -> dict[str, Any]:
    """The same state dict with each tensor of each marked parameter translated. Its keys may be numbers or names."""
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    by_key = dict(zip(keys, _parameters(optimizer), strict=False))
    states: dict[Any, Any] = {}
    for key, state in state_dict["state"].items():
        parameter = by_key.get(key)
        held = held_by(parameter) if parameter is not None else None
        if held is None or not isinstance(parameter, DTensor) or not isinstance(state, Mapping):
            states[key] = state
        else:
            states[key] = {name: _one(name, value, parameter, held, translate) for name, value in state.items()}
    return {**state_dict, "state": states}


def _one(name: str, value: Any, parameter: DTensor, held: Held, translate: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value  # step counts and the like
    return translate(name, value, parameter, held)


def _saved(name: str, value: torch.Tensor, parameter: DTensor, held: Held) -> torch.Tensor:
    if not held.in_rank_order:
        return value
    if not isinstance(value, DTensor) or value.shape != parameter.shape:
        raise AutoplanError(
            f"the optimizer keeps {name!r} of shape {list(value.shape)} for a packed parameter of {list(held.shape)}",
            hint="only states of the parameter's own shape can be put in checkpoint order; keep that parameter whole",
        )
    return in_checkpoint_order(value, held)


def _loaded(name: str, value: torch.Tensor, parameter: DTensor, held: Held) -> torch.Tensor:
    if tuple(value.shape) != held.shape:
        if held.in_rank_order:
            raise AutoplanError(
                f"the saved {name!r} has shape {list(value.shape)}, its parameter {list(held.shape)}",
                hint="the optimizer state belongs to another model",
            )
        return value
    own = value.clone() if held.dim is None and not isinstance(value, DTensor) else value  # never the caller's tensor
    return as_held(own, parameter, held)

"""`parameter.data = x` of a parameter on ranks: the rank's piece of x is what is computed with from then on.

x may be a DTensor that lies as the parameter does (`parameter.data * 0.9`), or a whole plain tensor in the checkpoint's
order. Anything else is refused: it would be computed with by nobody. So is an assignment to what FSDP2 has cut further,
for it gathers from memory of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoplan.common.errors import AutoplanError
from autoplan.execute.parameters.held import Held
from autoplan.execute.parameters.state_dict import as_held

__all__ = ["assign_data"]


def assign_data(parameter: DTensor, value: Any, held: Held) -> None:
    """What `parameter.data = value` does to one that lies on ranks."""
    if parameter.device_mesh.ndim > 1:
        _refuse(parameter, value, held, "which FSDP2 gathers from memory of its own")
    if not isinstance(value, torch.Tensor):
        _refuse(parameter, value, held, "which takes tensors")
    if isinstance(value, DTensor):
        if (value.device_mesh, value.placements, value.shape) != _how(parameter):
            _refuse(parameter, value, held, "which lies otherwise")
    elif tuple(value.shape) != held.shape:
        _refuse(parameter, value, held, "which has another shape")
    else:
        value = as_held(value, parameter, held)
    torch.Tensor.data.__set__(parameter, value.detach())
    parameter._local_tensor, parameter._spec = value._local_tensor.detach(), value._spec


def _how(parameter: DTensor) -> Any:
    return parameter.device_mesh, parameter.placements, parameter.shape


def _refuse(parameter: DTensor, value: Any, held: Held, why: str) -> None:
    what = f"a {type(value).__name__}"
    if isinstance(value, torch.Tensor):
        placed = f", {value.placements}" if isinstance(value, DTensor) else ""
        what += f" of shape {list(value.shape)}{placed}"
    raise AutoplanError(
        f"parameter.data = {what} for a parameter of {list(held.shape)}, {parameter.placements}, {why}",
        hint="write into it: with torch.no_grad(): parameter.copy_(x), x a DTensor that lies as the parameter does; "
        "or load it: model.load_state_dict({name: x}, strict=False)",
    )

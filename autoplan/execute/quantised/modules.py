"""Models whose weights stay packed: each module's class gets a subclass with a weight property that dequantises.

Packed tensors are frozen parameters under their names in checkpoints: sharded, loaded and saved like any others.
Gradients pass to the input and to adapters. No GPU kernel is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.common.errors import PlanMismatchError
from autoplan.common.options import check_argument
from autoplan.common.patterns import matches
from autoplan.common.torch_internals import DisableTorchFunction, function_mode_is_active, own_parameters
from autoplan.execute.parameters.held import plain_name, record_of
from autoplan.execute.parameters.local_views import stored_tensor
from autoplan.execute.quantised.formats import QuantisedTwice, decoder_of, dequantise
from autoplan.patches.classes import give_class, subclass_of
from autoplan.values import Plan
from autoplan.values.quantised import PackedTensor, PackedWeight

_STORED = "_autoplan_stored"
_BESIDE = "_autoplan_beside"
_PLAIN = "_autoplan_plain"  # stacks dequantised in the running call


def packed_model(model: nn.Module, plan: Plan) -> nn.Module:
    """Replace weights of the plain `model` by the packed tensors of `plan`, on meta; `load_weights` fills them."""
    check_argument("model", model, nn.Module, "pass the model itself, an nn.Module")
    check_argument("plan", plan, Plan, "pass a plan that autoplan.plan made for a quantised model")
    if not plan.packed:
        raise PlanMismatchError("the plan has no quantised weights", hint="plan a config with quantization_config")
    unknown = next((weight for weight in plan.packed if decoder_of(weight.scheme) is None), None)
    if unknown is not None:
        raise PlanMismatchError(
            f"{unknown.name} is stored as {unknown.scheme.title}, which needs its own package for computing",
            hint="build the model with that package, or fill a plain one with load_weights(…, dequantise=True)",
        )
    chosen: dict[nn.Module, list[PackedWeight]] = {}
    for path, module in model.named_modules():
        for name, parameter in own_parameters(module).items():
            own = f"{path}.{name}" if path else name
            weight = next((weight for weight in plan.packed if matches(weight.name, own)), None)
            if weight is None or parameter is None:
                continue
            if tuple(parameter.shape) != weight.shape:
                raise PlanMismatchError(
                    f"{path}.{name} has shape {list(parameter.shape)}, but the plan has {list(weight.shape)}"
                )
            chosen.setdefault(module, []).append(weight)
    for module, weights in chosen.items():  # nothing was changed before
        stored: dict[str, tuple[PackedWeight, torch.dtype]] = {}
        for weight in weights:
            old = own_parameters(module).pop(weight.parameter)
            assert old is not None
            stored[weight.parameter] = (weight, old.dtype)
            for tensor in weight.tensors:
                empty = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
                own_parameters(module)[tensor.attribute] = nn.Parameter(empty, requires_grad=False)
        module.__dict__[_STORED] = stored
        kind: type = type(module)
        give_class(module, _stored_class(kind, tuple(stored), any(len(weight.shape) == 3 for weight in weights)))
    return model


def is_packed(module: nn.Module) -> bool:
    """Return whether a module itself holds packed tensors."""
    return _STORED in module.__dict__


def stored_tensors(model: nn.Module) -> dict[str, tuple[PackedWeight, PackedTensor]]:
    """Return the packed tensors of a model by full name, each with its weight."""
    tensors: dict[str, tuple[PackedWeight, PackedTensor]] = {}
    for path, module in model.named_modules():
        for weight, _ in module.__dict__.get(_STORED, {}).values():
            tensors |= {plain_name(f"{path}.{tensor.attribute}"): (weight, tensor) for tensor in weight.tensors}
    return tensors


def keep_beside(model: nn.Module, headers: Mapping[str, str], twice: Mapping[str, QuantisedTwice]) -> None:
    """Keep what the files of a packed model held besides tensors: readers of a saved checkpoint need it again."""
    if stored_tensors(model):
        model.__dict__[_BESIDE] = dict(headers), dict(twice)


def kept_beside(model: nn.Module) -> tuple[dict[str, str], dict[str, QuantisedTwice]]:
    """Return the headers of those files, and the weights that they stored quantised twice."""
    return model.__dict__.get(_BESIDE, ({}, {}))


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Dequantise a packed module to this dtype from now on: its inputs are cast to it."""
    stored = module.__dict__[_STORED]
    module.__dict__[_STORED] = {name: (weight, dtype) for name, (weight, _) in stored.items()}


@cache
def _stored_class(cls: type, names: tuple[str, ...], stacks: bool) -> Any:
    own: dict[str, Any] = {name: property(_reader(name)) for name in names}
    call: Any = cls.__call__

    def keeping_plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outer = module.__dict__.get(_PLAIN)
        module.__dict__[_PLAIN] = {}
        try:
            return call(module, *args, **kwargs)
        finally:
            module.__dict__[_PLAIN] = outer

    if stacks:  # a stack, which a forward reads once per expert, is dequantised once per call
        own["__call__"] = keeping_plain
    return subclass_of(cls, own)


def _reader(name: str) -> Any:
    def plain(module: nn.Module) -> torch.Tensor:
        weight, dtype = module.__dict__[_STORED][name]
        parts = {tensor.name: stored_tensor(module, tensor.attribute) for tensor in weight.tensors}
        # The shape of the plain shard follows from the first local tensor.
        first = parts[weight.tensors[0].name]
        shape = list(weight.shape)
        tensor: PackedTensor = weight.tensors[0]
        if weight.is_flat and weight.dim is not None:
            numbers = first.numel() * tensor.dims[0].factor // tensor.dims[0].each
            shape[weight.dim] = numbers // (weight.elements // weight.shape[weight.dim])
        for place, dim in enumerate(tensor.dims):
            if len(dim.of) == 1:
                shape[dim.of[0]] = first.shape[place] * dim.factor // dim.each
        return dequantise(weight, parts, tuple(shape)).to(dtype)

    def read(module: nn.Module) -> torch.Tensor:
        parameter = own_parameters(module).get(name)
        if isinstance(parameter, DTensor) and (parameter.device_mesh.ndim > 1 or record_of(module) is None):
            return parameter  # FSDP2 reads its sharded parameter between uses, even while the forward runs
        cache = module.__dict__.get(_PLAIN)
        if cache is not None and name in cache:
            return cache[name]
        if function_mode_is_active():
            with DisableTorchFunction():  # a scoped function mode must not count these calls
                plain_weight = plain(module)
        else:
            plain_weight = plain(module)
        if cache is not None:
            cache[name] = plain_weight
        return plain_weight

    return read

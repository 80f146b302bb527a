"""Which rule each stored tensor of a quantised model has: those of a plan, where the model holds packed weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autoplan.common.patterns import matches
from autoplan.values import ParameterRule, Plan

__all__ = ["is_stored", "is_stored_packed", "stored_rules"]


def stored_rules(tensors: Mapping[str, torch.Tensor], plan: Plan) -> dict[str, ParameterRule]:
    """By full name, for the tensors of a model that are what the plan says is stored."""
    found: dict[str, ParameterRule] = {}
    for weight in plan.packed:
        for tensor in weight.tensors:
            if tensor.dim is not None:
                pattern = f"{weight.owner}.{tensor.attribute}"
                names = [pattern] if pattern in tensors else [name for name in tensors if matches(pattern, name)]
                for name in names:
                    if tuple(tensors[name].shape) == tensor.shape:
                        found[name] = ParameterRule(name, tensor.dim, tensor.layout)
    return found


def is_stored_packed(pattern: str, plan: Plan, rules: Mapping[str, ParameterRule]) -> bool:
    """Is a weight that the model does not have there in packed form?"""
    mine = [weight for weight in plan.packed if weight.name == pattern or matches(pattern, weight.name)]
    return any(matches(weight.owner, name.rpartition(".")[0]) for weight in mine for name in rules)


def is_stored(name: str, shape: tuple[int, ...], plan: Plan) -> bool:
    """Is a tensor of this name and shape what the plan says is stored for a weight?"""
    return any(
        tensor.shape == shape and matches(f"{weight.owner}.{tensor.attribute}", name)
        for weight in plan.packed
        for tensor in weight.tensors
    )

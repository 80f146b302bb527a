"""The same forward, bit for bit, at every tensor-parallel size: to find out where two runs diverge.

The problem: a row-parallel product is a sum over ranks, and float sums depend on the number and order of the summands.
A column-parallel one has no sum, but a library may choose another kernel for another shape. So here every product with
a sharded weight is computed in full, from gathered shards, exactly as the unsharded model does it. Then a rank keeps
its columns, or (where its result is a partial sum) the first rank returns all of it and the others return zeros, so
that the all-reduce rounds nothing. Backward is the ordinary one, on shards. It is slow, and one full weight at a time
is in memory.

Where partial sums come from something else (experts in one tensor, a norm over a sharded axis) it refuses, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.patterns import matches
from autoplan.common.torch_internals import CONVOLUTIONS, own_parameters
from autoplan.execute.collectives import RankGroup, all_gather_rows, take_rows, whole_order
from autoplan.execute.parameters.held import Held, record_of
from autoplan.execute.parameters.local_views import local_view
from autoplan.values import CallRewrite, MeanOverRanks, ParameterRule, Plan, VocabularyTable


def make_reproducible(
    modules: Mapping[str, nn.Module],
    plan: Plan,
    rules: Mapping[str, ParameterRule | None],
    undo: list[Callable[[], None]],
) -> None:
    """Replace each product with a sharded weight by one with the full weight, once parameters are sharded."""
    cut = {name: rule.dim for name, rule in rules.items() if rule is not None and rule.dim is not None}
    refused = [f"{call.pattern}: {call.site.function}" for call in plan.runtime.of(CallRewrite) if call.reduces]
    refused += [f"{mean.pattern}: a mean over ranks" for mean in plan.runtime.of(MeanOverRanks)]
    for name, dim in cut.items():
        path, _, own = name.rpartition(".")
        module = modules[path]
        parameter = own_parameters(module).get(own)
        # A lookup has one nonzero summand, and a conv sharded by output channel none: nothing is rounded.
        is_table = any(matches(table.pattern, path) for table in plan.runtime.of(VocabularyTable))
        is_lookup = is_table and isinstance(module, nn.Embedding)
        by_channel = isinstance(module, CONVOLUTIONS) and dim == 0
        if parameter is None or parameter.dim() < 2 or is_lookup or by_channel:
            continue
        linear = type(module).forward is nn.Linear.forward or conventions().is_transposed_linear(module)
        if own != "weight" or not linear:
            refused.append(name)
        elif "forward" not in module.__dict__:
            module.__dict__["forward"] = MethodType(_forward, module)
            undo.append(partial(module.__dict__.pop, "forward", None))
    if refused:
        raise AutoplanError(
            f"reproducible_forward: {len(refused)} sums over ranks are not products of a module with its weight, "
            f"first {refused[0]}",
            hint="do not set reproducible_forward; autoplan.verify(rounding=True) measures the spread of the results",
        )


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute `nn.Linear.forward`, or that of the transposed linear in GPT-2 and models like it."""
    record = record_of(self)
    assert record is not None
    held, transposed = record.parameters["weight"], conventions().is_transposed_linear(self)
    bias = own_parameters(self).get("bias")
    held_bias = record.parameters.get("bias")
    if held_bias is not None and held_bias.divide:
        bias = local_view(bias, replace(held_bias, divide=False))
    elif bias is not None:
        bias = self.bias
    return _Product.apply(x, self.weight, bias, held, held_bias, transposed)


def _whole(x: torch.Tensor, held: Held | None, dim: int) -> torch.Tensor:
    """Return the global tensor, its rows in the checkpoint's order."""
    if held is None or held.dim is None:
        return x
    whole = all_gather_rows(x, held.group, dim, [len(rows) for rows in held.rows])
    order = whole_order(held.rows)
    return whole.contiguous() if order is None else take_rows(whole, dim, order)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
        held, held_bias, transposed = how
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.biased = transposed, bias is not None
        assert held.dim is not None
        whole_weight = _whole(weight, held, held.dim)
        whole_bias = None if bias is None else _whole(bias, held_bias, 0)
        sums = held.dim == (0 if transposed else 1)
        whole_x = _whole(x, held, -1) if sums else x
        if transposed:
            product = torch.addmm(whole_bias, whole_x.view(-1, whole_x.shape[-1]), whole_weight)
            product = product.view(*x.shape[:-1], -1)
        else:
            product = F.linear(whole_x, whole_weight, whole_bias)
        group: RankGroup = held.group
        if sums:
            return product if group.rank == 0 else torch.zeros_like(product)
        return take_rows(product, -1, held.rows[group.rank])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of this rank's shards, as if the product had been computed from them."""
        x, weight = ctx.saved_tensors
        rows, of_rows = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        of_x = gradient @ (weight.T if ctx.transposed else weight)
        of_weight = rows.T @ of_rows if ctx.transposed else of_rows.T @ rows
        return of_x, of_weight, of_rows.sum(0) if ctx.biased else None, None, None, None

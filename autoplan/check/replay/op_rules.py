"""How single ops run on a rank's share of their inputs.

Most aten ops do what is right by themselves: elementwise ops, batched products, softmax over a whole dimension. A rule
is only needed where an op was recorded with a literal size (views, slices, splits), where it sums over a split
dimension (products, sums, convolutions), or where it needs all of one (norms).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoplan.analyse.shards import Shards
from autoplan.common.layout import Layout
from autoplan.ops.rules.experts import BOX
from autoplan.values import Op, Ref

__all__ = ["RULES", "Local", "Rule"]


@dataclass
class Local:
    """One op on one rank. A rule that leaves a partial result sets `reducing`, and `weight` for its part in the sum.

    `exchanged`: ranks had to talk, but not to sum the result. `recorded` is what the op gave on whole inputs.
    """

    shards: Shards
    op: Op
    function: Any
    args: list[Any]
    kwargs: dict[str, Any]
    rank: int
    outputs: list[int]
    reducing: bool = False
    weight: float = 1.0
    exchanged: bool = False
    recorded: Sequence[torch.Tensor] = ()

    def call(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def layout(self, position: int, dim: int) -> Layout | None:
        """How a dim of the position-th argument is split."""
        given = self.op.args[position]
        layouts = self.shards.layouts(given.id) if isinstance(given, Ref) else ()
        return layouts[dim] if layouts else None

    def size(self, position: int, dim: int) -> int:
        """The whole size of a dim of the position-th argument."""
        return self.shards.trace.tensors[self.op.args[position].id].shape[dim]

    @property
    def shape(self) -> tuple[int, ...]:
        """What this rank's first output should look like."""
        return self.shards.local_shape(self.outputs[0], self.rank)

    def argument(self, position: int, name: str, default: Any) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


@dataclass(frozen=True)
class Rule:
    """`recorded`: take the share of the recorded value, nothing can be computed (empty memory, random numbers)."""

    run: Callable[[Local], Any] = Local.call
    recorded: bool = False


# ------------------------------------------------------------------------------------------------ literal sizes


def _reshape(local: Local) -> Any:
    return local.args[0].reshape(local.shape)


def _expand(local: Local) -> Any:
    return local.args[0].expand(local.shape)


def _slice(local: Local) -> Any:
    dim = local.argument(1, "dim", 0)
    layout = local.layout(0, dim)
    if layout is None:
        return local.call()
    size = local.size(0, dim)
    start, end, step = (local.argument(p, n, d) for p, n, d in ((2, "start", None), (3, "end", None), (4, "step", 1)))
    held = layout.rows(local.rank, local.shards.tp)
    if step != 1:
        return torch.ops.aten.slice.Tensor(local.args[0], dim, start, end, step)
    low, high = (
        sum(row < _bound(value, size, default) for row in held) for value, default in ((start, 0), (end, size))
    )
    return torch.ops.aten.slice.Tensor(local.args[0], dim, low, high, 1)


def _bound(value: int | None, size: int, default: int) -> int:
    if value is None:
        return default
    return max(value + size, 0) if value < 0 else min(value, size)


def _split(local: Local) -> Any:
    dim = local.argument(2, "dim", 0)
    sizes = [local.shards.local_shape(output, local.rank)[dim] for output in local.outputs]
    return torch.split(local.args[0], sizes, dim)


# ------------------------------------------------------------------------------------------------ sums over a split


def _product(local: Local) -> Any:
    left = local.op.args[0]
    identity = isinstance(left, Ref) and left.id in local.shards.axes.identities
    local.reducing = local.layout(0, -1) is not None and not identity
    return local.call()


def _product_and_sum(local: Local) -> Any:
    """addmm: what is added is added once, by the first rank."""
    local.reducing = local.layout(1, -1) is not None
    if local.reducing and local.rank:
        local.kwargs["beta"] = 0
    return local.call()


def _convolution(local: Local) -> Any:
    groups = local.op.args[8]
    if groups > 1:
        local.args[8] = max(1, groups * local.args[0].shape[1] // local.size(0, 1))
    elif local.layout(0, 1) is not None:
        local.reducing = True
        if local.rank:
            local.args[2] = None
    return local.call()


def _lookup(local: Local) -> Any:
    """A table whose rows are split: each rank answers for its own rows, the rest are zero."""
    layout = local.layout(0, 0)
    if layout is None:
        return local.call()
    local.reducing = True
    table, ids = local.args[0], local.args[1]
    place = torch.full((local.size(0, 0),), -1, dtype=torch.long)
    place[list(layout.rows(local.rank, local.shards.tp))] = torch.arange(table.shape[0])
    here = place[ids]
    return table[here.clamp(min=0)] * (here >= 0).unsqueeze(-1).to(table.dtype)


def _row(local: Local) -> Any:
    """One row of a table whose rows are split: from the rank that has it."""
    layout = local.layout(0, local.args[1])
    if layout is None:
        return local.call()
    local.reducing = True
    row = local.args[2] % local.size(0, local.args[1])
    held = layout.rows(local.rank, local.shards.tp)
    local.args[2] = held.index(row) if row in held else 0
    return local.call() * float(row in held)


def _reduced(local: Local, position: int = 1) -> list[Layout | None]:
    dims = local.argument(position, "dim", None)
    given = local.op.args[0]
    layouts = local.shards.layouts(given.id) if isinstance(given, Ref) else ()
    if dims is None or dims == [] or isinstance(dims, bool):
        return list(layouts)
    return [layouts[dim] for dim in ([dims] if isinstance(dims, int) else dims) if layouts]


def _sum(local: Local) -> Any:
    local.reducing = any(_reduced(local))
    return local.call()


def _mean(local: Local) -> Any:
    for layout in _reduced(local):
        if layout is not None:
            local.reducing = True
            local.weight *= len(layout.rows(local.rank, local.shards.tp)) / layout.size
    return local.call()


def _whole_only(local: Local) -> Any:
    if any(_reduced(local)):
        raise ValueError("it reads across a split dimension")
    return local.call()


def _attention(local: Local) -> Any:
    if local.layout(0, 3) is not None:
        raise ValueError("attention over a split head width")
    missing = local.args[0].shape[-1] - local.args[2].shape[-1]
    if missing <= 0 or local.layout(2, 3) is None:
        return local.call()
    width = local.args[2].shape[-1]  # fused kernels want values as wide as the queries
    local.args[2] = torch.nn.functional.pad(local.args[2], (0, missing))
    mixed, *statistics = local.call()
    return [mixed[..., :width], *statistics]


def _norm(local: Local) -> Any:
    """Over a split dimension only the statistics are exchanged: they are the recorded ones, the rest is local."""
    if all(local.layout(0, dim) is None for dim in range(-len(local.args[1]), 0)):
        return local.call()
    local.exchanged = True
    x, weight, bias = local.args[0], local.argument(2, "weight", None), None
    if local.op.name == "native_layer_norm":
        _, mean, scale = local.recorded
        x, bias = x - mean, local.argument(3, "bias", None)
    else:
        _, scale = local.recorded
    x = x * scale
    x = x if weight is None else x * weight
    return [x if bias is None else x + bias, *local.recorded[1:]]


def _group_norm(local: Local) -> Any:
    """Its groups and channels are told as numbers: a rank has its share of both."""
    channels, whole = local.args[0].shape[1], local.size(0, 1)
    local.args[4], local.args[6] = channels, local.args[6] * channels // whole
    return local.call()


def _scaled(local: Local) -> Any:
    """A weight norm over a split dimension: ranks exchange the lengths, which are the recorded ones."""
    kept = local.argument(2, "dim", 0) % local.args[0].dim()
    if all(local.layout(0, dim) is None for dim in range(local.args[0].dim()) if dim != kept):
        return local.call()
    local.exchanged = True
    lengths = local.recorded[1]
    return [local.args[0] * (local.args[1] / lengths), lengths]


def _length(local: Local) -> Any:
    """A vector norm over a split dimension: the outcome of exchanging squares is recorded."""
    if not any(_reduced(local, 2)):
        return local.call()
    local.exchanged = True
    return list(local.recorded)


def _spread(local: Local) -> Any:
    """Over a split dimension ranks tell each other the mean and spread of their shares: the outcome is recorded."""
    if not any(_reduced(local)):
        return local.call()
    local.exchanged = True
    return list(local.recorded)


_NOT_COMPUTED = (
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "empty_like"),
    *("rand_like", "randn_like", "bernoulli", "native_dropout"),
    BOX,  # each rank's experts see other tokens: that is for ranks to show
)
_ACROSS = (
    *("amax", "amin", "max", "min", "argmax", "argmin", "any", "all"),
    *("var_mean", "std_mean", "prod", "logsumexp"),
)
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_attention_math",
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), Rule(_reshape)),
    "expand": Rule(_expand),
    "slice": Rule(_slice),
    **dict.fromkeys(("split", "split_with_sizes"), Rule(_split)),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "_grouped_mm"), Rule(_product)),
    **dict.fromkeys(("addmm", "baddbmm"), Rule(_product_and_sum)),
    "convolution": Rule(_convolution),
    "embedding": Rule(_lookup),
    "select": Rule(_row),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), Rule(_norm)),
    **dict.fromkeys(_ATTENTION, Rule(_attention)),
    "sum": Rule(_sum),
    "mean": Rule(_mean),
    **dict.fromkeys(("var", "std"), Rule(_spread)),
    "native_group_norm": Rule(_group_norm),
    "linalg_vector_norm": Rule(_length),
    "_weight_norm_interface": Rule(_scaled),
    **dict.fromkeys(_ACROSS, Rule(_whole_only)),
    **dict.fromkeys(_NOT_COMPUTED, Rule(recorded=True)),
}

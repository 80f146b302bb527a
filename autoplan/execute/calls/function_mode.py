"""The scoped function mode: for the few torch calls of a module that neither hooks nor stored integers can mend.

It is entered in the owning module's forward only and looks at that module's own calls, not its children's. A call is
known by its function and its place in the code. Whatever does not fit (another literal than planned, a
planned sum that was never reached) is an error, never a guess.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoplan.common.code_place import call_name, code_place
from autoplan.common.errors import PlanMismatchError
from autoplan.common.layout import Layout, chunk
from autoplan.execute.calls.fused_attention import attention_of_a_rank
from autoplan.execute.calls.variance import spread_over_ranks
from autoplan.execute.calls.vector_norms import scaled_by_lengths
from autoplan.execute.collectives import RankGroup, copy_to_ranks, gather_over_ranks, sum_over_ranks, take_rows
from autoplan.execute.randomness.dropout import SharedRandomness
from autoplan.ops import call_record
from autoplan.values import ScopedCall

__all__ = ["ModuleMode"]


class ModuleMode(TorchFunctionMode):
    """Rewrites planned calls of one module. `frames` is the stack of running modules; only our own frame counts."""

    def __init__(
        self,
        name: str,
        calls: tuple[ScopedCall, ...],
        group: RankGroup,
        frames: list[str],
        randomness: SharedRandomness,
    ) -> None:
        super().__init__()
        self.name, self.group, self.frames, self.randomness = name, group, frames, randomness
        self.calls = {(call.name, call.place): call for call in calls}
        self.names = {call.name for call in calls}
        self.widths = {f"!{width}" for _, found, width in (call.place.rpartition("!") for call in calls) if found}
        self.rounds: Counter[tuple[str, str]] = Counter()
        self.reached: set[tuple[str, str]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.frames or self.frames[-1] != self.name:
            return func(*args, **kwargs)
        name = call_name(func)
        planned = self._planned(name, args) if name in self.names else None
        return func(*args, **kwargs) if planned is None else self._run(planned, func, args, kwargs)

    def _planned(self, name: str, args: Any) -> ScopedCall | None:
        """What the plan says of the call that is being made."""
        place = code_place()
        self.rounds[name, place] += 1
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        dims, width = ("", "") if first is None else (first.dim(), first.shape[-1] if first.dim() else "")
        widths = (mark for mark in self.widths if mark != f"!{width}")
        for mark in ("", f"#{self.rounds[name, place]}", f"@{dims}", *widths):
            key = (name, place + mark)
            if key in self.calls:
                self.reached.add(key)
                return self.calls[key]
        return None

    def check_reached(self) -> None:
        """Every planned sum must have happened: another branch would owe it somewhere else."""
        for key, call in self.calls.items():
            if (call.reduce or call.copies) and key not in self.reached and not dict(call.details).get("sometimes"):
                raise self._mismatch(call, "was not reached")

    def _mismatch(self, planned: ScopedCall, what: str) -> PlanMismatchError:
        return PlanMismatchError(
            f"{self.name or 'the model'}: {planned.name!r} at {planned.place} {what}",
            hint="the module runs another branch than when it was planned; plan again with inputs= that show it",
        )

    def _run(self, planned: ScopedCall, func: Any, args: Any, kwargs: Any) -> Any:
        everything = {"args": tuple(args), "kwargs": dict(kwargs)}
        for path, numbers in planned.arguments:
            everything = _set(everything, path, lambda have, n=numbers: self._literal(planned, have, n))
        for path in planned.copies:
            everything = _set(everything, path, lambda x: copy_to_ranks(x, self.group))
        args, kwargs = everything["args"], everything["kwargs"]
        if planned.reduce == "norm":
            result = self._norm(planned, args, kwargs)
        elif planned.reduce == "spread":
            result = spread_over_ranks(planned, args[0] if args else kwargs["input"], self.group)
        elif planned.reduce == "length":
            result = scaled_by_lengths(planned, args, kwargs, self.group)
        elif planned.reduce == "attention":
            result = attention_of_a_rank(self.group, args, kwargs)
        elif planned.reduce in ("sum", "mean"):
            result = self._reduced(planned, func, args, kwargs)
        elif planned.reduce == "embedding":
            result = self._looked_up(planned, func, args, kwargs)
        elif planned.reduce == "row":
            result = self._row(planned, func, *args)
        elif planned.reduce == "gather":
            details = dict(planned.details)
            pieces = Layout.parse(details["layout"])
            rows = tuple(pieces.rows(rank, self.group.size) for rank in range(self.group.size))
            result = gather_over_ranks(func(*args, **kwargs), self.group, details["dim"], rows)
        elif "pieces" in dict(planned.details):
            result = self._pieces(planned, args[0] if args else kwargs["input"])
        elif self.randomness.active and ("random", "split") in planned.details:
            self.randomness.enter_split()
            try:
                result = func(*args, **kwargs)
            finally:
                self.randomness.leave_split()
        else:
            result = func(*args, **kwargs)
        for output, dim, layout in planned.cuts:
            result = self._cut(result, output, dim, Layout.parse(layout))
        return result

    def _literal(self, planned: ScopedCall, have: int, numbers: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
        """The number this rank must pass: as planned, or in proportion when a size of the batch is in it."""
        old, want = (of_ranks[self.group.rank] for of_ranks in numbers)
        if have == old:
            return want
        if have in (want, -1):  # -1 follows by itself
            return have
        if not old or have * want % old:
            raise self._mismatch(planned, f"passes {have} where the plan was made for {old}")
        return have * want // old

    def _reduced(self, planned: ScopedCall, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        bias, product = None, call_record(planned.name).product
        if product is not None and product.bias == 2:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            args, kwargs = (*args[:2], None, *args[3:]), {k: v for k, v in kwargs.items() if k != "bias"}
            if bias is not None and planned.name != "linear":
                bias = bias.view(-1, *[1] * (args[0].dim() - 2))
        elif planned.name in ("addmm", "baddbmm"):
            bias, args = args[0] * kwargs.get("beta", 1), args[1:]
            func, kwargs = (torch.mm if planned.name == "addmm" else torch.bmm), {}
        result = sum_over_ranks(func(*args, **kwargs), self.group)
        if planned.reduce == "mean":
            result = result / self.group.size
        return result if bias is None else result + bias

    def _looked_up(self, planned: ScopedCall, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Rows of a table of which this rank holds a piece: foreign ids give zeros, and the sum is the row."""
        own = chunk(dict(planned.details)["rows"], self.group.size, self.group.rank)
        table = 0 if args[0].is_floating_point() else 1  # aten's own embedding takes the table first
        ids, padding = args[1 - table], args[2] if len(args) > 2 else kwargs.get("padding_idx")
        foreign = (ids < own.start) | (ids >= own.stop)
        local = padding - own.start if padding is not None and padding in own else None
        own_ids = (ids - own.start).masked_fill(foreign, 0)
        local = -1 if local is None and table == 0 else local
        args = (*((args[0], own_ids) if table == 0 else (own_ids, args[1])), local, *args[3:])
        found = func(*args, **{name: value for name, value in kwargs.items() if name != "padding_idx"})
        return sum_over_ranks(found.masked_fill(foreign.unsqueeze(-1), 0), self.group)

    def _row(self, planned: ScopedCall, func: Any, table: torch.Tensor, index: Any) -> torch.Tensor:
        """table[number] or table[number, …]: the rank that has the row gives it, the others zeros."""
        rows, several = dict(planned.details)["rows"], isinstance(index, tuple)
        own, number = chunk(rows, self.group.size, self.group.rank), (index[0] if several else index) % rows
        table = table if number in own else table.new_zeros(1, *table.shape[1:])
        local = number - own.start if number in own else 0
        return sum_over_ranks(func(table, (local, *index[1:]) if several else local), self.group)

    def _pieces(self, planned: ScopedCall, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pieces that are equally long on the whole model, and not on a rank that holds a part of some of them."""
        details = dict(planned.details)
        lengths = details["pieces"][self.group.rank]
        if x.shape[details["dim"]] != sum(lengths):
            raise self._mismatch(planned, f"parts {x.shape[details['dim']]} where the plan was made for {sum(lengths)}")
        return x.split(lengths, details["dim"])

    def _norm(self, planned: ScopedCall, args: Any, kwargs: Any) -> torch.Tensor:
        """layer_norm or rms_norm whose statistic spans all ranks: sums are reduced forward and backward."""
        details = dict(planned.details)
        layer = planned.name == "layer_norm"
        x = args[0]
        dims = tuple(range(-details["dims"], 0))

        def given(position: int, key: str) -> Any:
            return args[position] if len(args) > position else kwargs.get(key)

        weight, bias = given(2, "weight"), given(3, "bias") if layer else None
        eps = given(4 if layer else 3, "eps")
        if eps is None:
            eps = 1e-5 if layer else torch.finfo(x.dtype).eps
        if layer:
            x = x - self._statistic(x, dims) / details["count"]
        x = x * torch.rsqrt(self._statistic(x.pow(2), dims) / details["count"] + eps)
        if weight is not None:
            x = x * weight
        return x if bias is None else x + bias

    def _statistic(self, x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
        return copy_to_ranks(sum_over_ranks(x.sum(dims, keepdim=True), self.group), self.group)

    def _cut(self, result: Any, output: int, dim: int, layout: Layout) -> Any:
        if isinstance(result, torch.Tensor):
            if result.shape[dim] != layout.size:
                return result
            return take_rows(result, dim, layout.rows(self.group.rank, self.group.size))
        items = list(result)
        items[output] = self._cut(items[output], 0, dim, layout)
        return items if isinstance(result, list) else tuple(items)


def _set(value: Any, path: tuple[Any, ...], change: Any) -> Any:
    """A nested value with one item changed; slices are entered by "start", "stop" and "step"."""
    if not path:
        return change(value)
    key, rest = path[0], path[1:]
    if isinstance(value, slice):
        parts = {name: getattr(value, name) for name in ("start", "stop", "step")}
        parts[key] = _set(parts[key], rest, change)
        return slice(parts["start"], parts["stop"], parts["step"])
    if isinstance(value, dict):
        return value | {key: _set(value[key], rest, change)}
    items = list(value)
    items[key] = _set(items[key], rest, change)
    return items if isinstance(value, list) else tuple(items)

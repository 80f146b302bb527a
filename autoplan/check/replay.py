"""Graph replay: run the recorded ops once more, on N imagined ranks, with every split at once.

Each rank holds its shard of every tensor that carries a split axis. Op by op, the ranks compute from what they hold; if
an op sums over a split dimension, the partial results are summed over ranks; and the result must be exactly this rank's
shard of the recorded value. So the whole partition is proven, node by node, in one process and without any module's
Python. (Literal sizes are rewritten here: `verify` shows that the modules' own code runs on shards.)

A wrong op is reported once: the ranks go on from the right value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from autoplan.analyse.infer import Shards
from autoplan.analyse.splits.model_ends import dim_of_result, gathered_product
from autoplan.axes.terms import Term
from autoplan.capture.recorder import Recording
from autoplan.check.ranks.common import one_compute_thread
from autoplan.check.verify.compare import error_of
from autoplan.common.layout import Layout
from autoplan.common.nested import flatten_tensors
from autoplan.common.torch_internals import schema_of
from autoplan.ops import op_record
from autoplan.ops.records.on_shards import Local
from autoplan.ops.records.on_shards import recorded as take_recorded
from autoplan.ops.records.record import REMOVED, Runs
from autoplan.values import Finding, Op, Ref, Symbolic, Trace

_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOOSE = 2e-2  # half precision


@dataclass
class Replayed:
    """`reductions` counts ops after which ranks had to communicate, by module; `split_ops` ops run on shards."""

    findings: list[Finding] = field(default_factory=list)
    reductions: Counter[str] = field(default_factory=Counter)
    split_ops: int = 0

    @property
    def ok(self) -> bool:
        return not self.findings


def replay(trace: Trace, recording: Recording, shards: Shards) -> Replayed:
    """Replay a trace whose recording kept its values (`record(..., keep_values=True)`)."""
    assert recording.op_values is not None, "record with keep_values=True"
    player = _Player(trace, recording, shards)
    with torch.inference_mode(), one_compute_thread():  # tensors recorded in inference mode are writable only in it
        for index, (op, (function, value)) in enumerate(zip(trace.ops, recording.op_values, strict=True)):
            player.taken = shards.axes.taken.get(index)
            player.play(op, function, value, gathered=index in shards.axes.gathered)
    return player.outcome


class _NotKept(ValueError):
    """An argument of an op that the recording does not hold."""


class _Player:
    """Holds the tensors of all ranks: shared ones once, split ones per rank."""

    def __init__(self, trace: Trace, recording: Recording, shards: Shards) -> None:
        self.trace, self.shards, self.tp = trace, shards, shards.tp
        self.first = recording.first
        self.shared: dict[int, torch.Tensor] = {}
        self.local: list[dict[int, torch.Tensor]] = [{} for _ in range(shards.tp)]
        self.outcome = Replayed()
        self.taken: tuple[int, tuple[Term, ...]] | None = None  # a full input of this op, and the dims that it takes

    def play(self, op: Op, function: Any, value: Any, *, gathered: bool = False) -> None:
        if op.name == REMOVED:
            return
        inputs, outputs = op.reads, op.results
        recorded = [tensor for _, tensor in flatten_tensors(value)]
        if any(self.shards.is_split(tensor) for tensor in inputs):
            self.outcome.split_ops += 1
            self._play_split(op, function, outputs, recorded, gathered)
        elif any(self.shards.is_split(tensor) for tensor in outputs):
            self._take(outputs, recorded)  # computed in full, used in shards: every rank slices its own
        else:
            self._play_shared(op, function, outputs, recorded)

    def _play_shared(self, op: Op, function: Any, outputs: Sequence[int], recorded: Sequence[torch.Tensor]) -> None:
        """Play an op without splits. Views and in-place ops are run, so that aliases stay aliases."""
        results = recorded
        if function.is_view or schema_of(function).is_mutable:
            with suppress(_NotKept):
                args, kwargs = self._arguments(op, function, rank=0)
                results = [tensor for _, tensor in flatten_tensors(function(*args, **kwargs))]
        self.shared.update(zip(outputs, results, strict=True))
        if results is not recorded and torch.Tag.nondeterministic_seeded in function.tags:
            for tensor, drawn in zip(results, recorded, strict=True):
                tensor.copy_(drawn)

    def _play_split(
        self, op: Op, function: Any, outputs: Sequence[int], recorded: Sequence[torch.Tensor], gathered: bool
    ) -> None:
        runs = op_record(op.name).runs
        if runs is take_recorded:  # undefined or random contents, or replicated by decision
            self._take(outputs, recorded)
            return
        try:
            results = self._compute(op, function, runs, outputs, recorded)
            if gathered:
                results = self._gather(op, results, recorded)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            text = (str(error) or repr(error)).splitlines()[0]
            self._report(op, f"{op.name} cannot run on a rank's shard: {text}")
            self._take(outputs, recorded)
            return
        for position, (tensor, whole) in enumerate(zip(outputs, recorded, strict=True)):
            problem = ""
            for rank in range(self.tp):
                want, got = self._shard(whole, tensor, rank), results[rank][position]
                difference = self._difference(got, want)
                problem = problem or (f"{difference} on rank {rank}" if difference else "")
                self._keep(tensor, rank, want if difference else got)
            if problem and position == 0 and not self._was_changed_aside(op, function, whole):
                # later outputs are statistics for the backward
                self._report(op, f"{op.name} gives a different result on shards: {problem}")

    def _was_changed_aside(self, op: Op, function: Any, recorded: torch.Tensor) -> bool:
        """Return whether the op gives another value in full, too: the model has changed an input where no op is
        recorded (`weight.data = x`)."""
        inputs = [tensor for tensor in op.reads if self.shards.is_split(tensor)]
        ranks = self.local
        try:
            self.local = [{tensor: self._put_together(tensor).clone() for tensor in inputs}] * self.tp
            args, kwargs = self._arguments(op, function, rank=0)
            results = [tensor for _, tensor in flatten_tensors(function(*args, **kwargs))]
        except (_NotKept, RuntimeError, IndexError, ValueError, TypeError):
            return False
        finally:
            self.local = ranks
        return bool(results) and bool(self._difference(results[0], recorded))

    def _put_together(self, tensor: int) -> torch.Tensor:
        if tensor in self.first:
            return self.first[tensor]
        parts = [self._get(tensor, rank) for rank in range(self.tp)]
        whole = parts[0].new_zeros(self.trace.tensors[tensor].shape)
        places, missing = torch.arange(whole.numel()).view(whole.shape), set(range(whole.numel()))
        for rank, part in enumerate(parts):
            own = self._shard(places, tensor, rank).reshape(-1)
            whole.view(-1)[own] = part.reshape(-1)
            missing -= set(own.tolist())
        if missing:
            raise _NotKept("some rows are on no rank")
        return whole

    def _compute(
        self, op: Op, function: Any, runs: Runs, outputs: Sequence[int], recorded: Sequence[torch.Tensor]
    ) -> list[list[torch.Tensor]]:
        """Return every rank's outputs, summed over ranks if the op sums over a split dimension."""
        calls, results = [], []
        for rank in range(self.tp):
            call = Local(self.shards, op, function, *self._arguments(op, function, rank), rank, outputs)
            call.recorded, call.on_ranks = recorded, partial(self._on_ranks, op, function)
            results.append([tensor for _, tensor in flatten_tensors(runs(call))])
            calls.append(call)
        if calls[0].exchanged or calls[0].reducing:
            self.outcome.reductions[op.module] += 1
        if not calls[0].reducing:
            return results
        wide = torch.promote_types(results[0][0].dtype, torch.float64)  # complex128 for complex numbers
        total = sum(result[0].to(wide) * call.weight for result, call in zip(results, calls, strict=True))
        assert isinstance(total, torch.Tensor)
        return [[total.to(result[0].dtype).clone(), *result[1:]] for result in results]

    def _gather(self, op: Op, results: list[list[torch.Tensor]], recorded: Sequence[torch.Tensor]) -> Any:
        """Return a product of which every rank has some columns (channels), assembled as the weight's are sharded."""
        product = gathered_product(op, self.shards.axes)
        assert product is not None
        weight, dim = product
        layout, out = self.shards.layouts(weight)[dim], dim_of_result(op)
        whole = torch.full_like(recorded[0], float("nan"))
        for rank, (part, *_) in enumerate(results):
            columns = range(whole.shape[out]) if layout is None else layout.rows(rank, self.tp)
            whole.index_copy_(out, torch.tensor(list(columns)), part)
        self.outcome.reductions[op.module] += 1
        return [[whole.clone(), *more] for _, *more in results]

    # Tensors that ranks hold

    def _arguments(self, op: Op, function: Any, rank: int) -> tuple[list[Any], dict[str, Any]]:
        types = {argument.name: str(argument.real_type) for argument in schema_of(function).arguments}
        args = [self._decode(item, kind, rank) for item, kind in zip(op.args, types.values(), strict=False)]
        return args, {name: self._decode(item, types[name], rank) for name, item in op.kwargs.items()}

    def _on_ranks(self, op: Op, function: Any, position: int) -> list[Any]:
        return [self._arguments(op, function, rank)[0][position] for rank in range(self.tp)]

    def _decode(self, item: Any, kind: str, rank: int) -> Any:
        """Return a recorded argument for the op: tensors from this rank, torch objects from their names."""
        if isinstance(item, Ref) and self.taken is not None and item.id == self.taken[0]:
            return self._own(self._get(item.id, rank), map(self.shards.layout_of, self.taken[1]), rank)
        if isinstance(item, Ref):
            return self._get(item.id, rank)
        if isinstance(item, Symbolic):
            return item.value
        if isinstance(item, tuple):
            return [self._decode(part, kind, rank) for part in item]
        if isinstance(item, str) and "str" not in kind:
            if "Device" in kind:
                return torch.device(item)
            if not hasattr(torch, item):  # a storage
                raise _NotKept(f"{kind} is not an argument type that a recording keeps")
            return getattr(torch, item)
        return item

    def _get(self, tensor: int, rank: int) -> torch.Tensor:
        tensors = self.local[rank] if self.shards.is_split(tensor) else self.shared
        if tensor not in tensors:
            if tensor not in self.first:
                raise _NotKept("its input was made outside the recorded ops")
            tensors[tensor] = self._shard(self.first[tensor], tensor, rank).clone()
        return tensors[tensor]

    def _shard(self, whole: torch.Tensor, tensor: int, rank: int) -> torch.Tensor:
        """Return a rank's shard of a full value."""
        return self._own(whole, self.shards.layouts(tensor), rank)

    def _own(self, whole: torch.Tensor, layouts: Iterable[Layout | None], rank: int) -> torch.Tensor:
        for dim, layout in enumerate(layouts):
            if layout is not None and whole.shape[dim] > 1:
                whole = whole.index_select(dim, torch.tensor(layout.rows(rank, self.tp), device=whole.device))
        return whole

    def _take(self, outputs: Sequence[int], recorded: Sequence[torch.Tensor]) -> None:
        for tensor, whole in zip(outputs, recorded, strict=True):
            for rank in range(self.tp):
                self._keep(tensor, rank, self._shard(whole, tensor, rank))

    def _keep(self, tensor: int, rank: int, value: torch.Tensor) -> None:
        """Store a tensor; a known one is overwritten in place, so that its views see it."""
        tensors = self.local[rank] if self.shards.is_split(tensor) else self.shared
        current = tensors.get(tensor)
        if current is None or current.shape != value.shape:
            tensors[tensor] = value
        elif current is not value:
            current.copy_(value)

    def _difference(self, got: torch.Tensor, want: torch.Tensor) -> str:
        if got.shape != want.shape:
            return f"shape {list(got.shape)} instead of {list(want.shape)}"
        if not (got.is_floating_point() or got.is_complex()):
            return "" if torch.equal(got, want) else "other integers"
        error = error_of(got, want, 1e-2)
        if error == float("inf") and torch.equal(odd := ~want.isfinite(), ~got.isfinite()):
            error = error_of(got.masked_fill(odd, 0), want.masked_fill(odd, 0), 1e-2)  # not finite in the same places
        return "" if error <= _LIMITS.get(got.dtype, _LOOSE) else f"off by {error:.2g}"

    def _report(self, op: Op, message: str) -> None:
        self.outcome.findings.append(Finding("replay", "error", op.module, message))

"""Measure how far off a sharded model is: one error measure, and findings with the tensor and the size of its error.

A gradient may be zero for mathematical reasons (a key's bias under softmax), so its error is measured against its own
size plus a small part of the largest tensor of its kind: `|got - want|max / (|want|max + 1e-4 * max over all |want|)`.
Missing reductions are found by comparing every gradient on every rank: forward results are exact without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoplan.check.ranks.threads import listening
from autoplan.check.verify.subject import tensors_in, weighted_sum
from autoplan.common.nested import flatten_tensors
from autoplan.common.patterns import matches
from autoplan.execute.hooks.sequence import deals_out, is_shard
from autoplan.execute.tensor_parallel import applied
from autoplan.values import Collective, Finding, Traffic

Tensors = Mapping[str, torch.Tensor]
FLOOR = 1e-4


@dataclass(frozen=True)
class Tolerance:
    """The largest error that still counts as equal. In single precision, sums in another order differ already."""

    limit: float
    precision: str


DOUBLE = Tolerance(1e-5, "float64")
SINGLE = Tolerance(2e-3, "float32")
_IN_HALF = {
    torch.bfloat16: Tolerance(6e-2, "bfloat16"),  # rounding hides small mistakes, but no missing sum
    torch.float16: Tolerance(1e-2, "float16"),
}


def tolerance_for(dtype: torch.dtype) -> Tolerance:
    return DOUBLE if dtype == torch.float64 else _IN_HALF.get(dtype, SINGLE)


def error_of(got: torch.Tensor, want: torch.Tensor, largest: float) -> float:
    """Return the error measure above; infinity if shapes or the positions of infinities and NaN differ."""
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    got, want = _comparable(got), _comparable(want)
    difference, top = float((got - want).abs().max()), float(want.abs().max())
    if math.isfinite(difference) and math.isfinite(top):  # then everything is finite
        return _relative(difference, top, largest)
    finite = torch.isfinite(want)
    same = (got == want) | (got.isnan() & want.isnan()) | (finite & torch.isfinite(got))
    if not bool(same.all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    got, want = got[finite], want[finite]
    return _relative(float((got - want).abs().max()), float(want.abs().max()), largest)


def _relative(difference: float, top: float, largest: float) -> float:
    scale = top + FLOOR * largest
    return difference / scale if scale else float(difference > 0)


def compare(
    check: str,
    what: str,
    want: Tensors,
    ranks: Sequence[Tensors],
    tolerance: Tolerance,
    *,
    missing_is_zero: bool = False,
) -> tuple[list[Finding], dict[str, float]]:
    """Compare every tensor of every rank with the unsharded model's; return findings and the worst error by name."""
    largest = max((largest_of(tensor) for tensor in want.values()), default=0.0)
    findings: list[Finding] = []
    errors: dict[str, float] = {}
    for name in sorted({*want, *(name for rank in ranks for name in rank)}):
        if name in want and want[name].numel() and bool(torch.isnan(want[name]).all()):
            text = f"not comparable: the unsharded model's {what} is NaN everywhere"
            hint = "pass inputs on which the unsharded model is finite"
            findings.append(Finding(check, "warn", name, text, hint, kind="not-comparable"))
            continue
        pairs = [(rank.get(name), want.get(name)) for rank in ranks]
        errors_by_rank = [_error(got, wanted, largest, missing_is_zero) for got, wanted in pairs]
        errors[name], number = max((error, number) for number, error in enumerate(errors_by_rank))
        if not errors[name] <= tolerance.limit:
            size = f"is off by {errors[name]:.2g}" if math.isfinite(errors[name]) else "cannot be right"
            got = [rank.get(name) for rank in ranks]
            agree = "" if all(_error(x, got[0], 0.0, False) <= 1e-9 for x in got) else "; ranks disagree"
            text = f"{size} on rank {number}{_shapes(*pairs[number])}{agree} (allowed {tolerance.limit:g})"
            findings.append(Finding(check, "error", name, f"{what} {text}"))
    return findings, errors


def _error(got: torch.Tensor | None, want: torch.Tensor | None, largest: float, missing_is_zero: bool) -> float:
    present = got if got is not None else want
    if present is None:
        return 0.0
    if (got is None or want is None) and not missing_is_zero:
        return float("inf")
    got = torch.zeros_like(present) if got is None else got
    want = torch.zeros_like(present) if want is None else want
    return error_of(got, want, largest)


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def largest_of(tensor: torch.Tensor) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    values = _comparable(tensor).abs()
    if values.numel() and math.isfinite(top := float(values.max())):
        return top
    values = values[torch.isfinite(values)]
    return float(values.max()) if values.numel() else 0.0


def _shapes(got: torch.Tensor | None, want: torch.Tensor | None) -> str:
    if got is None:
        return ", which has none"
    if want is None:
        return ", the unsharded model has none"
    return "" if got.shape == want.shape else f", shape {list(got.shape)} instead of {list(want.shape)}"


# Measure what blocks move between simulated ranks, collective by collective, forward and backward.
#
# In forward the block of a collective is known. In backward it runs in the node of the autograd graph that some call
# of the block created, whenever the engine reaches it: so after each block has run, the nodes between its outputs and
# its inputs are marked as its own. Reductions of parameters' gradients are no traffic of tokens and do not count.


_CHAIN = 8  # most nodes from a sum to the parameter whose gradient it is

Measured = dict[str, dict[str, dict[str, tuple[int, int]]]]  # block -> direction -> kind -> number, bytes a token


def measured_traffic(subject: Any, blocks: Iterable[str]) -> Measured:
    """Run one call and its backward on this rank; return the collectives of each block."""
    inputs = next(iter(subject.feeds.values()))
    done = applied(subject.model)
    recorder = _Recorder(1 if done is None else done.tp_size)
    modules = dict(subject.model.named_modules())
    subject.model.zero_grad(set_to_none=True)
    with recorder.watching({name: modules[name] for name in blocks if name in modules}):
        with listening(partial(recorder.note, "forward")):
            result = subject.forward(inputs)
        loss = weighted_sum(tensors_in(result))
        if loss is not None:
            with listening(partial(recorder.note, "backward")):
                subject.backward(loss)
    subject.model.zero_grad(set_to_none=True)
    return recorder.found


def against_the_least(measured: Mapping[str, Any], planned: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Return the measured traffic of each block with the bound of its plan. Equal blocks are listed once."""
    traffic_of: dict[str, Traffic] = {}
    for block, moves in measured.items():
        plan = next((traffic for traffic in planned if matches(traffic.block, block)), None)
        if plan is not None:
            moved = replace(plan, forward=moves["forward"], backward=moves["backward"])
            first = traffic_of.setdefault(plan.block, moved)
            if first != moved:
                traffic_of[block] = replace(moved, block=block)
    return tuple(traffic_of.values())


def _tokens(values: Any, ranks: int) -> int:
    """Return the number of tokens in the stream that a block takes in, as `analyse/moved.py` counts them."""
    stream = next((x for _, x in flatten_tensors(values) if x.is_floating_point() and x.dim() > 1), None)
    if stream is None:
        return 1
    return stream.numel() // stream.shape[-1] * (ranks if is_shard(stream) else 1)


class _Recorder:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.tokens: dict[str, int] = {}
        self.found: Measured = {}
        self.block = ""
        self.seen: set[Any] = set()
        self.sums: dict[tuple[str, str, str], list[int]] = {}

    def note(self, direction: str, kind: str, size: int) -> None:
        if self.block:
            total = self.sums.setdefault((self.block, direction, kind), [0, 0])
            total[0] += 1
            total[1] += size * (2 if kind == Collective.ALL_REDUCE else 1)
            self.found[self.block][direction][kind] = (total[0], total[1] // self.tokens[self.block])

    @contextmanager
    def watching(self, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Record which block is running, and which nodes it creates, while the model runs."""
        with ExitStack() as hooks:
            for name, module in blocks.items():
                enter, leave = partial(self._enter, name), partial(self._leave, name)
                hooks.enter_context(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(leave))
            yield

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.block = name
        self.found.setdefault(name, {"forward": {}, "backward": {}})
        self.tokens.setdefault(name, _tokens((args, kwargs), self.ranks))
        self.seen.update(self._new_nodes((args, kwargs)))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.block = ""
        nodes = self._new_nodes(output)
        for node in nodes:
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                self._claim(node, name, nodes)
        self.seen.update(nodes)

    def _claim(self, node: Any, name: str, nodes: set[Any]) -> None:
        """Count what the node's backward does as the block's."""
        above = {other for other, _ in node.next_functions if other is not None}
        starts = deals_out(node) and not above & nodes  # the beginning of the stream
        if starts or _is_parameters(node, nodes):
            return
        node.register_prehook(lambda gradients: setattr(self, "block", name))
        node.register_hook(lambda *gradients: setattr(self, "block", ""))

    def _new_nodes(self, values: Any) -> set[Any]:
        """Return the nodes from which values come, up to those already known."""
        waiting = [tensor.grad_fn for _, tensor in flatten_tensors(values) if tensor.grad_fn is not None]
        nodes: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node not in nodes and node not in self.seen:
                nodes.add(node)
                waiting += [above for above, _ in node.next_functions if above is not None]
        return nodes


def _is_parameters(node: Any, nodes: set[Any]) -> bool:
    """Return whether the node's gradient reaches a parameter and nothing else, through nodes of the block alone."""
    for _ in range(_CHAIN):
        above = [other for other, _ in node.next_functions if other is not None]
        if len(above) == 1 and type(above[0]).__name__ == "AccumulateGrad":
            return True
        if len(above) != 1 or above[0] not in nodes:
            return False
        node = above[0]
    return False

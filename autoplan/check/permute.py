"""The permutation law: reorder the units of a split axis everywhere at once, and nothing changes.

If heads (or MLP features, experts, groups) are what analysis says they are, then permuting them in every parameter that
has them must leave the model's outputs unchanged. An axis that passes is located correctly in the weights: a row too
many, a forgotten parameter or a packed segment in the wrong order would show. One more forward pass in one process
proves all axes at once; only if it fails are they tried one by one, to name the culprit.

The law cannot test axes whose positions mean something: rows of a table that is indexed by number, and axes along which
the model makes different constants (the slopes of ALiBi) or draws random numbers. Those are left to the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoplan.analyse.infer import Axes
from autoplan.analyse.splits.model_ends import gathered_leaves
from autoplan.axes.events import Event
from autoplan.axes.terms import Term, factors, find, leaves, segments
from autoplan.capture.called import call
from autoplan.capture.copies import copied
from autoplan.capture.dry_run import own
from autoplan.check.ranks.common import one_compute_thread
from autoplan.check.verify.compare import error_of, largest_of, tolerance_for
from autoplan.check.verify.subject import tensors_in
from autoplan.common.random_values import untouched_randomness, working_dtype
from autoplan.values import Trace

_POSITIONS_MATTER = {
    Event.EMBED_INDEX: "its rows are looked up by index",
    Event.INDEX_W: "its rows are looked up by index",
    Event.EXPERTS: "tokens choose among its units by index",
    Event.CREATED: "the model creates values that vary along it",
    Event.CONST: "the model has constants that vary along it",
}
_DRAWN = "the model draws random numbers along it"
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


@dataclass
class Permuted:
    """Axes by outcome: the error of each that failed, the reason of each that was left out."""

    passed: list[Term] = field(default_factory=list)
    failed: dict[Term, float] = field(default_factory=dict)
    left_out: dict[Term, str] = field(default_factory=dict)


def check_permutations(
    model: nn.Module, feeds: Mapping[str, Mapping[str, Any]], trace: Trace, axes: Axes, split: Iterable[Term]
) -> Permuted:
    """Try every split axis on `model`, whose trace this is. Its parameters are restored."""
    outcome = Permuted()
    tried: list[Term] = []
    gathered = gathered_leaves(trace, axes, every=True)
    masked = {find(part) for _, terms in axes.taken.values() for term in terms for part in leaves(term)}
    for axis in dict.fromkeys(find(term) for term in split):
        reason = next((text for event, text in _POSITIONS_MATTER.items() if event in axis.events), "")
        reason = reason or ("its values are gathered in the weight's order" if axis in gathered else "")
        reason = reason or ("a mask has its units in order" if axis in masked else "")
        if reason or axis.size < 2:
            outcome.left_out[axis] = reason or "it has only one unit"
        else:
            tried.append(axis)
    if not tried:
        return outcome
    dtype = working_dtype(model)
    limit = _TOLERANCE.get(dtype, tolerance_for(dtype).limit)
    law = _Law(model, feeds, trace, axes)
    if law.draws:  # random numbers drawn for a unit do not move with it
        outcome.left_out |= {axis: _DRAWN for axis in tried if Event.RANDOM in axis.events}
        tried = [axis for axis in tried if axis not in outcome.left_out]
    if law.error(tried) <= limit:
        outcome.passed = tried
        return outcome
    errors = {axis: law.error([axis]) for axis in tried}
    outcome.passed = [axis for axis, error in errors.items() if error <= limit]
    outcome.failed = {axis: error for axis, error in errors.items() if not error <= limit}
    return outcome


class _Law:
    """One model, its unchanged outputs, and its outputs under permutations."""

    def __init__(self, model: nn.Module, feeds: Mapping[str, Any], trace: Trace, axes: Axes) -> None:
        self.model, self.feeds, self.trace, self.axes = model, feeds, trace, axes
        self.known = {tensor for op in trace.ops for tensor in op.results}
        self.draws = False
        self.outputs = self._run()

    def error(self, permuted: list[Term]) -> float:
        """Return the largest change of any output when the units of these axes are permuted."""
        # A fixed permutation of each axis that moves every unit: a rotation, for each axis by another step
        steps = {axis: 1 + number % (axis.size - 1) for number, axis in enumerate(permuted)}
        orders = {axis: [(unit + step) % axis.size for unit in range(axis.size)] for axis, step in steps.items()}
        with _parameters_permuted(self.model, self.trace, self.axes, orders):
            permuted_outputs = self._run()
        worst = 0.0
        for name, before in self.outputs.items():
            after, number = permuted_outputs[name], self._number(*name, before)
            # The model's own loss, which knows columns of logits by number, is left to the ranks.
            if number is not None and (self.trace.tensors[number].kind == "activation" and number not in self.known):
                continue
            for dim, term in enumerate(() if number is None else self.axes.of(number)):
                rows = permuted_indices(term, orders.get)
                if rows is not None:  # the axis is in the output, which must be permuted in the same way
                    before = before.index_select(dim, torch.tensor(rows))
            worst = max(worst, error_of(after, before, largest_of(before)))
        return worst

    def _run(self) -> dict[tuple[str, str], torch.Tensor]:
        results: dict[tuple[str, str], torch.Tensor] = {}
        with torch.no_grad(), one_compute_thread(), untouched_randomness(0):
            before = torch.get_rng_state()
            for feed, inputs in self.feeds.items():
                outputs = tensors_in(call(copied(self.model), own(dict(inputs))))  # a copy: runs may cache tables
                results.update({(feed, name): tensor.detach() for name, tensor in outputs.items()})
            self.draws |= not torch.equal(before, torch.get_rng_state())
        return results

    def _number(self, feed: str, path: str, tensor: torch.Tensor) -> int | None:
        """Return the tensor of the trace that an output is, from its feed's visit of the model or submodule."""
        visits = [visit for visit in self.trace.visits if visit.parent is None]
        visit = visits[list(self.feeds).index(feed)]
        for place, number in visit.outputs:
            if ".".join(map(str, place)) in (path, "") and self.trace.tensors[number].shape == tuple(tensor.shape):
                return number
        return None


def permuted_indices(term: Term, order_of: Callable[[Term], list[int] | None]) -> list[int] | None:
    """Return the source of each position of a dim when axes inside it are permuted; None if nothing moves.

    A product of 2 and 3 with the 2 swapped reads 3 4 5 0 1 2.
    """
    moves = any(order_of(find(leaf)) is not None for leaf in leaves(term))
    return _indices(find(term), order_of) if moves else None


def _indices(term: Term, order_of: Callable[[Term], list[int] | None]) -> list[int]:
    if term.kind == "product":
        rows = [0]
        for part in factors(term):
            inner = _indices(part, order_of)
            rows = [row * part.size + index for row in rows for index in inner]
        return rows
    if term.kind == "concatenation":
        indices: list[int] = []
        for part in segments(term):
            indices += [len(indices) + index for index in _indices(part, order_of)]
        return indices
    return order_of(term) or list(range(term.size))


@contextmanager
def _parameters_permuted(
    model: nn.Module, trace: Trace, axes: Axes, orders: Mapping[Term, list[int]]
) -> Iterator[None]:
    """Permute these axes in every parameter and buffer for the duration of the context."""
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for number, info in enumerate(trace.tensors):
            if info.kind not in ("parameter", "buffer") or not info.names:
                continue
            tensor = state[info.names[0]]
            moved = tensor
            for dim, term in enumerate(axes.of(number)):
                rows = permuted_indices(term, orders.get)
                if rows is not None:
                    moved = moved.index_select(dim, torch.tensor(rows, device=tensor.device))
            if moved is not tensor:
                before.append((tensor, tensor.clone()))
                tensor.copy_(moved)
        try:
            yield
        finally:
            for tensor, values in before:
                tensor.copy_(values)

"""The least that ranks must tell each other for a given split: a bound that no placement of sums can undercut.

Sums are put off for as long as they can be. A partial sum stays one through all that is linear in it, additions of
whole values too, and is summed when something else reads it: sums that have been added to each other by then are one
sum, of the smallest value that it was on the way. Backward the same holds for partial gradients. Every call passes
them up, until one needs the whole gradient: a sum over ranks (whose backward hands it to every rank), or a matrix that
every rank holds, whose own gradient would be partial.

A residual block so needs one sum for each region that the next one depends on, whatever its modules look like.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from autoplan.analyse.placement.call_instructions import lengths_in, row_bias_of
from autoplan.analyse.placement.callflow import CallFlow
from autoplan.analyse.placement.delayed_sums import adds, is_linear
from autoplan.analyse.shards import Shards
from autoplan.analyse.splits.special import thin_matrix
from autoplan.ops import call_record

_WHOLE = 0.999


@dataclass(frozen=True)
class Payment:
    """One value that ranks must sum (or gather). `calls` need it: those that sum, or those that read a part of it."""

    backward: bool
    calls: frozenset[int]
    elements: int
    gathered: bool = False  # half of what a sum costs


def least_payments(shards: Shards, flow: CallFlow, reductions: Mapping[int, str]) -> tuple[Payment, ...]:
    """All sums that the split needs, forward and backward."""
    forward = _Forward(shards, flow, reductions)
    paid = tuple(forward.run())
    return (*paid, *_Backward(shards, flow, reductions, forward.factors(paid)).run())


class _Ledger:
    """What of each value is still partial, and what has been summed.

    The gradient of a product goes to both its factors, and each gets a part of a partial gradient. Where the parts meet
    again (in a norm) one sum serves all of it, and before they part too; else each part is summed by itself.
    """

    def __init__(self) -> None:
        self.shares: dict[int, dict[int, float]] = {}  # value -> partial sum -> the part of it that the value has
        self.calls: list[int] = []  # partial sum -> the call that made it
        self.paid: set[int] = set()
        self.smallest: dict[
            frozenset[int], int
        ] = {}  # partial sums -> the fewest elements of a value that has all of them
        self.in_parts: dict[frozenset[int], int] = {}  # partial sums -> the elements summed for parts of them

    def new(self, call: int) -> dict[int, float]:
        self.calls.append(call)
        return {len(self.calls) - 1: 1.0}

    def of(self, tensor: int) -> dict[int, float]:
        return {partial: share for partial, share in self.shares.get(tensor, {}).items() if partial not in self.paid}

    def add(self, tensor: int, partials: Mapping[int, float], part: float = 1.0) -> None:
        known = self.shares.setdefault(tensor, {})
        for partial, share in partials.items():
            known[partial] = min(1.0, known.get(partial, 0.0) + share * part)

    def size(self, tensor: int, elements: int) -> None:
        partials = self.of(tensor)
        if all(share > _WHOLE for share in partials.values()):
            key = frozenset(partials)
            self.smallest[key] = min(elements, self.smallest.get(key, elements))

    def pay(self, tensor: int, elements: int, backward: bool) -> Iterator[Payment]:
        partials = self.of(tensor)
        key = frozenset(partials)
        least = self.smallest.get(key, elements)
        if not partials:
            return
        if all(share > _WHOLE for share in partials.values()):
            self.paid |= key
        else:  # no more for all the parts than for the whole
            least = min(elements, self.smallest.get(key, elements) - self.in_parts.get(key, 0))
            self.in_parts[key] = self.in_parts.get(key, 0) + least
        if least > 0:
            yield Payment(backward, frozenset(self.calls[partial] for partial in partials), least)


class _Walk:
    def __init__(self, shards: Shards, flow: CallFlow, reductions: Mapping[int, str]) -> None:
        self.shards, self.flow, self.reductions, self.trace = shards, flow, reductions, shards.trace
        self.ledger = _Ledger()

    def elements(self, tensor: int) -> int:
        return prod(self.trace.tensors[tensor].shape)

    def _statistics(self, index: int) -> int:
        """How many numbers a norm over split features sums: one or two a row."""
        made, call = self.flow.outputs[index][0], self.trace.calls[index]
        return self.elements(made) // self.trace.tensors[made].shape[-1] * call_record(call.name).statistics

    def has_whole_matrix(self, index: int) -> bool:
        inputs = self.flow.inputs[index]
        kinds = (self.trace.tensors[t] for t in inputs if not self.shards.is_split(t))
        return any(info.kind == "parameter" and len(info.shape) > 1 for info in kinds)


class _Forward(_Walk):
    def __init__(self, shards: Shards, flow: CallFlow, reductions: Mapping[int, str]) -> None:
        super().__init__(shards, flow, reductions)
        self.passed: dict[
            int, tuple[int, frozenset[int]]
        ] = {}  # call -> the partial sum that passes it, the calls that made it

    def run(self) -> Iterator[Payment]:
        for index in range(len(self.trace.calls)):
            if not self.flow.is_identity(index):
                yield from self._call(index)
        for tensor in sorted(self.flow.final):
            yield from self.ledger.pay(tensor, self.elements(tensor), backward=False)

    def _call(self, index: int) -> Iterator[Payment]:
        kind, outputs = self.reductions.get(index), self.flow.outputs[index]
        partial_inputs = [t for t in self.flow.inputs[index] if self.ledger.of(t)]
        partials = {partial: share for t in partial_inputs for partial, share in self.ledger.of(t).items()}
        if partial_inputs and self._passes(index, partial_inputs):
            self.passed[index] = partial_inputs[0], frozenset(self.ledger.calls[partial] for partial in partials)
        elif partial_inputs:
            for tensor in partial_inputs:
                yield from self.ledger.pay(tensor, self.elements(tensor), backward=False)
            partials = {}
        if kind in ("sum", "mean", "embedding", "row"):
            partials = self.ledger.new(index)
        elif kind == "gather":
            yield Payment(False, frozenset({index}), self.elements(outputs[0]), gathered=True)
        elif kind == "norm":
            yield Payment(False, frozenset({index}), self._statistics(index))
        elif kind == "length":
            yield Payment(False, frozenset({index}), lengths_in(self.trace.calls[index], self.shards))
        elif kind == "variance":
            elements = self.elements(outputs[0]) * variance_numbers(self.shards.tp)
            yield Payment(False, frozenset({index}), elements, gathered=True)
        for tensor in outputs if partials else ():
            self.ledger.shares[tensor] = partials
            self.ledger.size(tensor, self.elements(tensor))

    def factors(self, paid: Iterable[Payment]) -> dict[int, set[int]]:
        """What sums were multiplied with while they were put off, where that was worth it. Each rank then knows only a
        part of the factor's gradient: that is a partial gradient which an earlier sum would not have left."""
        factors: dict[int, set[int]] = {}
        for index, (tensor, partials) in self.passed.items():
            later = next((p for p in paid if partials <= p.calls), None)
            if later is not None and (later.elements < self.elements(tensor) or later.calls != partials):
                factors[index] = set(self.flow.inputs[index]) - {tensor}
        return factors

    def _passes(self, index: int, partial_inputs: list[int]) -> bool:
        """Is the result a partial sum, too?"""
        call = self.trace.calls[index]
        if index in self.reductions or len(self.flow.outputs[index]) != 1:
            return False
        thin = thin_matrix(index, self.flow, self.shards) is not None
        return adds(call) or (len(partial_inputs) == 1 and (thin or is_linear(call, partial_inputs[0])))


class _Backward(_Walk):
    def __init__(
        self, shards: Shards, flow: CallFlow, reductions: Mapping[int, str], factors: Mapping[int, set[int]]
    ) -> None:
        super().__init__(shards, flow, reductions)
        self.factors = factors
        self.weights = {i for i, info in enumerate(self.trace.tensors) if info.kind == "parameter"}
        for index, outputs in enumerate(flow.outputs):  # and what is made of parameters alone
            if flow.inputs[index] and self.weights.issuperset(flow.inputs[index]):
                self.weights.update(outputs)

    def run(self) -> Iterator[Payment]:
        reached = self.flow.with_gradients()
        for index in reversed(range(len(self.trace.calls))):
            used = any(t in reached for t in self.flow.outputs[index])
            if used and self.flow.passes_gradients(index) and not self.flow.is_identity(index):
                yield from self._call(index)

    def _call(self, index: int) -> Iterator[Payment]:
        kind = self.reductions.get(index)
        outputs = [t for t in self.flow.outputs[index] if t in self.flow.carries]
        for tensor in outputs:
            self.ledger.size(tensor, self.elements(tensor))
        if kind == "norm":
            yield Payment(True, frozenset({index}), self._statistics(index))
        if kind == "length" and call_record(self.trace.calls[index].name).divides:
            yield Payment(True, frozenset({index}), lengths_in(self.trace.calls[index], self.shards))
        if kind is not None or (self.has_whole_matrix(index) and not self._is_branch(index)):
            for tensor in outputs:
                yield from self.ledger.pay(tensor, self.elements(tensor), backward=True)
        edges = self._edges(index)
        above = [t for t in self.flow.inputs[index] if t in self.flow.carries and self.shards.has_whole_part(t)]
        for tensor in above:
            if tensor in edges:
                self.ledger.add(tensor, self.ledger.new(index))
        self._pass_up(index, outputs, [t for t in above if t not in edges and t not in outputs])

    def _pass_up(self, index: int, outputs: list[int], above: list[int]) -> None:
        """Partial gradients go up: all of them to each term of a sum, a part to each factor of a product."""
        partials: dict[int, float] = {}
        for tensor in outputs:
            for partial, share in self.ledger.of(tensor).items():
                partials[partial] = partials.get(partial, 0.0) + share
        ways, apart = [t for t in above if t not in self.weights], 1
        if adds(self.trace.calls[index]):  # a term that is spread over a dim gets less than the whole gradient
            largest = max(map(self.elements, ways), default=0)
            ways = [t for t in ways if self.elements(t) == largest]
        else:
            apart = max(len(ways), 1)
        for tensor in ways:
            self.ledger.add(tensor, partials, 1.0 / apart)

    def _is_branch(self, index: int) -> bool:
        """A thin matrix (an adapter's first) whose readers are linear: its gradient is summed instead, once a step."""
        if thin_matrix(index, self.flow, self.shards) is None:
            return False
        uses = self.flow.gradient_uses(self.flow.outputs[index][0])
        return bool(uses) and all(call_record(self.trace.calls[use].name).is_layer for use in uses)

    def _edges(self, index: int) -> set[int]:
        """The whole values of which each rank computes only a part of the gradient here."""
        reduction = self.reductions.get(index)
        if not reduction and not any(map(self.shards.is_split, self.flow.outputs[index])):
            is_sum = adds(self.trace.calls[index])
            return set() if is_sum else {t for t in self.factors.get(index, ()) if not self.shards.is_split(t)}
        bias = row_bias_of(self.trace.calls[index], reduction)
        return {t for t in self.flow.inputs[index] if not self.shards.is_split(t) and t != bias}


def variance_numbers(tp: int) -> int:
    """How many numbers are gathered for each variance: the mean and the variance of every rank's shard."""
    return 2 * tp

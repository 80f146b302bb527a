"""The least that ranks must tell each other for a given split: a bound that no placement of sums can undercut.

Sums are put off for as long as they can be. A partial sum stays one through all that is linear in it, additions of
whole values too, and is paid for when something else reads it: sums that have been added to each other by then are one
payment, of the smallest value that it was on the way. Backward the same holds for partial gradients. Every call passes
them up, until one needs the whole gradient: a sum over ranks (whose backward hands it to every rank), or a matrix that
every rank holds, whose own gradient would be partial.

A residual block so owes one payment for each region that the next one depends on, whatever its modules look like.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from autoplan.analyse.placement.callflow import CallFlow
from autoplan.analyse.placement.deferred_sums import adds, is_linear
from autoplan.analyse.placement.reductions import lengths_in, row_bias_of
from autoplan.analyse.shards import Shards
from autoplan.analyse.splits.low_rank import thin_matrix
from autoplan.ops import call_record

__all__ = ["Payment", "least_payments", "spread_numbers"]

_WHOLE = 0.999


@dataclass(frozen=True)
class Payment:
    """One value that ranks must sum (or gather). `calls` owe it: those that sum, or those that read a part of it."""

    backward: bool
    calls: frozenset[int]
    elements: int
    gathered: bool = False  # half of what a sum costs


def least_payments(shards: Shards, flow: CallFlow, reductions: Mapping[int, str]) -> tuple[Payment, ...]:
    """All payments that the split owes, forward and backward."""
    forward = _Forward(shards, flow, reductions)
    paid = tuple(forward.run())
    return (*paid, *_Backward(shards, flow, reductions, forward.factors(paid)).run())


class _Ledger:
    """What values owe, and what has been paid.

    The gradient of a product goes to both its factors, and each gets a part of a debt. Where the parts meet again (in a
    norm) one payment serves all of it, and before they part too; where they do not, each part is paid by itself.
    """

    def __init__(self) -> None:
        self.shares: dict[int, dict[int, float]] = {}  # value -> debt -> the part of it that the value has
        self.calls: list[int] = []  # debt -> the call that owes it
        self.paid: set[int] = set()
        self.smallest: dict[frozenset[int], int] = {}  # whole debts -> the fewest elements of a value that has them
        self.in_parts: dict[frozenset[int], int] = {}  # debts -> what was paid for parts of them

    def new(self, call: int) -> dict[int, float]:
        self.calls.append(call)
        return {len(self.calls) - 1: 1.0}

    def of(self, tensor: int) -> dict[int, float]:
        return {debt: share for debt, share in self.shares.get(tensor, {}).items() if debt not in self.paid}

    def owe(self, tensor: int, debts: Mapping[int, float], part: float = 1.0) -> None:
        known = self.shares.setdefault(tensor, {})
        for debt, share in debts.items():
            known[debt] = min(1.0, known.get(debt, 0.0) + share * part)

    def size(self, tensor: int, elements: int) -> None:
        owed = self.of(tensor)
        if all(share > _WHOLE for share in owed.values()):
            key = frozenset(owed)
            self.smallest[key] = min(elements, self.smallest.get(key, elements))

    def pay(self, tensor: int, elements: int, backward: bool) -> Iterator[Payment]:
        owed = self.of(tensor)
        key = frozenset(owed)
        least = self.smallest.get(key, elements)
        if not owed:
            return
        if all(share > _WHOLE for share in owed.values()):
            self.paid |= key
        else:  # no more for all the parts than for the whole
            least = min(elements, self.smallest.get(key, elements) - self.in_parts.get(key, 0))
            self.in_parts[key] = self.in_parts.get(key, 0) + least
        if least > 0:
            yield Payment(backward, frozenset(self.calls[debt] for debt in owed), least)


class _Walk:
    def __init__(self, shards: Shards, flow: CallFlow, reductions: Mapping[int, str]) -> None:
        self.shards, self.flow, self.reductions, self.trace = shards, flow, reductions, shards.trace
        self.ledger = _Ledger()

    def elements(self, tensor: int) -> int:
        return prod(self.trace.tensors[tensor].shape)

    def has_whole_matrix(self, index: int) -> bool:
        inputs = self.flow.inputs[index]
        kinds = (self.trace.tensors[t] for t in inputs if not self.shards.is_split(t))
        return any(info.kind == "parameter" and len(info.shape) > 1 for info in kinds)


class _Forward(_Walk):
    def __init__(self, shards: Shards, flow: CallFlow, reductions: Mapping[int, str]) -> None:
        super().__init__(shards, flow, reductions)
        self.passed: dict[int, tuple[int, frozenset[int]]] = {}  # call -> the partial sum that passes it, what it owes

    def run(self) -> Iterator[Payment]:
        for index in range(len(self.trace.calls)):
            if not self.flow.is_identity(index):
                yield from self._call(index)
        for tensor in sorted(self.flow.final):
            yield from self.ledger.pay(tensor, self.elements(tensor), backward=False)

    def _call(self, index: int) -> Iterator[Payment]:
        kind, outputs = self.reductions.get(index), self.flow.outputs[index]
        owing = [t for t in self.flow.inputs[index] if self.ledger.of(t)]
        owed = {debt: share for t in owing for debt, share in self.ledger.of(t).items()}
        if owing and self._passes(index, owing):
            self.passed[index] = owing[0], frozenset(self.ledger.calls[debt] for debt in owed)
        elif owing:
            for tensor in owing:
                yield from self.ledger.pay(tensor, self.elements(tensor), backward=False)
            owed = {}
        if kind in ("sum", "mean", "embedding", "row"):
            owed = self.ledger.new(index)
        elif kind == "gather":
            yield Payment(False, frozenset({index}), self.elements(outputs[0]), gathered=True)
        elif kind == "norm":
            yield Payment(False, frozenset({index}), _statistics(self.trace.calls[index].name, self._rows(index)))
        elif kind == "length":
            yield Payment(False, frozenset({index}), lengths_in(self.trace.calls[index], self.trace)[1])
        elif kind == "spread":
            elements = self.elements(outputs[0]) * spread_numbers(self.shards.tp)
            yield Payment(False, frozenset({index}), elements, gathered=True)
        for tensor in outputs if owed else ():
            self.ledger.shares[tensor] = owed
            self.ledger.size(tensor, self.elements(tensor))

    def factors(self, paid: Iterable[Payment]) -> dict[int, set[int]]:
        """What sums were multiplied with while they were put off, where that was worth it.

        Each rank then knows only a part of the factor's gradient: a debt that paying at once would not have left.
        """
        found: dict[int, set[int]] = {}
        for index, (tensor, owed) in self.passed.items():
            later = next((p for p in paid if owed <= p.calls), None)
            if later is not None and (later.elements < self.elements(tensor) or later.calls != owed):
                found[index] = set(self.flow.inputs[index]) - {tensor}
        return found

    def _passes(self, index: int, owing: list[int]) -> bool:
        """Is the result a partial sum, too?"""
        call = self.trace.calls[index]
        if index in self.reductions or len(self.flow.outputs[index]) != 1:
            return False
        thin = thin_matrix(index, self.flow, self.shards) is not None
        return adds(call) or (len(owing) == 1 and (thin or is_linear(call, owing[0])))

    def _rows(self, index: int) -> int:
        return self.elements(self.flow.outputs[index][0]) // self.trace.tensors[self.flow.outputs[index][0]].shape[-1]


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
            rows = self.elements(outputs[0]) // self.trace.tensors[outputs[0]].shape[-1]
            yield Payment(True, frozenset({index}), _statistics(self.trace.calls[index].name, rows))
        if kind == "length" and call_record(self.trace.calls[index].name).divides:
            yield Payment(True, frozenset({index}), lengths_in(self.trace.calls[index], self.trace)[1])
        if kind is not None or (self.has_whole_matrix(index) and not self._is_branch(index)):
            for tensor in outputs:
                yield from self.ledger.pay(tensor, self.elements(tensor), backward=True)
        edges = self._edges(index)
        above = [t for t in self.flow.inputs[index] if t in self.flow.carries and self.shards.has_whole_part(t)]
        for tensor in above:
            if tensor in edges:
                self.ledger.owe(tensor, self.ledger.new(index))
        self._pass_up(index, outputs, [t for t in above if t not in edges and t not in outputs])

    def _pass_up(self, index: int, outputs: list[int], above: list[int]) -> None:
        """Debts go up: all of them to each term of a sum, a part to each factor of a product."""
        owed: dict[int, float] = {}
        for tensor in outputs:
            for debt, share in self.ledger.of(tensor).items():
                owed[debt] = owed.get(debt, 0.0) + share
        ways, apart = [t for t in above if t not in self.weights], 1
        if adds(self.trace.calls[index]):  # a term that is spread over a dim gets less than the whole gradient
            largest = max(map(self.elements, ways), default=0)
            ways = [t for t in ways if self.elements(t) == largest]
        else:
            apart = max(len(ways), 1)
        for tensor in ways:
            self.ledger.owe(tensor, owed, 1.0 / apart)

    def _is_branch(self, index: int) -> bool:
        """A thin matrix (an adapter's first) whose readers are linear: its gradient is summed instead, once a step."""
        if thin_matrix(index, self.flow, self.shards) is None:
            return False
        uses = self.flow.gradient_uses(self.flow.outputs[index][0])
        return bool(uses) and all(self.trace.calls[use].name == "linear" for use in uses)

    def _edges(self, index: int) -> set[int]:
        """The whole values of which each rank computes only a part of the gradient here."""
        reduction = self.reductions.get(index)
        if not reduction and not any(map(self.shards.is_split, self.flow.outputs[index])):
            is_sum = adds(self.trace.calls[index])
            return set() if is_sum else {t for t in self.factors.get(index, ()) if not self.shards.is_split(t)}
        bias = row_bias_of(self.trace.calls[index], reduction)
        return {t for t in self.flow.inputs[index] if not self.shards.is_split(t) and t != bias}


def _statistics(name: str, rows: int) -> int:
    """A norm over split features sums one number a row, a layer norm two."""
    return rows * (2 if "layer_norm" in name else 1)


def spread_numbers(tp: int) -> int:
    """How many numbers are gathered for each variance: the mean and the spread of every rank's share."""
    return 2 * tp

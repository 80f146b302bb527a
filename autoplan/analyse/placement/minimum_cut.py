"""Find the minimum that ranks must sum for a given split, as minimum cuts over the calls of a trace.

A value is in one of three states, which cover its gradient too: partial with a full gradient, full with a full
gradient, full with a partial gradient. From where it is made to where it is read it can only step down this list, and
each step is one sum over ranks, forward or backward; a full gradient can be divided for free. The states in which a
call can run follow from its record: its sums leave parts, what enters a split region gets a partial gradient, linear
calls pass parts on, and most calls pass gradients up as they come.

Three states in a row are two yes/no questions at each place (is the value a part? is its gradient full?), and all of
the above are prices and implications between two answers. So this is a minimum cut: exact, in integers, and the same on
every machine, since of all cheapest answers those with the fewest "yes" are taken.

One rule is no such implication: what multiplies a part gets a part of its gradient. A first cut leaves that out; a
second one takes from it which products multiply parts. If it is cheaper to sum before all of them, that is the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TypeAlias

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

from autoplan.analyse.infer import Shards
from autoplan.analyse.placement.call_instructions import row_bias_of
from autoplan.analyse.placement.callflow import CallFlow
from autoplan.analyse.placement.delayed_sums import adds, is_linear
from autoplan.analyse.placement.inside_calls import made_of
from autoplan.analyse.splits.special import thin_matrix
from autoplan.ops.creation import fills
from autoplan.ops.records.answers import Reduction
from autoplan.values import Ref

LEAVES_PARTS = frozenset({Reduction.SUM, Reduction.MEAN, Reduction.EMBEDDING, Reduction.ROW})
ELEMENT = 1 << 20  # the price of one element; a sum costs 1 more, so of equal volumes fewer sums are taken
HARD = 1 << 90  # the price of two answers that exclude each other: more than all sums
OUTSIDE = -1  # instead of a call: the caller of the model provides a value, or reads it
NO, YES = "no", "yes"

Version: TypeAlias = tuple[int, int]  # a tensor and the call that made it, or wrote into it
Place: TypeAlias = tuple[Version, str, int]  # of a value: "made", "summed" for its readers, or "read" by a call
Node: TypeAlias = tuple[str, Place]  # the question: "part" or "whole"


@dataclass(frozen=True)
class Payment:
    """One value that ranks must sum or gather. `calls` need it: those whose parts are summed, or those that contribute
    a part of a gradient. `readers`: the calls through which these parts reach the value. `weight`: elements that move;
    an all-reduce moves each element twice."""

    backward: bool
    calls: frozenset[int]
    weight: int
    readers: frozenset[int] = frozenset()


def least_sums(shards: Shards, flow: CallFlow, reductions: Mapping[int, Reduction]) -> tuple[Payment, ...]:
    """Return all sums of the cheapest placement, assuming that every call could do them."""
    problem = CutProblem(shards, flow, reductions, flow.with_gradients() & flow.carries)
    yes = problem.cut({})
    least = tuple(problem.payments(yes))
    delayed = {index: ("part", part) in yes for index, (part, _) in problem.products.items()}
    if not any(delayed.values()):
        return least
    later = tuple(problem.payments(problem.cut(delayed)))
    if _weight(later) == _weight(least):
        return later
    return min(tuple(problem.payments(problem.cut(dict.fromkeys(delayed, False)))), later, key=_weight)


def _weight(paid: Iterable[Payment]) -> int:
    return sum(payment.weight for payment in paid)


class CutProblem:
    """A graph of questions. An edge from a to b has the price of "no" to a with "yes" to b."""

    def __init__(
        self, shards: Shards, flow: CallFlow, reductions: Mapping[int, Reduction], reached: Collection[int]
    ) -> None:
        """`reached`: the values that get a gradient."""
        self.shards, self.flow, self.reductions, self.trace = shards, flow, reductions, shards.trace
        self.reached = frozenset(reached)
        self.graph: nx.DiGraph[object] = nx.DiGraph()
        self.graph.add_nodes_from((NO, YES))
        self.partial: set[Version] = set()  # values that can be a part of a sum
        self.latest: dict[int, Version] = {}
        self.read: dict[Version, list[Place]] = {}
        self.calls: dict[int, tuple[list[Place], list[Place]]] = {}  # inputs and outputs of each
        # Calls that can multiply a part by a factor with a gradient: where they read the part, and where the factors
        self.products: dict[int, tuple[Place, list[Place]]] = {}
        # Parameters and what is computed from them alone: their gradients are summed once a step, nearly for free
        self.weights = {tensor for tensor, info in enumerate(self.trace.tensors) if info.kind == "parameter"}
        for index in range(len(self.trace.calls)):
            if not flow.is_identity(index):
                self._add_call(index)
        for tensor in sorted(flow.final):
            self.answer(NO, "part", place := self._read(tensor, OUTSIDE))
            self.answer(YES, "whole", place)
        for version, reads in self.read.items():
            if reads:
                self._add_sum(version)

    def cut(self, delayed: Mapping[int, bool]) -> set[object]:
        """Return all questions with the answer "yes". `delayed`: which products multiply a part, if that is known."""
        free = self.graph
        self.graph = free.copy()
        for index, is_delayed in delayed.items():
            part, factors = self.products[index]
            self.answer(YES if is_delayed else NO, "part", part)
            for factor in factors:
                if is_delayed:
                    self.answer(NO, "whole", factor)
                elif self._passes_gradients(index):
                    self.edge("whole", factor, self.calls[index][1][0])
                else:
                    self.answer(YES, "whole", factor)
        _, (_, yes) = nx.minimum_cut(self.graph, NO, YES, flow_func=boykov_kolmogorov)
        self.graph = free
        return set(yes)

    # Questions

    def _asked(self, question: str, place: Place) -> bool:
        """Return whether the question arises: the value could be partial; some of it is replicated, with a gradient."""
        version = place[0]
        if question == "part":
            return version in self.partial
        tensor = version[0]
        return tensor in self.reached and (not self.shards.is_split(tensor) or self.shards.is_mixed(tensor))

    def edge(self, question: str, no: Place, yes: Place, capacity: int = HARD) -> None:
        if self._asked(question, no) and self._asked(question, yes):
            self._price((question, no), (question, yes), capacity)

    def answer(self, answer: str, question: str, place: Place, price: int = HARD) -> None:
        if self._asked(question, place):
            node = question, place
            no, yes = (node, YES) if answer == YES else (NO, node)
            self._price(no, yes, price)

    def _price(self, no: object, yes: object, price: int) -> None:
        """Set the price of two answers together; the highest that is set counts."""
        self.graph.add_edge(no, yes, capacity=max(price, self.graph.get_edge_data(no, yes, {}).get("capacity", 0)))

    def alike(self, question: str, places: Iterable[Place]) -> None:
        for a, b in pairwise(place for place in places if self._asked(question, place)):
            self.edge(question, a, b)
            self.edge(question, b, a)

    # Values

    def _make(self, tensor: int, index: int, is_partial: bool) -> Place:
        version = self.latest[tensor] = tensor, index
        self.read[version] = []
        if is_partial:
            self.partial.add(version)
        place = version, "made", index
        self._whole_gradient_of_parts(place)
        return place

    def _read(self, tensor: int, index: int) -> Place:
        if tensor not in self.latest:
            self.answer(YES, "whole", self._make(tensor, OUTSIDE, False))
        version = self.latest[tensor]
        read = version, "read", index
        self.read[version].append(read)
        self._whole_gradient_of_parts(read)
        self.edge("part", (version, "made", version[1]), read)
        return read

    def _add_sum(self, version: Version) -> None:
        """Add one sum of a value, or of its gradient, for all readers: it is paid if any of them answers "no"."""
        source, served, reads = (version, "made", version[1]), self._served(version), self.read[version]
        elements = prod(self.trace.tensors[version[0]].shape)
        price = 1 if version[0] in self.weights else 2 * elements * ELEMENT + 1
        for question in ("part", "whole"):
            self.edge(question, served, source, capacity=price)
            for read in reads if len(reads) > 1 else ():
                self.edge(question, read, served)

    def _served(self, version: Version) -> Place:
        return self.read[version][0] if len(self.read[version]) == 1 else (version, "summed", version[1])

    def _whole_gradient_of_parts(self, place: Place) -> None:
        if self._asked("part", place) and self._asked("whole", place):
            self._price(("whole", place), ("part", place), HARD)

    # Calls

    def _add_call(self, index: int) -> None:
        flow, kind, call = self.flow, self.reductions.get(index), self.trace.calls[index]
        outputs = flow.outputs[index]
        reads = {tensor: self._read(tensor, index) for tensor in flow.inputs[index]}
        if reads and self.weights.issuperset(reads):
            self.weights.update(outputs)
        passing = self._passing(index, reads)
        makes = {tensor: self._make(tensor, index, bool(passing) or kind in LEAVES_PARTS) for tensor in outputs}
        self.calls[index] = [*reads.values()], [*makes.values()]
        for output in makes.values():
            if kind in LEAVES_PARTS:
                self.answer(YES, "part", output)
            for tensor in passing:  # a full value can be added to a part: one rank adds it
                self.edge("part", output, reads[tensor])
                if not adds(call):
                    self.edge("part", reads[tensor], output)
        for tensor in reads.keys() - passing:
            self.answer(NO, "part", reads[tensor])
        if call.name == "grad":  # of `torch.autograd`: gradients of what it reads must be whole where they are made
            edges = [(version, "made", version[1]) for version, _, _ in reads.values()]
            for place in (*edges, *reads.values(), *makes.values()):
                self.answer(YES, "whole", place)
            return
        if not flow.passes_gradients(index) or self.reached.isdisjoint(outputs):
            return
        if self._enters_split(index, reads, makes):
            return
        factors = [] if adds(call) or not passing else [reads[t] for t in reads.keys() - passing]
        factors = [place for place in factors if self._asked("whole", place)]
        if factors:
            self.products[index] = reads[passing[0]], factors
        others = [place for place in (*reads.values(), *makes.values()) if place not in factors]
        if self._passes_gradients(index):
            self.alike("whole", others)
            for output in makes.values():
                for factor in factors:
                    self.edge("whole", output, factor)
        else:
            for place in others:
                self.answer(YES, "whole", place)

    def _passing(self, index: int, reads: Mapping[int, Place]) -> list[int]:
        """Return the inputs that can be partial if the one result is: terms of a sum, or one factor."""
        call, tensors = self.trace.calls[index], (*reads, *self.flow.outputs[index])
        if index in self.reductions or len(self.flow.outputs[index]) != 1 or any(map(self.shards.is_split, tensors)):
            return []
        able = [tensor for tensor, place in reads.items() if place[0] in self.partial]
        if adds(call):
            return able
        thin = thin_matrix(index, self.flow, self.shards) is not None
        read = call.reads
        able = [t for t in able if read.count(t) == 1 and (is_linear(call, t) or (thin and call.args[0] == Ref(t)))]
        return sorted(able, key=lambda tensor: -prod(self.trace.tensors[tensor].shape))[:1]

    def _passes_gradients(self, index: int) -> bool:
        """Return whether the gradients of all of a call's values can be partial. Not where it multiplies by a
        replicated matrix, whose own gradient would be partial, unless that is thin enough to be summed once a step."""
        inputs = self.flow.inputs[index]
        if fills(self.trace.calls[index].name):
            return False
        if any(map(self.shards.is_mixed, (*inputs, *self.flow.outputs[index]))):
            return True
        matrix = any(self._is_matrix(t) for t in inputs if not self.shards.is_split(t))
        return not matrix or thin_matrix(index, self.flow, self.shards) is not None

    def _is_matrix(self, tensor: int) -> bool:
        return tensor in self.weights and sum(size > 1 for size in self.trace.tensors[tensor].shape) > 1

    def _enters_split(self, index: int, reads: Mapping[int, Place], makes: Mapping[int, Place]) -> bool:
        """Give replicated values that go into split results a partial gradient. Replicated rows, in split values or as
        results of their own, all have the same kind of gradient."""
        call, kind, shards = self.trace.calls[index], self.reductions.get(index), self.shards
        if not kind and not any(map(shards.is_split, makes)):
            return False
        bias, entering = row_bias_of(call, kind), False
        for tensor, place in reads.items():
            if shards.is_split(tensor) or not self._asked("whole", place):
                continue
            if tensor == bias:  # one that was computed is added after the sum
                if self.trace.tensors[tensor].kind != "parameter":
                    self.answer(YES, "whole", place)
            elif kind or all(map(shards.is_split, made_of(call, tensor, shards) & self.flow.carries)):
                self.answer(NO, "whole", place)
                entering = True
        replicated = [place for tensor, place in (*reads.items(), *makes.items()) if shards.is_mixed(tensor)]
        for place in makes.values():
            if kind:
                self.answer(YES, "whole", place)
            elif place not in replicated:
                replicated.append(place)
        self.alike("whole", replicated)
        if entering:
            for place in replicated:
                self.answer(NO, "whole", place)
        return True

    # The answer

    def payments(self, yes: set[object]) -> Iterator[Payment]:
        """Yield the sums: values whose answer where they are made differs from that of their readers."""
        for version, reads in self.read.items():
            (tensor, index), weight = version, 2 * prod(self.trace.tensors[version[0]].shape)
            source, served = (version, "made", index), self._served(version)
            if ("part", source) in yes and reads and ("part", served) not in yes:
                yield Payment(False, frozenset(self._parts(version, yes)), weight)
            if ("whole", source) in yes and reads and ("whole", served) not in yes and tensor not in self.weights:
                readers = frozenset(place[2] for place in reads if self._is_partial(place, yes))
                if calls := frozenset(self._partial(version, yes)) or readers:  # a tie: no call adds a part
                    yield Payment(True, calls, weight, readers)

    def _is_partial(self, read: Place, yes: set[object]) -> bool:
        """Return whether a call contributes a part of the gradient of what it reads."""
        return ("whole", read) not in yes and read[2] != OUTSIDE and self.flow.passes_gradients(read[2])

    def _parts(self, version: Version, yes: set[object]) -> set[int]:
        """Return the calls whose sums a value is a part of."""
        reads = self.calls[version[1]][0] if version[1] not in self.reductions else []
        above = [self._parts(place[0], yes) for place in reads if ("part", place) in yes]
        return set().union(*above) if above else {version[1]}

    def _partial(self, version: Version, yes: set[object]) -> set[int]:
        """Return the calls, downstream of a value, that make its gradient partial."""
        calls, waiting, seen = set[int](), [version], {version}
        while waiting:
            for place in self.read[waiting.pop()]:
                index = place[2]
                if not self._is_partial(place, yes):
                    continue
                versions = {place[0] for place in self.calls[index][1] if self._asked("whole", place)}
                versions = {version for version in versions if ("whole", (version, "made", index)) not in yes}
                calls |= set() if versions else {index}
                waiting += versions - seen
                seen |= versions
        return calls

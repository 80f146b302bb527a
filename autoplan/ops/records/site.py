"""The view that a dim rule gets of an op: it relates output dims to input dims and leaves events on them.

An op whose record has no rule, or whose rule returns None, is treated as opaque.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from autoplan.axes.algebra import Algebra
from autoplan.axes.events import Event
from autoplan.axes.terms import Term, factors, find, is_data, leaf, product, show
from autoplan.values import Op, Ref, TensorInfo, Trace

Dims = list[Term]
Answer = list[Dims | None] | None  # dims per output tensor; None: the rule does not apply


def told(op: Op, index: int, name: str, default: Any = None) -> Any:
    """Return an argument of an op by position, else by name, else its default."""
    return op.args[index] if index < len(op.args) else op.kwargs.get(name, default)


@dataclass
class Inference:
    """The state of axis inference while a trace is read from its first op to its last."""

    trace: Trace
    algebra: Algebra = field(default_factory=Algebra)
    dims: dict[int, Dims] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)  # weights: tensor -> the parameter it shows
    kept: dict[int, frozenset[int]] = field(default_factory=dict)  # independent of inputs: its parameters and buffers
    multiplied: set[int] = field(default_factory=set)  # those of `kept` that come from a product of matrices
    static: set[int] = field(default_factory=set)
    identities: set[int] = field(default_factory=set)  # identity matrices, whose dims are one axis
    contracted: dict[int, Term] = field(default_factory=dict)  # everything summed over
    gathered: bool = False  # the op at hand is followed by an all-gather

    def parameters_of(self, tensor: int) -> list[int]:
        """Return the parameters in a tensor made of them, buffers and constants alone, by no product of matrices."""
        if tensor in self.multiplied:
            return []
        return sorted(root for root in self.kept.get(tensor, ()) if self.trace.tensors[root].kind == "parameter")

    def terms(self, tensor: int) -> Dims:
        """Return the dims of a tensor. One that no op made gets new ones: a parameter, an input or a constant."""
        terms = self.dims.get(tensor)
        if terms is None:
            info = self.trace.tensors[tensor]
            terms = self.dims[tensor] = [leaf(size, info.kind == "input") for size in info.shape]
            if info.kind == "constant":
                for term in terms:
                    self.algebra.mark(term, Event.CONST)
        return terms


class Site:
    """One op as its rule sees it: arguments, shapes, terms, and the algebra to relate them."""

    __slots__ = ("algebra", "inputs", "op", "outputs", "state")

    def __init__(self, op: Op, state: Inference, inputs: Sequence[Ref], outputs: Sequence[Ref]) -> None:
        self.op, self.state, self.algebra = op, state, state.algebra
        self.inputs, self.outputs = inputs, outputs

    # Arguments

    def arg(self, index: int, name: str = "", default: Any = None) -> Any:
        """Return an argument by position, else by name, else its default."""
        return told(self.op, index, name, default)

    def tensor(self, index: int, name: str = "") -> Ref | None:
        """Return an argument if it is a tensor."""
        value = self.arg(index, name)
        return value if isinstance(value, Ref) else None

    def info(self, ref: Ref) -> TensorInfo:
        return self.state.trace.tensors[ref.id]

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return self.state.trace.tensors[ref.id].shape

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Return the shape of the first output."""
        return self.shape(self.outputs[0])

    def terms(self, ref: Ref) -> Dims:
        """Return the dims of a tensor, as a list that the rule may change."""
        return [find(term) for term in self.state.terms(ref.id)]

    def is_weight(self, ref: Ref | None) -> bool:
        """Return whether this is a parameter, or a view of one."""
        return ref is not None and ref.id in self.state.sources

    def is_of_weights(self, ref: Ref | None) -> bool:
        """Return whether this is a weight, or computed from weights alone (masked, scaled, standardised)."""
        return ref is not None and (ref.id in self.state.sources or bool(self.state.parameters_of(ref.id)))

    def is_parameter(self, ref: Ref) -> bool:
        """Return whether this is a parameter itself, not a view of one."""
        return self.state.sources.get(ref.id) == ref.id

    def constant_values(self, ref: Ref) -> tuple[int, ...] | None:
        """Return the elements of a small integer tensor that is the same in every run."""
        fixed = ref.id in self.state.static or self.info(ref).kind in ("buffer", "constant")
        return self.info(ref).values if fixed else None

    # Relations and events

    def mark(self, term: Term, event: Event) -> None:
        self.algebra.mark(term, event)

    def unify(self, left: Term, right: Term) -> None:
        self.algebra.unify(left, right)

    def fresh(self, size: int, event: Event | None = None, data: bool = False) -> Term:
        """Return a new axis, with an event if positions along it already have a meaning."""
        term = leaf(size, data)
        if event:
            self.algebra.mark(term, event)
        return term

    def replaced(self, old: Sequence[Term], size: int, event: Event) -> Term:
        """Return a new axis instead of others whose link cannot be kept: both sides are marked; input stays input."""
        for term in old:
            self.algebra.mark(term, event)
        return self.fresh(size, event, data=bool(old) and all(is_data(term) for term in old))

    def contract(self, term: Term, event: Event) -> None:
        """Record that the op sums over this term (or takes a norm, which is a sum of squares)."""
        self.mark(term, event)
        term = find(term)
        if term.parts:
            self.state.contracted[term.id] = term

    def from_weight(self, term: Term) -> Term:
        """Return an output dim that comes from a weight; after an all-gather it no longer depends on its axis."""
        return self.fresh(term.size, Event.GATHERED) if self.state.gathered else term

    def unify_equal_sizes(self, left: Sequence[Term], right: Sequence[Term], skip: int = -1) -> None:
        """Unify dims position by position; those that differ in size do not match after all and are marked."""
        for position, (a, b) in enumerate(zip(left, right, strict=False)):
            if position == skip:
                continue
            if a.size == b.size:
                self.unify(a, b)
            elif a.size > 1 and b.size > 1:
                self.mark(a, Event.CUT)
                self.mark(b, Event.CUT)

    def broadcast(self, operands: Sequence[Dims], shape: Sequence[int]) -> Dims:
        """Return the dims of an elementwise result: aligned at the end, unified where sizes are equal."""
        result: Dims = []
        for position in range(1, len(shape) + 1):
            size = shape[-position]
            if size == 1:
                result.append(leaf(1))
                continue
            meeting = [dims[-position] for dims in operands if len(dims) >= position and dims[-position].size == size]
            for other in meeting[1:]:
                self.unify(meeting[0], other)
            result.append(find(meeting[0]) if meeting else leaf(size))
        return result[::-1]

    def broadcasts(self, shapes: Sequence[Sequence[int]], shape: Sequence[int]) -> bool:
        """Return whether tensors of these shapes broadcast to `shape`."""
        return all(
            len(operand) <= len(shape) and all(n in (1, m) for n, m in zip(operand[::-1], shape[::-1], strict=False))
            for operand in shapes
        )

    def reshape(self, dims: Dims, shape: Sequence[int]) -> Dims:
        """Return the dims of a view. Groups of dims with equal products are separate, so that a failure stays local."""
        if 0 in shape:
            return [leaf(size) for size in shape]
        result: Dims = []
        for old, new in _groups(dims, shape):
            regrouped = self._regroup(old, new)
            result += self._mixed(old, new) if regrouped is None else regrouped
        return result

    def _regroup(self, old: Dims, sizes: Sequence[int]) -> Dims | None:
        """Distribute the factors of some dims over others of the same total size."""
        if len(old) == len(sizes) == 1:
            return list(old)
        rest = factors(product(old))[::-1]  # a stack, major factor on top
        result: Dims = []
        for size in sizes:
            taken: Dims = []
            missing = size
            while missing > 1:
                factor = find(rest.pop())
                if factor.kind == "product":  # refined meanwhile
                    rest.extend(factors(factor)[::-1])
                    continue
                if missing % factor.size == 0:
                    taken.append(factor)
                    missing //= factor.size
                    continue
                halves = None
                if factor.size % missing == 0:
                    halves = self.algebra.split(factor, missing, factor.size // missing)
                if halves is None:
                    return None
                taken.append(halves[0])
                rest.extend(factors(halves[1])[::-1])
                missing = 1
            result.append(product(taken))
        return result

    def _mixed(self, old: Dims, sizes: Sequence[int]) -> Dims:
        """Return the dims of a view that mixes neighbours: a conflict, unless all of them are input axes."""
        axes = [term for term in old if term.size > 1]
        if not all(map(is_data, axes)):
            self.algebra.conflict("view", ", ".join(map(show, axes)), str(list(sizes)), axes, Event.BADVIEW)
        return [self.replaced(axes, size, Event.BADVIEW) for size in sizes]


def _groups(dims: Dims, shape: Sequence[int]) -> Iterator[tuple[Dims, list[int]]]:
    """Yield the smallest runs of old dims and new sizes that hold the same number of elements."""
    i = j = 0
    while i < len(dims) or j < len(shape):
        old, new = dims[i : i + 1], list(shape[j : j + 1])
        i, j = i + len(old), j + len(new)
        while (have := prod(term.size for term in old)) != (want := prod(new)):
            if have < want:
                old.append(dims[i])
                i += 1
            else:
                new.append(shape[j])
                j += 1
        yield old, new

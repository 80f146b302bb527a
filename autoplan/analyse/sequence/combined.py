"""Context parallelism beside tensor parallelism: what a rank of tp holds, cut over ranks of cp.

Tensor parallelism leaves a module with fewer heads on each rank, and context parallelism is planned for that module.
Between exchanges a rank runs what the plan of tensor parallelism over tp * cp ranks runs there; all else is what the
plan over tp ranks says, on a rank's own positions. So the trace is solved twice, and the two are put together here:
rank t of tp and c of cp is rank t * cp + c of both, and holds some of the heads of rank t. Integers and calls that both
solutions change are those of both; a sum of one is made over the ranks of that one. Where the two do not fit (a head
count that tp divides and tp * cp does not is no such place: that mixer is whole on ranks of cp) the plan is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import NoReturn

from autoplan.common.errors import IndivisibleError
from autoplan.common.layout import Layout
from autoplan.values import (
    AllGather,
    Boundary,
    CallRewrite,
    Collective,
    Exchange,
    Instruction,
    IntegerEdit,
    JoinPartial,
    LiteralArgument,
    OwnPositions,
    ParallelBlock,
    ParameterRule,
    Runtime,
    ScaleGradient,
    SequenceBoundary,
    WithholdPartial,
)

__all__ = ["combined"]


def combined(tp: Runtime, context: Runtime, tp_size: int, cp_size: int) -> Runtime:
    """One runtime of the solution over ranks of tp (or of ep), and that of context parallelism over all."""
    return _Combined(tp, context, tp_size, cp_size).runtime()


def _refuse(where: str, why: str) -> NoReturn:
    raise IndivisibleError(
        f"{where or 'the model'}: {why}", hint="plan with tp_size= or cp_size= alone, or with other sizes"
    )


class _Combined:
    def __init__(self, tp: Runtime, context: Runtime, tp_size: int, cp_size: int) -> None:
        self.tp, self.context, self.tp_size, self.cp_size = tp, context, tp_size, cp_size

    def runtime(self) -> Runtime:
        also = (name for name in self.context.random if name not in self.tp.random)
        return replace(
            self.tp,
            parameters=tuple(self._parameters()),
            instructions=tuple(self._instructions()),
            random_whole=tuple(dict.fromkeys((*self.tp.random_whole, *self.context.random_whole, *also))),
            draws=self.tp.draws or self.context.draws,
            constants=self.context.constants,
        )

    # ------------------------------------------------------------------ weights

    def _parameters(self) -> Iterator[ParameterRule]:
        own = {rule.pattern: rule for rule in self.tp.parameters}
        read = {rule.pattern: rule for rule in self.context.parameters}
        for name in dict.fromkeys((*own, *read)):
            rule = own.get(name, ParameterRule(name))
            yield replace(rule, read=replace(self._read(rule, read[name]), pattern="")) if name in read else rule

    def _read(self, own: ParameterRule, read: ParameterRule) -> ParameterRule:
        """Return the rule for the rows that a cp rank reads of those that its tp rank holds."""
        if read.dim is None or read.layout is None:
            return read
        whole = Layout.parse(read.layout)
        layout = self._within(own.pattern, whole)
        for t in range(self.tp_size):
            held = tuple(range(whole.size))
            if own.dim is not None and own.layout is not None and own.dim == read.dim:
                held = Layout.parse(own.layout).rows(t, self.tp_size)
            for c in range(self.cp_size):
                rows = layout.rows(c, self.cp_size) if layout.is_split else tuple(range(layout.size))
                wanted = whole.rows(t * self.cp_size + c, self.tp_size * self.cp_size)
                if layout.size != len(held) or tuple(held[row] for row in rows) != wanted:
                    _refuse(own.pattern, f"the part of a tp rank ({own.layout}) is not what its cp ranks read")
        if not layout.is_split:
            return replace(read, dim=None, layout=None)
        return replace(read, layout=str(layout))

    def _within(self, where: str, layout: Layout) -> Layout:
        """Return how the part of a dim on a tp rank lies on its cp ranks, where the whole lies on both by `layout`."""
        if layout.parts:
            parts = tuple(self._within(where, part) for part in layout.parts)
            sizes = [part.size for part in parts]
            return replace(layout, size=prod(sizes) if layout.kind == "product" else sum(sizes), parts=parts)
        if layout.split is None:
            return layout
        pieces, stride = layout.split[0] or self.tp_size * self.cp_size, layout.split[1]
        if layout.block or layout.size % pieces:
            _refuse(where, f"{layout} gives ranks parts of different sizes")
        if stride % self.cp_size == 0:  # all ranks of cp have the same
            return Layout("factor", layout.size // pieces)
        if self.cp_size % stride:
            _refuse(where, f"{layout} cannot be sharded again within the part of a tp rank")
        many = self.cp_size // stride
        if pieces % many and many % pieces:
            _refuse(where, f"{layout} cannot be sharded again within the part of a tp rank")
        mine = min(many, pieces)
        return Layout(
            "factor", layout.size * mine // pieces, split=(0, 1) if stride == 1 == many // mine else (mine, stride)
        )

    # ------------------------------------------------------------------ instructions

    def _instructions(self) -> Iterator[Instruction]:
        """Yield them in the order in which they act at the entry of a module: what makes own positions first."""
        kept: dict[tuple[object, ...], Instruction] = {}
        for one in self.tp.instructions:
            kept[_key(one)] = one
        found: list[Instruction] = []
        for one in self.context.instructions:
            joined = self._joined(kept.pop(_key(one), None), one)
            found += [] if joined is None else [joined]
        yield from (one for one in found if isinstance(one, OwnPositions))
        yield from kept.values()
        yield from (one for one in found if not isinstance(one, OwnPositions))

    def _joined(self, own: Instruction | None, one: Instruction) -> Instruction | None:
        if isinstance(one, Exchange):
            return replace(one, over="cp", layout=str(self._within(one.pattern, Layout.parse(one.layout))))
        if isinstance(one, WithholdPartial | JoinPartial):
            _refuse(one.pattern, "its branches share an all-reduce over cp")
        if isinstance(one, ParallelBlock):
            return own
        if isinstance(one, SequenceBoundary):
            return replace(one, over="cp")
        if isinstance(one, IntegerEdit):
            return replace(one, over="all")
        if isinstance(one, CallRewrite):
            return self._call(own if isinstance(own, CallRewrite) else None, one)
        if any(move.collective is not Collective.ALL_REDUCE for move in one.moves):
            if own is not None or not isinstance(one, AllGather):
                _refuse(one.pattern, f"{type(one).__name__} would span tp and cp")
            return replace(one, over="cp", layout=str(self._within(one.pattern, Layout.parse(one.layout))))
        if own is not None:
            return replace(one, over="all")
        if isinstance(one, ScaleGradient) and one.layout is not None:
            one = replace(one, layout=str(self._within(one.pattern, Layout.parse(one.layout))))
        return replace(one, over="cp")

    def _call(self, own: CallRewrite | None, one: CallRewrite) -> CallRewrite:
        """A call of both: numbers and sums are those over all ranks. What only one of them sums is not told apart."""
        where = f"{one.pattern} at {one.site}"
        if any(move.collective is not Collective.ALL_REDUCE for move in one.own_moves):
            _refuse(where, "its pieces would be gathered over tp and cp")
        if own is None:
            if one.moves:
                _refuse(where, "it is summed over cp but not over tp")
            return replace(one, over="all")
        if type(own) is not type(one) or set(own.copies) != set(one.copies):
            _refuse(where, "it is summed differently over tp and over tp and cp together")
        known = {argument.path for argument in one.arguments}
        more = tuple(
            LiteralArgument(argument.path, *(self._each(numbers) for numbers in (argument.passed, argument.wanted)))
            for argument in own.arguments
            if argument.path not in known
        )
        cuts = {(cut.output, cut.dim) for cut in one.cuts}
        if any((cut.output, cut.dim) not in cuts for cut in own.cuts):
            _refuse(where, "its output is sharded both over tp and over tp and cp together")
        return replace(one, over="all", arguments=(*one.arguments, *more), sometimes=own.sometimes or one.sometimes)

    def _each(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number for number in numbers for _ in range(self.cp_size))


def _key(one: Instruction) -> tuple[object, ...]:
    """Two with one key are done in the same place."""
    if isinstance(one, Boundary):
        return type(one), one.pattern, one.side, one.path
    if isinstance(one, IntegerEdit):
        return IntegerEdit, one.pattern, one.name, one.index
    if isinstance(one, CallRewrite):
        return CallRewrite, one.pattern, one.site
    return type(one), one.pattern

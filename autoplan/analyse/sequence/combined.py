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
    AttendAcross,
    Boundary,
    CallOverPositions,
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
    SplitLogits,
    WithholdPartial,
)


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
            rows_of_tp = tuple(range(whole.size))
            if own.dim is not None and own.layout is not None and own.dim == read.dim:
                rows_of_tp = Layout.parse(own.layout).rows(t, self.tp_size)
            for c in range(self.cp_size):
                rows = layout.rows(c, self.cp_size) if layout.is_split else tuple(range(layout.size))
                wanted = whole.rows(t * self.cp_size + c, self.tp_size * self.cp_size)
                if layout.size != len(rows_of_tp) or tuple(rows_of_tp[row] for row in rows) != wanted:
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
        many = self.cp_size // stride
        if self.cp_size % stride or (pieces % many and many % pieces):
            ranks = f"tp={self.tp_size} × cp={self.cp_size} ranks"
            _refuse(where, f"{ranks} share its {layout.size} units, which those of one tp rank cannot divide")
        mine = min(many, pieces)
        return Layout(
            "factor", layout.size * mine // pieces, split=(0, 1) if stride == 1 == many // mine else (mine, stride)
        )

    # ------------------------------------------------------------------ instructions

    def _instructions(self) -> Iterator[Instruction]:
        """Yield them in the order in which they act at the entry of a module: what makes own positions first."""
        of_tp = {_key(instruction): instruction for instruction in self.tp.instructions}
        joined = [  # attention of own queries calls what tp makes of it
            self._joined(None if isinstance(each, AttendAcross) else of_tp.pop(_key(each), None), each)
            for each in self.context.instructions
        ]
        yield from (instruction for instruction in joined if isinstance(instruction, OwnPositions))
        yield from of_tp.values()
        yield from (each for each in joined if each is not None and not isinstance(each, OwnPositions))

    def _joined(self, own: Instruction | None, other: Instruction) -> Instruction | None:
        if isinstance(other, WithholdPartial | JoinPartial):
            _refuse(other.pattern, "its branches share an all-reduce over cp")
        if isinstance(other, ParallelBlock):
            return own
        if isinstance(other, SequenceBoundary):
            return self._over_cp(other)
        if isinstance(other, IntegerEdit):
            return replace(other, over="all")
        if isinstance(other, AttendAcross) or (isinstance(other, CallOverPositions) and own is None):
            return replace(other, over="cp")  # of what a rank of tp holds
        if isinstance(other, CallRewrite):
            return self._call(own if isinstance(own, CallRewrite) else None, other)
        if any(move.collective is not Collective.ALL_REDUCE for move in other.moves):
            if own is not None or not isinstance(other, AllGather):
                _refuse(other.pattern, f"{type(other).__name__} would span tp and cp")
            return self._over_cp(other)
        return self._over_cp(other) if own is None else replace(other, over="all")

    def _over_cp(self, other: Instruction) -> Instruction:
        """The instruction over ranks of cp, for the part of a rank of tp."""
        if isinstance(other, Exchange | AllGather | ScaleGradient) and other.layout is not None:
            other = replace(other, layout=str(self._within(other.pattern, Layout.parse(other.layout))))
        return replace(other, over="cp")

    def _call(self, own: CallRewrite | None, call: CallRewrite) -> CallRewrite:
        """A call of both: numbers and sums are those over all ranks. What only one of them sums is not told apart."""
        where = f"{call.pattern} at {call.site}"
        if any(move.collective is not Collective.ALL_REDUCE for move in call.own_moves):
            _refuse(where, "its pieces would be gathered over tp and cp")
        if own is None:
            if call.moves:
                _refuse(where, "it is summed over cp but not over tp")
            return replace(call, over="all")
        if type(own) is not type(call) or set(own.copies) != set(call.copies):
            _refuse(where, "it is summed differently over tp and over tp and cp together")
        passed = {argument.path for argument in call.arguments}
        more = tuple(
            LiteralArgument(argument.path, *(self._each(numbers) for numbers in (argument.passed, argument.wanted)))
            for argument in own.arguments
            if argument.path not in passed
        )
        cuts = {(cut.output, cut.dim) for cut in call.cuts}
        if any((cut.output, cut.dim) not in cuts for cut in own.cuts):
            _refuse(where, "its output is sharded both over tp and over tp and cp together")
        return replace(call, over="all", arguments=(*call.arguments, *more), sometimes=own.sometimes or call.sometimes)

    def _each(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number for number in numbers for _ in range(self.cp_size))


def _key(instruction: Instruction) -> tuple[object, ...]:
    """Two with one key are done in the same place."""
    if isinstance(instruction, Boundary):
        return type(instruction), instruction.pattern, instruction.side, instruction.path
    if isinstance(instruction, IntegerEdit):
        return IntegerEdit, instruction.pattern, instruction.name, instruction.index
    if isinstance(instruction, CallRewrite):
        return CallRewrite, instruction.pattern, instruction.site
    more = instruction.outputs if isinstance(instruction, SplitLogits) else ()  # calls may return logits in two forms
    return type(instruction), instruction.pattern, more

"""Place every sum that a set of splits needs, in as few places as possible.

Forward: a call that sums over a split axis leaves a partial value. The sum sits where the value leaves a module, at
once or after linear steps.

Backward: what is done to gradients is one minimum cut (`gradient_sums.py`), given the forward sums.

Whatever hooks cannot do is left to the scoped function mode; whatever that cannot do either is refused.

Parallel branches of a block that are added to each other are summed by one all-reduce. In such a block attention and
feed-forward read the same value, and the block's own code adds both outputs to the stream. Each ends in a partial sum,
and no module returns their total, so no hook could reduce both at once. But addition does not care where a part comes
in: the first branch returns zeros instead of its part, the next one adds the withheld part to its own and is all-
reduced. Whatever the block adds between, and in whichever order, the result is the same.

A sum is moved outwards to where its value has the shape in which it is added (experts return rows of tokens, the module
around them a batch). All this requires that only additions lie between each branch and the point where they meet, in
the code of one module, and that nothing else reads the values on the way. A dropout there would have drawn different
numbers for each branch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from autoplan.analyse.infer import Shards
from autoplan.analyse.placement.call_instructions import gathered_dim, reduction_of, row_bias_of
from autoplan.analyse.placement.callflow import CallFlow, Crossing, HookPoint, HookPoints, Placement, Refusal
from autoplan.analyse.placement.delayed_sums import Way, adds, follow_down, shared_sums
from autoplan.analyse.placement.gradient_sums import GradientSums
from autoplan.analyse.placement.inside_calls import made_of
from autoplan.ops import call_record, op_record
from autoplan.ops.records.answers import Drawn, Reduction, Shows
from autoplan.values import (
    AllGather,
    AllReduce,
    Boundary,
    Call,
    JoinPartial,
    MeanOverRanks,
    Ref,
    WithholdPartial,
    replace,
)
from autoplan.values.reasons import NotPlaced

_STEPS = 4
CrossingOut = Callable[[int, int], Crossing | None]


@dataclass(frozen=True)
class Pair:
    """Two branches that follow each other in the code of a block: where they are returned, and the block."""

    first: Crossing
    last: Crossing
    block: str

    @property
    def points(self) -> tuple[object, ...]:
        return self.first.module, self.first.path, self.last.module, self.last.path, self.block


def pairs_of_branches(
    flow: CallFlow, sums: Iterable[Crossing], leaving: CrossingOut
) -> tuple[tuple[Pair, ...], dict[Crossing, Crossing]]:
    """Return the sums at module outputs that can be joined with the next one, the same in every run of their modules,
    and the boundaries to which sums of these pairs must be moved."""
    arriving: dict[int, list[Crossing]] = defaultdict(list)
    moved = {crossing: _outwards(flow, crossing, leaving) for crossing in sums}
    for crossing in moved.values():
        for call in _additions(flow, crossing):
            arriving[call].append(crossing)
    by_first: dict[Crossing, Pair] = {}
    for call in sorted(arriving):
        for pair in _in_turn(flow.trace.calls[call], arriving[call]):
            by_first.setdefault(pair.first, pair)
    pairs = tuple(_even(flow, _apart(by_first.values())))
    used = {crossing for pair in pairs for crossing in (pair.first, pair.last)}
    return pairs, {old: new for old, new in moved.items() if new in used and old != new}


def _outwards(flow: CallFlow, crossing: Crossing, leaving: CrossingOut) -> Crossing:
    """Return where an enclosing module returns the value in another shape, produced by views only."""
    tensor, step = dict(flow.trace.visits[crossing.visit].outputs)[crossing.path], crossing.last - 1
    outermost = crossing
    for _ in range(_STEPS):
        uses = [use for use in flow.uses[tensor] if use > step]
        if len(uses) != 1 or not _reshapes(flow, uses[0]) or tensor in flow.final:
            break
        tensor, step = flow.outputs[uses[0]][0], uses[0]
        outermost = leaving(tensor, step) or outermost
    return outermost


def _reshapes(flow: CallFlow, index: int) -> bool:
    """Return whether the call only reshapes the value, also for gradients."""
    shows = call_record(flow.trace.calls[index].name).shows
    return shows is Shows.RESHAPED and len(flow.outputs[index]) == 1 and flow.passes_gradients(index)


def _in_turn(meeting: Call, crossings: list[Crossing]) -> Iterator[Pair]:
    """Yield each branch with the one that runs after it."""
    crossings = sorted(crossings, key=lambda crossing: crossing.last)
    for first, last in zip(crossings, crossings[1:], strict=False):
        if first.last <= last.first:
            yield Pair(first, last, meeting.module)


def _additions(flow: CallFlow, crossing: Crossing) -> list[int]:
    """Return the additions that a value goes through, as long as nothing else reads it or their results."""
    visit = flow.trace.visits[crossing.visit]
    tensor, maker = dict(visit.outputs)[crossing.path], crossing.last - 1
    block: tuple[str, int] | None = None
    additions: list[int] = []
    for _ in range(_STEPS):
        uses = [use for use in flow.uses[tensor] if use > maker]
        step = min(uses, default=None)
        if step is None or not _is_alone(flow, tensor, step, uses) or _is_dropped(flow, tensor, maker, step):
            break
        call = flow.trace.calls[step]
        block = block or (call.module, call.visit)
        if not adds(call) or "alpha" in call.kwargs or block != (call.module, call.visit):
            break
        if call.module in flow.branching or step < crossing.last:
            break
        additions.append(step)
        shape = flow.trace.tensors[tensor].shape
        tensor, maker = flow.outputs[step][0], step
        if flow.trace.tensors[tensor].shape != shape:
            break
    return additions


def _is_alone(flow: CallFlow, tensor: int, step: int, uses: list[int]) -> bool:
    """Return whether the call is the only reader of the value, or writes its result into it."""
    written = flow.outputs[step] == [tensor]
    if len(flow.outputs[step]) != 1 or (len(uses) > 1 and not written):
        return False
    later = any(crossing.last > step for crossing in flow.leaving.get(tensor, ()))
    return not later or written


def _is_dropped(flow: CallFlow, tensor: int, maker: int, step: int) -> bool:
    """Return whether a dropout acts on the value before the call. In evaluation it returns the value unchanged."""
    return any(
        tensor in flow.inputs[index] and call_record(call.name).random.may_draw(call.args, call.kwargs)
        for index, call in enumerate(flow.trace.calls[maker:step], maker)
    )


def _apart(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Yield pairs that do not overlap: a block withholds one value at a time."""
    busy: dict[str, int] = {}
    for pair in sorted(pairs, key=lambda pair: pair.first.last):
        if pair.first.last >= busy.get(pair.block, 0):
            busy[pair.block] = pair.last.last
            yield pair


def _even(flow: CallFlow, pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Yield the pairs that occur in every run of both their modules: a hook acts on every run."""
    by_points: dict[tuple[object, ...], list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_points[pair.points].append(pair)
    for alike in by_points.values():
        first, last = alike[0].first, alike[0].last
        firsts = set(flow.runs_through(first.module, "output", first.path))
        lasts = set(flow.runs_through(last.module, "output", last.path))
        if {pair.first.visit for pair in alike} == firsts and {pair.last.visit for pair in alike} == lasts:
            yield from alike


def place(shards: Shards, flow: CallFlow, gathered: frozenset[int]) -> Placement:
    """Place every sum that the splits need. A hook acts on every run of its module, so a hook point where only some
    runs need something is closed, and everything is placed again."""
    closed: set[HookPoint] = set()
    while True:
        result = _Placer(shards, flow, gathered, closed).solve()
        uneven = _uneven_points(result, flow) - closed
        if not uneven:
            return result
        closed |= uneven


def _uneven_points(result: Placement, flow: CallFlow) -> set[HookPoint]:
    """Return the hook points whose work differs between runs. Work on gradients only is void in runs without them."""
    work: dict[HookPoint, dict[int, set[Boundary]]] = defaultdict(lambda: defaultdict(set))
    for side, placed in (("output", result.outputs), ("input", result.inputs)):
        for (crossing, _), done in placed.items():
            work[crossing.module, side, crossing.path][crossing.visit].add(done)
    uneven = set()
    for point, by_visit in work.items():
        runs = flow.runs_through(*point)
        most = max(by_visit.values(), key=len)
        for run, tensor in runs.items():
            expected = most if tensor in flow.carries else {item for item in most if not item.gradients_only}
            if by_visit.get(run, set()) != expected:
                uneven.add(point)
    return uneven


class _Placer:
    def __init__(self, shards: Shards, flow: CallFlow, gathered: frozenset[int], closed: set[HookPoint]) -> None:
        self.shards, self.flow, self.result = shards, flow, Placement()
        self.trace = shards.trace
        self.reductions: dict[int, Reduction] = {}
        self.hook_points = HookPoints(flow, closed)
        self.ways: list[Way] = []
        self._shared: dict[int, Way] = {}
        for index in range(len(self.trace.calls)):
            self._read_call(index, gathered)
        self.result.reductions = self.reductions

    # Reading the calls

    def _read_call(self, index: int, gathered: frozenset[int]) -> None:
        call, shards = self.trace.calls[index], self.shards
        inputs = self.flow.inputs[index]
        if split := tuple(t for t in self.flow.unseen.get(index, ()) if shards.is_split(t)):
            self.result.refusals.append(Refusal(index, NotPlaced("call-not-seen", call.name, call.module), split))
        if not any(shards.is_split(t) for t in (*inputs, *self.flow.outputs[index])):
            return
        reduction = reduction_of(call, shards, gathered)
        if isinstance(reduction, NotPlaced):
            self._refuse(index, reduction)
        elif reduction:
            self.reductions[index] = reduction
        bias = row_bias_of(call, reduction)
        splits = any(shards.is_split(t) for t in self.flow.outputs[index])
        if not (splits or reduction) or not self.flow.passes_gradients(index):
            return
        for tensor in inputs:
            if not reduction and not shards.is_split(tensor) and tensor != bias and tensor in self.flow.carries:
                self._check_results(index, tensor)

    def _check_results(self, index: int, tensor: int) -> None:
        """Refuse a call in which a replicated input flows into both sharded and replicated results."""
        results = made_of(self.trace.calls[index], tensor, self.shards) & self.flow.carries
        whole = {result for result in results if not self.shards.is_split(result)}
        if whole and whole != results:
            self._refuse(index, NotPlaced("into-whole-and-cut"))

    def _refuse(self, index: int, why: NotPlaced) -> None:
        tensors = tuple(t for t in (*self.flow.inputs[index], *self.flow.outputs[index]) if self.shards.is_split(t))
        call = self.trace.calls[index]
        self.result.refusals.append(Refusal(index, replace(why, call=call.name, module=call.module), tensors))

    # The order of work

    def solve(self) -> Placement:
        self._place_forward_sums()
        # Branches that the block adds to each other are summed together, where the last of them is returned
        outputs = self.result.outputs
        pairs, moved = pairs_of_branches(self.flow, self.result.done_to(AllReduce), self.hook_points.leaving)
        for old, new in moved.items():
            del outputs[old, AllReduce]
            self.result.at_output(new, AllReduce)
        for pair in pairs:
            del outputs[pair.first, AllReduce]
            self.result.at_output(pair.first, WithholdPartial)
            self.result.at_output(pair.last, JoinPartial)
            self.result.blocks.add(pair.block)
        gradients = GradientSums(self.shards, self.flow, self.reductions, self.hook_points, self.ways)
        gradients.place(self.result)
        return self.result

    # Forward sums

    def _place_forward_sums(self) -> None:
        self._shared = shared_sums(self.flow, self.shards, self.reductions, self.hook_points.leaving)
        for index, kind in self.reductions.items():
            if kind is Reduction.NORM:
                self.result.inside_reductions[index] = kind
                # A distributed norm sums its statistics itself; its replicated inputs need no further sum
                inputs = self.flow.carries.intersection(self.flow.inputs[index])
                if self.flow.passes_gradients(index) and not all(map(self.shards.is_split, inputs)):
                    self._refuse(index, NotPlaced("norm-weight-whole"))
                continue
            output = next((t for t in self.flow.outputs[index]), None)
            if output is None:
                self._refuse(index, NotPlaced("written-in-place"))
                continue
            if kind in (Reduction.ATTENTION, Reduction.VARIANCE, Reduction.LENGTH, Reduction.ROW):
                self.result.inside_reductions[index] = kind
            elif kind is Reduction.EMBEDDING:
                self._place_embedding(index, output)
            elif kind is Reduction.GATHER:
                self._place_gather(index, output)
            else:
                self._place_sum(index, output, kind)
        for index in self.reductions:
            self._place_bias(index)

    def _place_embedding(self, index: int, output: int) -> None:
        call = self.trace.calls[index]
        ids = call.args[0].id if isinstance(call.args[0], Ref) else None
        crossing = next(
            (b for b in self.flow.entering.get(ids if ids is not None else -1, []) if b.module == call.module
             and b.first <= index < b.last and self.trace.visits[b.visit].visit == call.visit), None
        )  # fmt: skip
        leaving = self.hook_points.leaving(output, index)
        way = self._follow_down(output, index) if leaving is None else None
        if way is not None and way.side == "output" and not way.biases:
            leaving = way.crossing
        if crossing is None or leaving is None or leaving.module != call.module or leaving.path != ():
            if op_record(call.name).drawn is Drawn.LOOKUP:
                self.result.inside_reductions[index] = Reduction.EMBEDDING
            else:
                self._refuse(index, NotPlaced("table-outside-module"))
            return
        self._multiplied(way)
        self.result.embeddings[index] = crossing

    def _place_gather(self, index: int, output: int) -> None:
        call = self.trace.calls[index]
        crossing = self.hook_points.leaving(output, index)
        product = gathered_dim(call, self.shards)
        if product is None:
            self._refuse(index, NotPlaced("no-product-to-gather"))
            return
        takes = any(op in self.shards.axes.taken for op in range(*call.ops))
        if crossing is None or crossing.module != call.module or takes:
            self.result.inside_reductions[index] = Reduction.GATHER
            return
        layout, dim = product
        self.result.at_output(crossing, AllGather, dim=dim, layout=layout)

    def _place_sum(self, index: int, output: int, kind: Reduction) -> None:
        if kind is Reduction.SUM and self._bias_is_read_elsewhere(index):
            self.result.inside_reductions[index] = kind  # there the call can pass the bias once
            return
        way = self._shared.get(index)
        crossing = None if way is not None else self.hook_points.leaving(output, index)
        if way is None and crossing is None and kind is Reduction.SUM:
            way = self._follow_down(output, index)
        if crossing is not None:
            self.result.at_output(crossing, AllReduce if kind is Reduction.SUM else MeanOverRanks)
        elif way is None or way.crossing is None:
            self.result.inside_reductions[index] = kind
        elif way.side == "output":
            self.result.at_output(way.crossing, AllReduce)
        else:
            self.result.at_input(way.crossing, AllReduce)
        self._multiplied(way)

    def _follow_down(self, tensor: int, maker: int) -> Way | None:
        return follow_down(
            tensor, maker, self.flow, self.shards, self.reductions, self.hook_points.leaving, self.hook_points.taking
        )

    def _multiplied(self, way: Way | None) -> None:
        """Note the way of a partial value, which multiplies the gradients of factors; divide the biases added to it."""
        if way is None:
            return
        self.result.divided_biases.update(way.biases)
        self.ways.append(way)

    def _place_bias(self, index: int) -> None:
        """Divide a bias added to partial sums if all its readers are such sums (one module, run several times)."""
        bias = self._bias_beside_sum(index)
        if bias is None:
            return
        if self._bias_is_read_elsewhere(index):
            self._refuse(index, NotPlaced("bias-of-others"))
        else:
            self.result.divided_biases.add(bias)

    def _bias_is_read_elsewhere(self, index: int) -> bool:
        """Return whether the bias added to a partial sum is no parameter, or is also read by anything else."""
        bias = self._bias_beside_sum(index)
        return bias is not None and (
            self.trace.tensors[bias].kind != "parameter"
            or any(self._bias_beside_sum(use) != bias for use in self.flow.uses[bias])
        )

    def _bias_beside_sum(self, index: int) -> int | None:
        """Return the bias that a call adds to a partial sum which is reduced further on."""
        if index in self.result.inside_reductions:
            return None
        return row_bias_of(self.trace.calls[index], self.reductions.get(index))

"""Place every sum that a set of splits needs, in as few places as possible.

Forward: a call that sums over a split axis leaves a partial value. The sum sits where the value leaves a module, at
once or after linear steps.

Backward: an edge value → call is *partial* when the value (or its replicated rows) enters a call whose result is split:
each rank computes only a part of that gradient. All partial edges of a value need one sum. When all gradient readers of
a value are partial it can be pushed upstream through the call that made it, merging with its siblings, until it sits on
a parameter, a module output or a module input. Those of a partly split value (a fused projection whose shared key is
replicated) are always pushed through the projection: its input needs a sum, too, and its replicated rows get theirs
summed in the parameter. Where that is impossible the gradient is scaled by 1/tp instead.

In a module whose Python branches on the values of tensors (a loop over the experts that were hit) another run may have
other readers: there partial gradients stay on their edges.

Whatever hooks cannot do is left to the scoped function mode; whatever that cannot do either is refused.
"""

from __future__ import annotations

from collections import defaultdict

from autoplan.analyse.placement.call_instructions import gathered_dim, reduction_of, row_bias_of
from autoplan.analyse.placement.callflow import CallFlow, HookPoint, HookPoints, Placement, Refusal
from autoplan.analyse.placement.delayed_sums import Way, follow_down, shared_sums
from autoplan.analyse.placement.inside_calls import made_of
from autoplan.analyse.placement.parallel_branches import pairs_of_branches
from autoplan.analyse.placement.partial_gradients import PartialGradients, join_gradients
from autoplan.analyse.shards import Shards
from autoplan.ops import op_record
from autoplan.ops.records.answers import Drawn, Reduction
from autoplan.values import (
    AllGather,
    AllReduce,
    AllReduceGradient,
    Boundary,
    JoinPartial,
    MeanOverRanks,
    Ref,
    ScaleGradient,
    WithholdPartial,
    replace,
)
from autoplan.values.reasons import NotPlaced


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
        self.gradients = PartialGradients(shards, flow, self.hook_points, self.reductions)
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
            if shards.is_split(tensor) or tensor == bias or tensor not in self.flow.carries:
                continue
            if reduction or self._goes_into_shards(index, tensor):
                self.gradients.partial[tensor].add(index)

    def _goes_into_shards(self, index: int, tensor: int) -> bool:
        """Return whether all results that a replicated input of the call flows into are sharded."""
        results = made_of(self.trace.calls[index], tensor, self.shards) & self.flow.carries
        whole = {result for result in results if not self.shards.is_split(result)}
        if whole and whole != results:
            self._refuse(index, NotPlaced("into-whole-and-cut"))
        return not whole

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
        self._push_out_of_mixed()
        self.gradients.push_inside()
        for crossing in join_gradients(self.gradients):
            self.result.at_input(crossing, ScaleGradient)
        self._place_gradient_sums()
        return self.result

    # Forward sums

    def _place_forward_sums(self) -> None:
        self._shared = shared_sums(self.flow, self.shards, self.reductions, self.hook_points.leaving)
        for index, kind in self.reductions.items():
            if kind is Reduction.NORM:
                self.result.inside_reductions[index] = kind
                # A distributed norm sums its statistics itself; its replicated inputs need no further sum
                for tensor in self.flow.inputs[index]:
                    if not self.shards.is_split(tensor) and index in self.gradients.partial.get(tensor, ()):
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
        if crossing is None or crossing.module != call.module:
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

    def _follow_down(self, tensor: int, made: int) -> Way | None:
        return follow_down(
            tensor, made, self.flow, self.shards, self.reductions, self.hook_points.leaving, self.hook_points.taking
        )

    def _multiplied(self, way: Way | None) -> None:
        """Mark gradients of factors on a partial value's way as partial; divide the biases added to it."""
        if way is None:
            return
        self.result.divided_biases.update(way.biases)
        for step in way.path:
            for tensor in self.flow.inputs[step]:
                if tensor in self.flow.carries and tensor not in way.values and tensor not in way.added:
                    self.gradients.partial[tensor].add(step)

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

    def _push_out_of_mixed(self) -> None:
        """Handle the replicated rows of partly sharded tensors, in reverse order."""
        mixed = sorted(
            ((p, t) for t, p in self.flow.producer.items() if self.shards.is_mixed(t) and t in self.flow.carries),
            reverse=True,
        )
        for producer, tensor in mixed:
            if tensor in self.gradients.pushed:
                continue
            outputs = [t for t in self.flow.outputs[producer] if not self.gradients.settled(t)]
            if not self.gradients.uses.get(tensor) or not any(
                t in self.flow.carries for t in self.flow.inputs[producer]
            ):
                continue
            if self.gradients.call_passes(producer) and all(
                self.gradients.can_be_partial(t, producer) for t in outputs
            ):
                self.gradients.push(producer)
            else:
                self._scale_mixed(producer, tensor)

    def _scale_mixed(self, producer: int, tensor: int) -> None:
        """Scale the full gradient that every rank has of the replicated rows by 1/tp: such parts can be summed."""
        uses = self.gradients.uses[tensor]
        if any(u in self.gradients.partial.get(tensor, ()) for u in uses):
            self._refuse(producer, NotPlaced("mixed-gradients"))
            return
        for use in uses:  # a partial gradient pushed up to this value would stay unsummed
            if any(t in self.gradients.pushed for t in self.flow.outputs[use]):
                self._refuse(producer, NotPlaced("partial-cannot-pass"))
                return
        crossing = self.hook_points.leaving(tensor, producer)
        dim = next(d for d, each in enumerate(self.shards.layouts(tensor)) if each is not None)
        layout = str(self.shards.layouts(tensor)[dim])
        if crossing is None:
            self.result.inside_scales[producer] = tensor
        else:
            dim -= len(self.trace.tensors[tensor].shape)
            self.result.at_output(crossing, ScaleGradient, dim=dim, layout=layout)
        for other in self.flow.inputs[producer]:
            if other in self.flow.carries and self.shards.has_whole_part(other):
                self.gradients.partial[other].add(producer)

    def _place_gradient_sums(self) -> None:
        for tensor, calls in self.gradients.partial.items():
            if not calls:
                continue
            if self.trace.tensors[tensor].kind == "parameter":
                self._place_on_parameter(tensor, calls)
                continue
            where = self.gradients.where(tensor)
            if where == "output":
                crossing = self.hook_points.made_at(tensor)
                assert crossing is not None
                self.result.at_output(crossing, AllReduceGradient)
            elif where == "input":
                for crossing in self.gradients.cover(tensor):
                    self.result.at_input(crossing, AllReduceGradient)
            elif self.shards.is_mixed(tensor):
                self._refuse(min(calls), NotPlaced("partial-nowhere"))
            else:
                for call in calls:
                    self.result.inside_copies[call].add(tensor)

    def _place_on_parameter(self, tensor: int, calls: set[int]) -> None:
        uses = self.gradients.uses.get(tensor, set())
        if self.shards.is_mixed(tensor):
            if uses <= calls:
                self.result.shared_parameters.add(tensor)
            else:
                self._refuse(min(calls), NotPlaced("parameter-mixed-gradients"))
        elif uses <= calls:
            self.result.summed_parameters.add(tensor)
        else:
            for call in calls:
                self.result.inside_copies[call].add(tensor)

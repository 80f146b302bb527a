"""Context parallelism: outside of what mixes positions, every gradient is a part of a sum.

The plan is that of sequence parallelism in which nothing is split but what mixing calls treat apart, so each rank runs
all else on its own positions, with whole weights. There a rank's gradient is one part, and each parameter's is summed
once. What still runs on whole values (what makes the stream, modules that need the whole sequence) must follow the same
rule, or a weight that is used in both ways (a tied head) is counted wrongly: what is cut keeps its own positions and
leaves the gradient of the others zero, what is gathered has its gradient summed, and where modules hand whole values to
the model's own code, which returns them or makes a loss of them, each rank takes an equal part of the gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from autoplan.analyse.placement.callflow import UNRETURNED, CallFlow, Crossing, Placement
from autoplan.analyse.sequence.changes import Refused, SequencePlacement
from autoplan.common.patterns import is_under
from autoplan.values import AllReduce, AllReduceGradient, ScaleGradient
from autoplan.values.not_placed import WholeSequence, WholeWhy


def leave_partial(flow: CallFlow, placement: Placement, cut: SequencePlacement) -> None:
    """Note in `cut` what lies outside and what follows. Raises Refused where a value is read both ways."""
    walk = _Outside(flow, placement, cut)
    walk.run()
    cut.own = set(cut.scatters)
    cut.summed_parameters |= walk.parameters
    summing = {key for key in cut.gathers if any(is_under(name, key[0].module) for name in cut.summing)}
    cut.partial_gathers = {*walk.gathered_in_all_runs(), *summing}
    alone = {root for root, _ in cut.gathers if UNRETURNED in root.path}
    for root, head, dim in walk.heads():
        cut.heads[head] = dim
        cut.unreturned |= {head} if UNRETURNED in root.path else set()
        alone.discard(root)
    if alone:
        raise Refused(WholeSequence("shared-value"))  # then the loss is one of all logits
    cut.picked = dict(walk.picked(cut.heads))
    cut.scaled = set(walk.scaled)
    cut.summed_back |= set(walk.given_alone())
    done_at = {"output": placement.outputs, "input": placement.inputs}
    for side, place in done_at.items():  # a gradient that is a part of a sum is not divided again
        divided = {crossing: done for (crossing, kind), done in place.items() if kind is ScaleGradient}
        cut.undone |= {done for crossing, done in divided.items() if flow.tensor_at(crossing, side) in walk.seen}


class _Outside:
    """The whole values with a gradient from which something is cut or returned, back to what they are made of."""

    def __init__(self, flow: CallFlow, placement: Placement, cut: SequencePlacement) -> None:
        self.flow, self.trace, self.placement, self.cut = flow, flow.trace, placement, cut
        self.seen: set[int] = set()
        self.calls: set[int] = set()
        self.parameters: set[int] = set()
        self.gathered: set[tuple[Crossing, str]] = set()
        self.scaled: dict[Crossing, int] = {}
        self.own_code: set[int] = set()  # calls of the model's own code on the way to what it returns
        self.kept: set[int] = set()  # what is gathered for it
        self.waiting: list[int] = []
        self.makers: dict[int, list[int]] = defaultdict(list)  # the call that made it, and those that wrote into it
        for index, outputs in enumerate(flow.outputs):
            for tensor in () if flow.is_identity(index) else outputs:
                self.makers[tensor].append(index)
        self.cut_at: dict[int, list[range]] = defaultdict(list)  # the calls that see it cut
        self.made_whole = {self.flow.tensor_at(*key) for key in cut.scatters if key[1] == "output"}
        for crossing, side in cut.scatters:
            behind = (crossing.first, crossing.last) if side == "input" else (crossing.last, len(self.trace.calls))
            self.cut_at[self.flow.tensor_at(crossing, side)].append(range(*behind))
        self.gathers: dict[int, list[tuple[Crossing, str]]] = defaultdict(list)
        for crossing, side in cut.gathers:
            self.gathers[self.flow.tensor_at(crossing, side)].append((crossing, side))

    def run(self) -> None:
        self._find_own_code()
        self.waiting = [*self.cut_at, *self.scaled.values(), *self.cut.shared]
        while self.waiting:
            self._walk()
            for tensor in tuple(self.seen):
                self._check_readers(tensor)

    def _find_own_code(self, alone: Collection[int] = ()) -> None:
        """Find what the model's own code makes of whole values on the way to the model's output: it is the same on each
        rank, as is a loss. Module outputs have a whole gradient there, of which each rank takes an equal part.
        `alone`: what is divided where the model returns it, since modules read it, too."""
        reached, alone = self.flow.with_gradients(), set(alone)
        while True:
            self.own_code.clear()
            self.scaled.clear()
            passed_of = {tensor: set[int]() for tensor in self.flow.final - alone}
            own_of = {tensor: self._back_to_modules(tensor, passed_of[tensor]) for tensor in passed_of}
            read = {t for t, own in own_of.items() if any(self._others_read(value, reached) for value in own)}
            read |= {t for t, passed in passed_of.items() if any(map(self._is_read_behind, passed & self.cut.values))}
            read |= {t for t, passed in passed_of.items() if passed & self.cut.reduced & own_of[t]}
            if not read:
                break
            alone |= read
        for crossing, tensor in tuple(self.scaled.items()):
            uses = {use for use in self.flow.gradient_uses(tensor) if use >= crossing.last}
            if (behind := uses - self.own_code) and behind != uses:
                raise Refused(self._reason("shared-value", min(behind)))
            if behind:  # modules read it, and it is returned as it is
                del self.scaled[crossing]
                alone.add(tensor)
        uneven = {tensor for crossing, tensor in self.scaled.items() if self._is_uneven(crossing, reached)}
        if also := {t for t, passed in passed_of.items() if not passed.isdisjoint(uneven)} - alone:
            return self._find_own_code({*alone, *also})
        self.kept |= {t for passed in passed_of.values() for t in passed & self.cut.values if self._gathers_of(t)}
        for crossing, tensor in self.scaled.items():
            self.cut_at[tensor].append(range(crossing.last, len(self.trace.calls)))
        self.scaled |= {c: tensor for tensor in alone for c in self.flow.leaving[tensor] if not c.module}

    def _is_uneven(self, crossing: Crossing, reached: set[int]) -> bool:
        """Return whether what a module hands over is divided there in this run, but not in all: a hook acts on each."""
        runs = self.flow.runs_through(crossing.module, "output", crossing.path)
        divided = {c.visit for c in self.scaled if (c.module, c.path) == (crossing.module, crossing.path)}
        return any(tensor in reached and visit not in divided for visit, tensor in runs.items())

    def _gathers_of(self, tensor: int) -> list[Crossing]:
        return [crossing for crossing, _ in self.gathers.get(tensor, ()) if crossing.module]

    def _is_read_behind(self, tensor: int) -> bool:
        """Return whether other calls than the model's own code read what is gathered for that."""
        ends = [crossing.last for crossing in self._gathers_of(tensor)]
        return bool(ends) and any(use >= min(ends) for use in self.flow.gradient_uses(tensor) - self.own_code)

    def _others_read(self, tensor: int, reached: set[int]) -> bool:
        """Return whether a call other than the model's own code passes it a gradient."""
        others = self.flow.gradient_uses(tensor) - self.own_code
        return any(not reached.isdisjoint(self.flow.outputs[use]) for use in others)

    def _back_to_modules(self, final: int, passed: set[int]) -> set[int]:
        """Note what modules hand to the model's own code for a value that it returns; return what that makes of it."""
        waiting, own, seen = [final], set[int](), set[int]()
        while waiting:
            tensor = waiting.pop()
            if tensor in seen or tensor not in self.flow.carries:
                continue
            seen.add(tensor)
            makers = self.makers.get(tensor, [])
            handed = [
                c for c in self.flow.leaving.get(tensor, ()) if c.module and any(c.first <= m < c.last for m in makers)
            ]
            if handed and tensor not in self.cut.values:
                self.scaled |= dict.fromkeys(_outermost(handed), tensor)
            elif not handed:
                self.own_code.update(makers)
                own |= {tensor} if makers and tensor not in self.cut.values else set()
                waiting += [t for maker in makers for t in self.flow.inputs[maker]]
        passed |= seen
        return own

    def _walk(self) -> None:
        while self.waiting:
            tensor = self.waiting.pop()
            if tensor in self.seen or tensor not in self.flow.carries:
                continue
            if tensor in self.cut.values:
                self.gathered |= {key for key in self.gathers[tensor] if key[0].module}
                if tensor in self.kept:
                    raise Refused(self._reason("shared-value", self.makers[tensor][0]))
                if tensor not in self.made_whole:  # it is whole behind a gather
                    continue
            self.seen.add(tensor)
            if self.trace.tensors[tensor].kind == "parameter":
                self.parameters.add(tensor)
            for maker in self.makers.get(tensor, ()):
                if not self._is_sum(tensor, maker):
                    self.calls.add(maker)
                    self.waiting += self.flow.inputs[maker]

    def gathered_in_all_runs(self) -> Iterator[tuple[Crossing, str]]:
        """A hook acts on every run of its module; in those without gradients it does not matter how."""
        taken_in = self.seen - self.cut.values  # by blocks, and gathered in these
        inside = (key for tensor in taken_in & self.gathers.keys() for key in self.gathers[tensor] if key[0].module)
        self.gathered |= {key for key in inside if self._is_read_outside(*key)}
        points = {(crossing.module, side, crossing.path) for crossing, side in self.gathered}
        for crossing, side in self.cut.gathers:
            if (crossing.module, side, crossing.path) in points:
                alike, tensor = (crossing, side) in self.gathered, self.flow.tensor_at(crossing, side)
                if not alike and self.flow.gradient_uses(tensor):
                    raise Refused(WholeSequence("runs-both-ways", crossing.module))
                if not alike and tensor in self.flow.final:  # of which all ranks have the same gradient
                    self.scaled |= {c: tensor for c in self.flow.leaving[tensor] if not c.module}
                yield crossing, side

    def _is_read_outside(self, crossing: Crossing, side: str) -> bool:
        """Return whether a call behind a gather lies outside, where gradients are parts of a sum."""
        first, last = (crossing.first, crossing.last) if side == "input" else (crossing.last, len(self.trace.calls))
        uses = self.flow.gradient_uses(self.flow.tensor_at(crossing, side))
        return any(first <= use < last for use in uses & self.calls)

    def given_alone(self) -> Iterator[tuple[Crossing, str]]:
        """Yield what a module that is called by itself takes in: others, outside the model, wait for its gradient."""
        entries = (crossing for tensor in self.seen for crossing in self.flow.entering.get(tensor, ()))
        yield from ((c, "input") for c in entries if c.module and self.trace.visits[c.visit].parent is None)

    def heads(self) -> Iterator[tuple[Crossing, Crossing, int]]:
        """Yield where the model returns, and where a module does, what is sharded, alone or after elementwise calls."""
        for (crossing, side), dim in self.cut.gathers.items():
            tensor = self.flow.tensor_at(crossing, side)
            while crossing.module == "":
                if any(self.trace.calls[use].module for use in self.flow.uses[tensor]):  # a state that blocks read, too
                    break
                within = _outermost(c for c in self.flow.leaving.get(tensor, ()) if c.module)
                if within:
                    yield from ((crossing, c, dim) for c in within)
                    break
                sources = [t for t in self.flow.inputs[self.flow.producer.get(tensor, -1)] if t in self.cut.values]
                if tensor not in self.flow.producer or len(sources) != 1:
                    break
                tensor = sources[0]

    def picked(self, heads: Iterable[Crossing]) -> Iterator[tuple[Crossing, int]]:
        """Yield where the model's own code gets from a module what it makes logits of, and may pick positions."""
        for head in heads:
            for _, tensor in self.trace.visits[head.visit].inputs:
                maker = self.flow.producer.get(tensor, -1)
                sources = [t for t in self.flow.inputs[maker] if t in self.cut.values] if maker >= 0 else []
                for before in sources if self.trace.calls[maker].module == "" else ():
                    earlier = self.flow.producer.get(before, -1)
                    behind = (c for c in self.flow.leaving.get(before, ()) if c.module and c.first <= earlier < c.last)
                    yield from ((c, self.cut.heads[head]) for c in _outermost(behind))

    def _is_sum(self, tensor: int, maker: int) -> bool:
        """Return whether it is summed over ranks, which needs the whole gradient; then the gradient is summed, too."""
        leaving, entering = self.flow.leaving.get(tensor, ()), self.flow.entering.get(tensor, ())
        summed = {(c, "output") for c in leaving if (c, AllReduce) in self.placement.outputs}
        summed |= {(c, "input") for c in entering if (c, AllReduce) in self.placement.inputs}
        self.cut.summed_back |= summed
        if not summed and maker in self.placement.reductions:
            raise Refused(replace(self._reason("summed-inside", maker), summed=True))
        return bool(summed)

    def _check_readers(self, tensor: int) -> None:
        """Check that all who read it give parts of its gradient."""
        parameter = self.trace.tensors[tensor].kind == "parameter"
        summed = parameter and tensor in self.placement.summed_parameters
        for use in self.flow.gradient_uses(tensor) - self.calls if not summed else ():
            on_shards = any(t in self.cut.values for t in (*self.flow.inputs[use], *self.flow.outputs[use]))
            if not (on_shards if parameter else self._gives_part(tensor, use)) and not self._joins(use, set()):
                name = self.trace.tensors[tensor].names[0] if parameter else ""
                raise Refused(self._reason("shared-parameter" if parameter else "shared-value", use, name))

    def _gives_part(self, tensor: int, use: int) -> bool:
        at_cut = any(use in behind for behind in self.cut_at.get(tensor, ()))
        return use in self.calls or at_cut or use in self.cut.shared.get(tensor, ()) or self._is_copied(tensor, use)

    def _joins(self, call: int, passed: set[int]) -> bool:
        """Return whether all readers of a call's outputs give parts of their gradients: then it lies outside, too."""
        if call in passed:
            return True
        passed.add(call)
        outputs = [t for t in self.flow.outputs[call] if t in self.flow.carries]
        for tensor in outputs:
            uses = self.flow.gradient_uses(tensor) - {call}
            returned = tensor in self.flow.final and (uses or tensor not in self.cut.values)
            if returned or not all(self._gives_part(tensor, use) or self._joins(use, passed) for use in uses):
                return False
        self.calls.add(call)
        self.seen.update(outputs)
        self.waiting += self.flow.inputs[call]
        return True

    def _is_copied(self, tensor: int, use: int) -> bool:
        """Return whether this reader gives a part whose gradient was summed on the way; that sum is dropped."""
        for crossing, side in [(c, "input") for c in self.flow.entering.get(tensor, ()) if c.first <= use < c.last] + [
            (c, "output") for c in self.flow.leaving.get(tensor, ()) if c.last <= use
        ]:
            place = self.placement.inputs if side == "input" else self.placement.outputs
            if (crossing, AllReduceGradient) in place:
                self.cut.dropped.add((crossing, side))
                return True
        return False

    def _reason(self, why: WholeWhy, call: int, parameter: str = "") -> WholeSequence:
        recorded = self.trace.calls[call]
        return WholeSequence(why, recorded.module, recorded.name, parameter=parameter)


def _outermost(crossings: Iterable[Crossing]) -> list[Crossing]:
    """Return those of the longest run of a module; there a value may have several names."""
    them = list(crossings)
    longest = max(them, key=lambda c: c.last - c.first, default=None)
    return [c for c in them if longest is not None and c.visit == longest.visit]

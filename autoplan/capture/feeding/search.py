"""Search for a call that runs: the state that came farthest is followed first, within a budget of tries and time.

Runs are real for small models, since only numbers show what is out of range, and without storage for large ones. A call
that runs is then improved: ids over the whole table, optional arguments if weights are still unread, and a second set
of sizes.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from autoplan.capture.called import has_training_paths, in_training
from autoplan.capture.dry_run import SMALL, depends_on_data, own, quiet, with_storage, without_storage
from autoplan.capture.feeding.arguments import Arguments, lengths_of
from autoplan.capture.feeding.failure import Failure, NotFiniteError, NothingRead, Step
from autoplan.capture.feeding.resize import alike_or_longer, of_rank, of_vectors, sizes_vary
from autoplan.capture.feeding.together import MOST_PARTS, longer
from autoplan.capture.feeding.told import told, usually
from autoplan.capture.feeding.waiting import Next
from autoplan.capture.feeding.wants import BATCH, Mark, Path, State, Want, grown
from autoplan.capture.feeding.watch import Watch
from autoplan.capture.outside import refusing_outsiders
from autoplan.common.errors import OutsideError
from autoplan.common.nested import call_with, flatten_tensors
from autoplan.common.random_values import untouched_randomness, working_dtype
from autoplan.common.torch_internals import FakeTensorMode
from autoplan.patches.kernels import where_it_runs

MOST_TRIES, _MOST_SECONDS = 400, 20.0
_MOST_TOLD, _MOST_USUAL = 24, 16  # proposals from a failure, and from what is usual
_USUAL_AT = 6  # rank of the first usual proposal among those from the failure
_SMALL = 8  # ranks that a short length loses, since it shows little
_FEW_ELEMENTS = 20_000
_PATIENCE = 8  # tries for a finite result
_MOST_ELEMENTS = 2_000_000  # of all arguments together
_MOST_MORE = 30  # tries for an optional argument
_TARGETS = 6  # tries for targets
_MOST_RANKS = 12  # tries for calls with a dim more or less, of which one runs in training
_MOST_DIMS, _MOST_MASKS = 4, 6  # tries for the same call with other dims, and for a mask
_MOST_VARYING = 32  # tries for a call whose sizes may change
_MOST_FULL, _LONGEST = 4, 512  # tries for sizes of tables, and the longest of these
_WORTH = 0.001  # share of unread weights below which no further argument is added


@dataclass
class Search:
    """The tries of one model."""

    arguments: Arguments
    seed: int
    most: int = MOST_TRIES
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.arguments.model
        self.began = time.process_time()
        self.dtype = working_dtype(self.model)
        self.real = sum(p.numel() for p in self.model.parameters()) <= SMALL
        self.seen: set[State] = set()
        self.ran: dict[State, Step] = {}  # in eval mode
        self.compared: dict[Path, int] = {}
        self.count = itertools.count()
        self._failure: Failure | None = None
        self.untraceable = False
        self._last: Watch
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._twin: tuple[FakeTensorMode | None, nn.Module] | None = None

    def run(self, start: State) -> State | None:
        """Return the first state that runs, improved; None if the budget ends without one."""
        with untouched_randomness(self.seed), quiet():
            step = self._first(start, self.most)
            return None if step is None else self._better(step)

    def other_sizes(self, state: State) -> State | None:
        """Return the same call with as many other sizes as it runs with; None if none may change."""
        used = {size for _, want in state.leaves() for size in (*want.shape, want.below) if isinstance(size, str)}
        large = any(prod(want.sizes(state.sizes | {BATCH: 1})) > _FEW_ELEMENTS for _, want in state.leaves())
        others = {name: grown(name, size, large) for name, size in state.sizes.items() if name in used - {"width"}}
        inner = [(name,) for name in others if name != BATCH]
        several = [tuple(others), *((BATCH, *name) for name in inner), (BATCH,), *inner]
        with untouched_randomness(self.seed), quiet():
            for names in dict.fromkeys(several):
                for times in (0, 1):
                    other = state
                    for name in filter(others.__contains__, names):
                        other = other.with_size(name, others[name][times])
                    if other != state and not self._try(other, "another size").failed:
                        return other
        return None

    def in_both_modes(self, state: State) -> State:
        """Return the call; if it fails in code that runs in training only, one with a dim more or less that does not:
        such code is the model's own, too, and says what the forward takes."""
        if not has_training_paths(self.model):
            return state
        with untouched_randomness(self.seed), quiet():
            ranks = ((path, len(leaf.shape)) for path, leaf in state.leaves() if leaf.is_tensor)
            others = (of_rank(state, path, rank + more) for path, rank in ranks for more in (-1, 1))
            for call in itertools.chain([state], itertools.islice(itertools.chain.from_iterable(others), _MOST_RANKS)):
                if not self._try(call, "it runs in training too", training=True).failed and (
                    call == state or not self._try(call, "it runs in training too").failed
                ):
                    return call
        return state

    def without_length(self, state: State) -> State | None:
        """Return the same call without a length, if it takes one, runs without it and reads the same weights."""
        if (rows := next(of_vectors(state, 2), None)) is None:
            return None
        with untouched_randomness(self.seed), quiet():
            usual, step = self.ran.get(state) or self._try(state, "again"), self._try(rows, "it runs without a length")
        return None if usual.failed or step.failed or not usual.read <= step.read else rows

    def varying(self, state: State) -> tuple[State, State] | None:
        """Return a call like this one whose length or side may change, in two sizes: one whose sizes must be what they
        are may have run by chance (two of its sizes happened to be equal)."""
        with untouched_randomness(self.seed), quiet():
            usual = self.ran.get(state) or self._try(state, "again")
            for call in itertools.islice(alike_or_longer(state), _MOST_VARYING):
                if self._in_time() and not (step := self._try(call, "its sizes may change")).failed:
                    other = self.other_sizes(call) if usual.read <= step.read else None
                    if other is not None and sizes_vary(call, other):
                        return call, other
        return None

    def at_full_length(self, state: State) -> State | None:
        """Return the call with as many positions as a mask or a table has, if it then takes another path."""
        fit = [size for size in lengths_of(self.model) if 2 < size <= _LONGEST and size != state.sizes["length"]]
        with untouched_randomness(self.seed), quiet():
            steps = None if self._try(state, "again").failed or not fit else self._last.steps
            for size in fit[:_MOST_FULL] if any("length" in leaf.shape for _, leaf in state.leaves()) else ():
                full = state.with_size("length", size)
                fails = full.elements() > _MOST_ELEMENTS or self._try(full, "as long as a table").failed
                if not fails and steps is not None and self._last.steps != steps:
                    return full
        return None

    def with_other_dims(self, state: State) -> State | None:
        """Return the same call with all float inputs one dim shorter (without a length) or longer, if it runs and reads
        the same weights: nothing says which of them a user makes."""
        floats = [(path, leaf) for path, leaf in state.leaves() if leaf.kind == "float"]
        ranks = {len(leaf.shape) for _, leaf in floats}
        if ranks not in ({2}, {3}) or any(leaf.shape[0] != BATCH for _, leaf in floats):
            return None
        other = state
        for path, leaf in floats:
            shape = (BATCH, "length", leaf.shape[-1]) if ranks == {2} else ("length", leaf.shape[-1])
            other = other.with_want(path, replace(leaf, shape=shape))
        wanted = {path: len(leaf.shape) for path, leaf in other.leaves()}
        with untouched_randomness(self.seed), quiet():
            usual = self.ran.get(state) or self._try(state, "again")
            waiting = iter(() if usual.failed else [other])
            for _ in range(_MOST_DIMS):
                if (call := next(waiting, None)) is None:
                    break
                step = self._try(call, "one dim more or less")
                if not step.failed:
                    return step.state if usual.read <= step.read else None
                alike = (child for _, child, _ in self._children())
                alike = (child for child in alike if wanted == {at: len(leaf.shape) for at, leaf in child.leaves()})
                waiting = itertools.chain(waiting, alike)
        return None

    def marked(self, state: State, *, there: bool) -> State:
        """Put the numbers that ids are compared with into them (`there`), or keep them out: a model that looks for such
        a number has two paths. A state that fails with it stays as it is."""
        with untouched_randomness(self.seed), quiet():
            for path, number in self.compared.items():
                leaf = state.at(path)
                below = leaf.below if leaf is not None and leaf.kind == "ids" else 0
                if leaf is not None and isinstance(below, int) and below > 2 and 0 <= number < below:
                    other = state.with_want(path, replace(leaf, value=Mark(number, there)))
                    if not self._try(other, f"it is compared with {number}").failed:
                        state = other
        return state

    def _first(self, start: State, most: int) -> Step | None:
        """Search best first: expand the state that came farthest by what its failure suggests."""
        waiting = [Next(0, 0, next(self.count), start, "the likeliest")]
        elements = max(start.elements(), _FEW_ELEMENTS)
        tries, patience = 0, _PATIENCE
        unset: Step | None = None
        while waiting and tries < most and self._in_time() and not self.untraceable:
            now = heapq.heappop(waiting)
            if now.state in self.seen:
                continue
            step, tries = self._try(now.state, now.why), tries + 1
            if not step.failed:  # unless a call that ended without finite numbers read all of its weights, and others
                return step if unset is None or not unset.read > step.read else replace(unset, failed="")
            if step.ended:  # with uninitialised weights no input gives finite numbers
                unset = unset or step
                patience -= 1
                if patience < 0:
                    return replace(unset, failed="")
            for late, child, reason in self._children():
                late += max(child.elements() // elements, 1).bit_length() - 1
                late += _SMALL * (child.sizes["length"] < start.sizes["length"] // 2)
                heapq.heappush(waiting, now.then(step, child, reason, late, next(self.count)))
        return None if unset is None else replace(unset, failed="")

    def _children(self) -> Iterator[tuple[int, State, str]]:
        """Return what the last failure suggests, and what is usual, each with its place in the queue."""
        failure, self._failure = self._failure, None
        assert failure is not None
        return self._proposed(failure)

    def _proposed(self, failure: Failure) -> Iterator[tuple[int, State, str]]:
        for first, most, proposals in (
            (0, _MOST_TOLD, told(failure)),
            (_USUAL_AT, _MOST_USUAL, usually(failure)),
        ):
            new = (pair for pair in proposals if pair[0] not in self.seen and pair[0].elements() <= _MOST_ELEMENTS)
            for late, (state, why) in enumerate(itertools.islice(new, most), first):
                yield late, state, why

    def _in_time(self) -> bool:
        return time.process_time() - self.began < _MOST_SECONDS

    def _better(self, step: Step) -> State:
        step = self._all_rows(self._without_idle(step))
        weights = {name: p.numel() for name, p in self.model.named_parameters()}
        optional = self.arguments.left_out(step.state)
        for path, parameter in (*optional, *(((), None),) * MOST_PARTS):
            unread = sum(size for name, size in weights.items() if name not in step.read)
            if unread <= _WORTH * sum(weights.values()) or not self._in_time():
                break
            if parameter is None:  # lists may go on longer
                states = (state for state in longer(step.state) if state not in self.seen)
            else:
                states = (step.state.with_want(path, want) for want in self.arguments.usual(parameter))
            step = self._with_more(step, states, unread, weights)
        return step.state

    def _without_idle(self, step: Step) -> Step:
        """Return the step without optional arguments that do not add to the weights read."""
        for parameter in self.arguments.optional:
            if step.state.holds(parameter.name):
                seen, fewer = self._last, self._try(step.state.without(parameter.name), "it changes nothing")
                if not fewer.failed and fewer.read >= step.read:
                    step = replace(fewer, why=step.why)
                else:
                    self._last = seen
        return step

    def _with_more(self, step: Step, states: Iterable[State], unread: int, weights: dict[str, int]) -> Step:
        """Return a call with more arguments or items, if it adds to the weights read; else the step."""
        for state in itertools.islice(states, 2):
            more = self._first(state, _MOST_MORE)
            if more is not None and sum(n for name, n in weights.items() if name not in more.read) < unread:
                return self._all_rows(more)
        return step

    def with_targets(self, state: State, other: State | None = None) -> State | None:
        """Return the call with targets or a switch that make the forward compute its loss, if it takes them and runs;
        preferably one that also runs in the sizes of the other call."""
        chance: State | None = None
        with untouched_randomness(self.seed), quiet():
            for parameter in self.arguments.losses:
                switch, name = parameter.default is False, parameter.name
                alike = (want for _, want in state.leaves() if want.kind == "ids")
                usual = (*alike, *self.arguments.usual(parameter))
                wants = [Want("value", value=True)] if switch else list(dict.fromkeys(usual))[:_TARGETS]
                for want in wants if not state.holds(name) else ():
                    call = state.with_want((name,), want)
                    if self._try(call, "it makes the forward compute a loss").failed:
                        continue
                    if other is None or not self._try(replace(call, named=other.named), "in other sizes too").failed:
                        return call
                    chance = chance or call
                    proposed = dict.fromkeys(child.at((name,)) for _, child, _ in self._children())
                    wants += [proposal for proposal in proposed if proposal is not None and proposal not in wants][
                        : max(2 * _TARGETS - len(wants), 0)
                    ]
        return chance

    def with_masks(self, state: State, other: State | None) -> State | None:
        """Return the call with the masks that it may take, if it runs in both sizes: a path of its own."""
        call, sizes = state, [each.named for each in (state, other) if each is not None]
        with untouched_randomness(self.seed), quiet():
            for parameter in self.arguments.optional if state.wants else ():
                wants = list(itertools.islice(self.arguments.usual(parameter), _MOST_MASKS))
                if wants[0].kind in ("bool", "nowhere") and not state.holds(parameter.name):
                    masked = (call.with_want((parameter.name,), want) for want in wants if want.is_tensor)
                    run = (m for m in masked if not any(self._try(replace(m, named=n), "").failed for n in sizes))
                    call = next(run, call)
        return None if call == state else call

    def _all_rows(self, step: Step) -> Step:
        """Return the step with ids from the whole table that they index."""
        state = step.state
        for path, rows in self._last.rows.items():
            leaf = state.at(path)
            if leaf is not None and leaf.kind == "ids" and leaf.below != rows:
                wider = state.with_want(path, replace(leaf, below=rows))
                if not self._try(wider, f"its table has {rows} rows").failed:
                    state = wider
        return replace(step, state=self._as_floats(state))

    def _as_floats(self, state: State) -> State:
        """Turn integers that index nothing into floats, and those that pick values of their own sizes into masks, if
        the call then runs and reads no fewer weights."""
        rows, read, picking = self._last.rows, self._last.read, self._last.picking
        for path, leaf in state.leaves():
            if leaf.kind == "ids" and path in picking:
                mask = state.with_want(path, replace(leaf, kind="bool"))
                if not self._try(mask, "it picks values of its own sizes").failed and self._last.read >= read:
                    state = mask
            elif leaf.kind in ("ids", "bool", "nowhere") and path not in rows:
                floats = state.with_want(path, replace(leaf, kind="float"))
                if not self._try(floats, "it looks nothing up").failed and self._last.read >= read:
                    state = floats
        return state

    def _try(self, state: State, why: str, *, training: bool = False) -> Step:
        """Run a state once. It is deterministic, since the random numbers are seeded."""
        self.seen.add(state)
        twin = self._twin_for()[1]
        for held, attributes in self._attributes:  # what another try kept is not this one's
            held.clear()
            held.update(attributes)
        watch = self._last = Watch(twin)
        with in_training(twin) if training else nullcontext():
            error = self._error(state, watch)
        if isinstance(error, Exception) and not self.real and depends_on_data(error):
            error = None  # shapes alone show no failure
        failure = self._failure = None if error is None else Failure(state, error, watch, self.arguments)
        self.untraceable = failure is not None and failure.is_untraceable
        place = failure.places[-1] if failure is not None and failure.places else None
        step = Step(
            state,
            why,
            len(watch.steps),
            f"{type(error).__name__}: {failure.first_line[:200]}" if failure is not None else "",
            f"{place.where}: {place.text}" if place is not None else "",
            frozenset(watch.read),
            isinstance(error, NotFiniteError),
        )
        self.steps.append(step)
        if failure is None:
            self.compared |= watch.compared
            if not training:
                self.ran[state] = step
        return step

    def _error(self, state: State, watch: Watch) -> Exception | None:
        mode, twin = self._twin_for()
        torch.default_generator.manual_seed(self.seed)
        try:
            values = state.draw(self.seed, self.dtype)
            with refusing_outsiders(twin), where_it_runs(twin), torch.no_grad():
                if mode is None:
                    with watch.over(values):
                        result = call_with(twin, values)
                    return self._not_a_result(result, watch)
                with mode:
                    faked = {name: own(value) for name, value in values.items()}
                    with watch.over(faked):
                        call_with(twin, faked)
        except OutsideError:
            raise
        except Exception as error:  # the user's forward, run on a guess, may raise anything
            return error
        return None

    def _not_a_result(self, result: Any, watch: Watch) -> Exception | None:
        """Return an error for a run that read no weight, or whose result is not finite: it shows nothing."""
        scripted = any(isinstance(module, torch.jit.ScriptModule) for module in self.model.modules())
        if watch.names and not watch.read and not scripted:  # compiled code does not show what it reads
            return NothingRead()
        values = (each for _, each in flatten_tensors(result) if each.is_floating_point() and each.numel() < 10_000_000)
        finite = all(torch.isfinite(each).all() for each in values)
        return None if finite else NotFiniteError("its result is not finite")

    def _twin_for(self) -> tuple[FakeTensorMode | None, nn.Module]:
        if self._twin is None:
            # A model may count its blocks, but a large one must do with a few of each kind.
            real = (None, with_storage(self.model)) if self.real else None
            self._twin = real or without_storage(self.model)
            modules = [vars(module) for module in self._twin[1].eval().modules()]
            dicts = [*modules, *(own["_buffers"] for own in modules if isinstance(own.get("_buffers"), dict))]
            self._attributes = [(held, dict(held)) for held in dicts]
        return self._twin

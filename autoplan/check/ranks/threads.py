"""Ranks as threads of one process, on torch's threaded process group.

Torch's state per process is replaced by `patches/simulated_ranks.py`; this file starts, watches and ends ranks.

Threads share what processes do not, so each rank gets its own: the process-group world, the registries behind
functional collectives, the random generators of torch, numpy and Python, and backward passes that stay in the rank's
thread. A process group that exists in this process is set aside for the run and put back after it; only *other* Python
threads of the process must not start collectives meanwhile. Default dtype, warnings filters and monkeypatches stay
shared; two ranks whose forward sets the first two for its own duration may leave them set, so they are put back.

If a rank raises, the others leave their collectives, and the caller sees the exception. Ranks that wait for each other
in different collectives are noticed after a few seconds, long before the time limit.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autoplan.capture.dry_run import enter_first_in_a_lasting_thread
from autoplan.check.ranks.common import RankError, RankTimeout, one_compute_thread
from autoplan.common.errors import AutoplanError
from autoplan.common.torch_internals import DispatchMode
from autoplan.patches import simulated_ranks
from autoplan.patches.seeding import RankGenerator
from autoplan.patches.simulated_ranks import ProcessLocalGroup, generator_per_thread, host_generators, world_per_thread

Result = TypeVar("Result")

_LOOK_EVERY = 0.05  # seconds
STUCK_AFTER = 5.0  # seconds in which every rank stays in the collective it waits in
GRACE = 2.0  # seconds a woken rank has to leave

_MACHINERY = ("threading.py", "threads.py")
_one_run = threading.Lock()
_random = threading.Lock()
_unstoppable: list[threading.Thread] = []


class _ThisRank(threading.local):
    """State of the current thread: a rank with a generator and open collective counters, or no rank at all."""

    generator: torch.Generator | None = None
    host: tuple[random.Random, numpy.random.RandomState] | None = None
    counters: list[Counter[str]] = []  # noqa: RUF012  each rank's thread sets its own
    listeners: list[Callable[[str, int], None]] = []  # noqa: RUF012  likewise
    rank: _Rank | None = None


_this = _ThisRank()


@dataclass
class _Rank:
    """One rank's thread and its outcome."""

    thread: threading.Thread
    result: Any = None
    error: BaseException | None = None
    woken: bool = False  # left its collective only because another rank had failed
    ended: float = 0.0
    waits: object = None  # the collective it waits in: another object each time. The rank sets it, since frames of a
    # running thread must not be read from another one: they may be freed meanwhile, which crashes Python


def run_threads(fn: Callable[[int], Result], world_size: int, timeout: float) -> list[Result]:
    """Run `run_ranks` with one thread per rank."""
    if _this.generator is not None:
        raise AutoplanError("run_ranks was called from inside a simulated rank", hint="call it outside")
    enter_first_in_a_lasting_thread()  # DTensor enters fake modes in ranks' threads
    with _one_run:
        _unstoppable[:] = [thread for thread in _unstoppable if thread.is_alive()]
        if _unstoppable:
            raise RankTimeout(f"{len(_unstoppable)} ranks of an earlier run still run", hint="start a new process")
        ranks: list[_Rank] = []
        state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
        own_generators = generator_per_thread(lambda: _this.generator), host_generators(lambda: _this.host)
        with ExitStack() as stack:
            for context in (world_per_thread(), one_compute_thread(), *own_generators):
                stack.enter_context(context)
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            stack.callback(setattr, warnings, "filters", warnings.filters)
            simulated_ranks.know_backend(_make_group)
            store = dist.HashStore()  # in memory: through it the ranks of this process meet
            for number in range(world_size):
                body = _Body(fn, number, world_size, store, state, timeout, ranks)
                ranks.append(_Rank(threading.Thread(target=body, daemon=True, name=f"autoplan rank {number}")))
            for rank in ranks:
                rank.thread.start()
            try:
                late = _wait(ranks, timeout)
            except BaseException:  # an interrupt must leave no rank behind
                _stop(ranks)
                raise
        failed = [(each.ended, place) for place, each in enumerate(ranks) if each.error is not None and not each.woken]
        if failed:  # the first of them is the cause
            number = min(failed)[1]
            raise RankError(number, len(ranks), ranks[number].error or "") from ranks[number].error
        if late:
            raise RankTimeout(late, hint="every rank must issue the same collectives in the same order")
        assert all(rank.error is None for rank in ranks), "a rank was woken although none had failed"
        return [rank.result for rank in ranks]


@dataclass
class _Body:
    """The body of one thread: join the group, run `fn` with its own generators, record the outcome, leave the group."""

    fn: Callable[[int], Any]
    number: int
    world_size: int
    store: Any
    state: tuple[torch.Tensor, Any, Any]  # of torch's generator, Python's and numpy's
    timeout: float
    ranks: list[_Rank]

    def __call__(self) -> None:
        rank = self.ranks[self.number]
        _this.generator, _this.counters, _this.listeners, _this.rank = RankGenerator(), [], [], rank
        _this.host = random.Random(), numpy.random.RandomState()
        own, (first, second, third) = _this.host, self.state
        _this.generator.set_state(first)
        own[0].setstate(second)
        own[1].set_state(third)
        torch.set_num_threads(1)
        torch.autograd.set_multithreading_enabled(False)  # or backward collectives leave this thread
        try:
            limit = timedelta(seconds=self.timeout)
            dist.init_process_group(
                simulated_ranks.BACKEND, rank=self.number, world_size=self.world_size, store=self.store, timeout=limit
            )
            with _RankOps():
                rank.result = self.fn(self.number)
        except BaseException as error:  # raised by the caller
            rank.woken = isinstance(error, SystemExit) and ProcessLocalGroup._terminate.is_set()
            rank.error = error
            _wake()
        finally:
            rank.ended = time.monotonic()
            if dist.is_initialized():
                dist.destroy_process_group()
            _this.generator = _this.host = None


# Wait for ranks, and end them


def _wait(ranks: list[_Rank], timeout: float) -> str:
    """Wait until every rank has ended; return why some did not, or ""."""
    start, still = time.monotonic(), 0
    seen: dict[int, object] = {}
    while alive := {number: rank for number, rank in enumerate(ranks) if rank.thread.is_alive()}:
        next(iter(alive.values())).thread.join(_LOOK_EVERY)
        places = {number: rank.waits for number, rank in alive.items()}
        # counted in rounds, not by the clock: on a busy machine this thread is as slow as the ranks are
        still = still + 1 if places == seen and None not in places.values() else 0
        seen = places
        stuck = still * _LOOK_EVERY > STUCK_AFTER
        if stuck or time.monotonic() - start > timeout:
            why = "wait in collectives that the others never enter" if stuck else f"did not finish in {timeout:g} s"
            text = f"simulated ranks {why}: {_whereabouts(alive)}"
            _stop(ranks)
            return text
    return ""


def _whereabouts(alive: dict[int, _Rank]) -> str:
    """Return the innermost line of each of these ranks outside the machinery."""
    frames, lines = sys._current_frames(), []
    for number, rank in alive.items():
        frame = frames.get(rank.thread.ident or -1)
        if frame is None:
            continue
        steps = traceback.extract_stack(frame)
        own = [step for step in steps if not step.filename.endswith(_MACHINERY) and "/torch/" not in step.filename]
        own = own or steps
        lines.append(f"rank {number} at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}")
    return "; ".join(lines)


def _wake() -> None:
    """Send every waiting rank out of its collective (it raises SystemExit there)."""
    ProcessLocalGroup._terminate.set()
    with ProcessLocalGroup._coll_lock:
        waiting = list(ProcessLocalGroup._cur_coll_on_pgs.values())
    for collective in waiting:
        for condition in (collective._start_cond, collective._done_cond):
            with condition:
                condition.notify_all()


def _stop(ranks: list[_Rank]) -> None:
    """End every rank; one that loops outside collectives cannot be stopped and is remembered."""
    _wake()
    for rank in ranks:
        rank.thread.join(GRACE)
        if rank.thread.is_alive():
            _unstoppable.append(rank.thread)


# What each op of a rank needs: its own random state, and arguments that do not end the process


@cache
def _is_attention(op: Any) -> bool:
    """Return whether it is fused attention, whose kernel on CPU reads beyond keys that are fewer than the values."""
    return "scaled_dot_product" in str(op) and "backward" not in str(op)


class _RankOps(DispatchMode):
    """Lends the default generator, in this rank's state, to one random op at a time: ops use no other one."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # may communicate: lock only for the local op inside, or it would deadlock
        if _is_attention(func) and args[1].shape[-2] != args[2].shape[-2]:
            raise RuntimeError(f"attention takes {args[1].shape[-2]} keys, but {args[2].shape[-2]} values")
        drawing = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if not drawing or kwargs.get("generator") is not None or _this.generator is None:
            return func(*args, **kwargs)
        with _random:
            outside = torch.default_generator.get_state()
            torch.default_generator.set_state(_this.generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                _this.generator.set_state(torch.default_generator.get_state())
                torch.default_generator.set_state(outside)


# Count collectives

_KINDS = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "all_gather": ("allgather",),
    "reduce_scatter": ("reduce_scatter",),
    "all_to_all": ("alltoall", "all_to_all_single", "alltoall_base"),
    "broadcast": ("broadcast",),
}


class _CountingGroup(ProcessLocalGroup):
    """The threaded group; each collective is counted where it is issued, whatever API was used."""


def _noted(plain: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Wrap a collective: count its kind, unless "", and record that the rank waits in it."""

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kind:
            for counter in _this.counters:
                counter[kind] += 1
            for listener in _this.listeners:
                listener(kind, _whole_bytes(kind, args, self.size()))
        rank = _this.rank
        if rank is None:
            return plain(self, *args, **kwargs)
        before, rank.waits = rank.waits, object()
        try:
            return plain(self, *args, **kwargs)
        finally:
            rank.waits = before

    return noted


def _whole_bytes(kind: str, args: Any, size: int) -> int:
    """Return the bytes of the full value that a collective sums, gathers or scatters."""
    if kind == "all_gather":
        return size * sum(tensor.nbytes for tensor in args[1])
    return sum(tensor.nbytes for tensor in args[0]) * (size if kind == "reduce_scatter" else 1)


_kind_of = {method: kind for kind, methods in _KINDS.items() for method in methods}
for _method, _plain in list(vars(ProcessLocalGroup).items()):
    if isinstance(_plain, FunctionType) and not _method.startswith("__") and _method not in ("size", "getBackendName"):
        setattr(_CountingGroup, _method, _noted(_plain, _kind_of.get(_method, "")))


def _make_group(store: Any, rank: int, world_size: int, timeout: timedelta) -> ProcessLocalGroup:
    dist.distributed_c10d._store_based_barrier(rank, store, "", world_size, timeout)  # subgroups are made in any order
    return _CountingGroup(rank, world_size)


class _DispatchCounter(DispatchMode):
    """Counts collectives of real process groups in the dispatcher."""

    supports_higher_order_operators = True

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            name = func.overloadpacket.__name__.replace("_", "")
            kind = next((kind for kind in _KINDS if name.startswith(kind.replace("_", ""))), None)
            if kind:
                self.counts[kind] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count collectives (see `ranks.count_collectives`)."""
    counts: Counter[str] = Counter()
    if _this.generator is None:
        with _DispatchCounter(counts):
            yield counts
        return
    _this.counters.append(counts)
    try:
        yield counts
    finally:
        _this.counters.remove(counts)


@contextmanager
def listening(listener: Callable[[str, int], None]) -> Iterator[None]:
    """Call the listener with the kind and bytes of each collective that this simulated rank issues inside."""
    _this.listeners.append(listener)
    try:
        yield
    finally:
        _this.listeners.remove(listener)

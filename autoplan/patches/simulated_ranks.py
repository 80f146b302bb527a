"""Patches to run several ranks in one process."""

from __future__ import annotations

import functools
import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, ThreadLocalWorld

from autoplan.common.errors import CaptureError
from autoplan.patches.patched import Place, owns, patch, patched

# Models that use torch.distributed themselves, while a plan is made for them.
#
# The problem: code of routed experts reads the number of ranks and exchanges tokens with them. When one rank plans, the
# others do not join that exchange, and it hangs; on simulated ranks its own parallelism would be added to ours. So
# while a plan is made, the model's code sees no process group. The caller is known by its file: torch and autoplan
# themselves get the real answers.

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_ANSWERS: dict[str, Any] = {"is_initialized": False, "get_world_size": 1, "get_rank": 0}
_NOTHING = ("all_reduce", "broadcast", "barrier", "reduce")  # no-ops on a single rank
_REFUSED = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "broadcast_object_list", "gather", "irecv", "isend", "new_group", "recv", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip


@patch(
    name="process group",
    replaces="torch.distributed.is_initialized, get_rank, get_world_size and the collectives, for callers in the model",
    why="a model that communicates itself hangs if one rank plans, and its own parallelism would be planned too",
    scope="while a plan is made and verified",
    undone="the functions are restored",
)
def process_group_patch() -> bool:
    """Return whether these functions are in torch.distributed, through which models call them."""
    return all(callable(vars(dist).get(name)) for name in (*_ANSWERS, *_NOTHING, *_REFUSED))


@contextmanager
def alone() -> Iterator[set[str]]:
    """Hide the process group from the model's code; yield the names of what it calls, as it does."""
    called: set[str] = set()
    _listeners.append(called)
    places = (Place(dist, name, _made(name)) for name in (*_ANSWERS, *_NOTHING, *_REFUSED))
    try:
        with patched(process_group_patch, places):
            yield called
    finally:
        _listeners[:] = [listener for listener in _listeners if listener is not called]


_listeners: list[set[str]] = []


def _made(name: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def instead(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_code.co_filename.startswith(_OURS):
                return original(*args, **kwargs)
            for listener in _listeners:
                listener.add(name)
            if name in _ANSWERS:
                return _ANSWERS[name]
            if name in _NOTHING:
                return None
            raise CaptureError(
                f"the model's forward calls torch.distributed.{name} itself, although no process group is initialized",
                hint="call it only if torch.distributed.is_initialized(), which is False while a plan is made",
            )

        return instead

    return make


# Per-thread versions of what torch keeps once per process.
#
# Ranks that are threads of one process share the process-group world, DTensor's shape propagation, and the generators
# of torch, numpy and Python. While they run, torch gets a world per thread, propagates one shape at a time, and uses
# generators that depend on the calling rank; the originals are set aside, even a live process group.


_ASKS = "_propagate_tensor_meta_non_cached"  # runs an op on full tensors without storage
_asking = threading.RLock()  # reentrant: shape propagation may recurse
_shapes: dict[Any, Any] = {}


def _one_at_a_time(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ask once for an op and its arguments. torch's own cache compares meshes too, which are new in each run."""

    @functools.wraps(original)
    def ask(propagator: Any, schema: Any) -> Any:
        key = schema.op, torch.get_default_dtype(), _by_value((schema.args_schema, tuple(schema.kwargs_schema.items())))
        with _asking:
            try:
                if key not in _shapes:
                    _shapes[key] = original(propagator, schema)
                return _shapes[key]
            except TypeError:  # a size that is a symbol has no hash
                return original(propagator, schema)

    return ask


def _by_value(value: Any) -> Any:
    """Return what to compare arguments by. 1, 1.0 and True are equal, but promote dtypes differently."""
    if isinstance(value, (tuple, list)):
        return type(value), *map(_by_value, value)
    return type(value), getattr(value, "tensor_meta", value)


_making = threading.RLock()


def _made_once(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Create the Python object of an op once. torch creates it at first use, and dispatch keeps a bare pointer to it.
    If two threads create one, the first is replaced and freed: a segmentation fault."""

    @functools.wraps(original)
    def made(holder: Any, name: str) -> Any:
        with _making:
            return vars(holder)[name] if name in vars(holder) else original(holder, name)

    return made


class _WorldPerThread(ThreadLocalWorld):
    """torch's world for threads, with an attribute that torch 2.11 reads and this class lacks."""

    @property
    def comms(self) -> list[Any]:
        return []  # communicators of another library: there are none


@contextmanager
def world_per_thread() -> Iterator[None]:
    """Swap in a world and registries for one thread per rank; restore the old ones after. Each process group made
    meanwhile also wraps `sys.excepthook` to print its rank: that is undone, too."""
    ProcessLocalGroup.reset()
    if len(_shapes) > 10_000:
        _shapes.clear()
    excepthook = sys.excepthook
    places = [
        Place(dist.distributed_c10d, "_world", lambda _: _WorldPerThread()),
        Place(ShardingPropagator, _ASKS, _one_at_a_time),
        *(Place(kind, "__getattr__", _made_once) for kind in (type(torch.ops.aten), type(torch.ops.aten.add))),
    ]
    with patched(world_patch, places):
        c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
            sys.excepthook = excepthook


def asks_for_a_shape() -> bool:
    """Return whether this thread propagates a shape for DTensor, by an op on full tensors without storage. It holds the
    lock meanwhile; results are cached, so only the first such op of a process is run."""
    return owns(_asking)


class _GeneratorOfThisThread:
    """A stand-in for torch's CPU generator in `torch.random`: a rank gets its own, any other thread the real one."""

    def __init__(self, real: torch.Generator, own: Callable[[], torch.Generator | None]) -> None:
        self._real, self._own = real, own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own() or self._real, name)


@contextmanager
def generator_per_thread(own: Callable[[], torch.Generator | None]) -> Iterator[None]:
    """Make `torch.manual_seed`, `get_rng_state` and the like use the calling thread's own generator, if it has one."""
    place = Place(torch.random, "default_generator", lambda real: _GeneratorOfThisThread(real, own))
    with patched(generator_patch, [place]):
        yield


@contextmanager
def host_generators(own: Callable[[], tuple[random.Random, numpy.random.RandomState] | None]) -> Iterator[None]:
    """Make `random.random`, `numpy.random.rand` and the like draw from the calling thread's own generators, if it has
    any.

    Ranks that are processes each have their own. Names that were imported before (`from random import random`) keep
    using the generator of the process.
    """

    def stand_in(at: int, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            generator = (own() or (None, None))[at]
            function = real if generator is None else getattr(generator, real.__name__)
            return function(*args, **kwargs)

        return call

    modules: tuple[tuple[Any, type], ...] = ((random, random.Random), (numpy.random, numpy.random.RandomState))
    places = [
        Place(module, name, functools.partial(stand_in, at))
        for at, (module, kind) in enumerate(modules)
        for name in vars(module)  # functions that are methods of the generator, too
        if name.islower() and name[0] != "_" and callable(getattr(kind, name, None))
    ]
    with patched(host_generators_patch, places):
        yield


@patch(
    name="world of simulated ranks",
    replaces="torch.distributed.distributed_c10d._world, "
    f"torch.distributed.tensor._sharding_prop.ShardingPropagator.{_ASKS}, __getattr__ of torch.ops.aten and of its ops",
    why="each thread-based rank needs its own process-group world; DTensor propagates shapes in one thread "
    "only; two threads must not create the Python object of one op",
    scope="while simulated ranks run",
    undone="the world, with any live process group, and the methods are restored",
)
def world_patch() -> bool:
    """Return whether torch looks its world up each time, every thread has its own, and ops are cached."""
    real, asks = dist.distributed_c10d._world, getattr(ShardingPropagator, _ASKS)
    with world_per_thread():
        inside = dist.distributed_c10d._world
        ours = getattr(ShardingPropagator, _ASKS)
        one_at_a_time = ours is not asks and list(inspect.signature(ours).parameters) == ["self", "op_schema"]
        alone = not dist.is_initialized() and dist.group.WORLD is None
        once = torch.ops.aten.promote_types.default is torch.ops.aten.promote_types.default
        parts: list[object] = [inside.pg_map]
        other = threading.Thread(target=lambda: parts.append(inside.pg_map))
        other.start()
        other.join()
    back = dist.distributed_c10d._world is real and getattr(ShardingPropagator, _ASKS) is asks
    return one_at_a_time and alone and once and back and parts[0] is not parts[1]


@patch(
    name="generator of simulated ranks",
    replaces="torch.random.default_generator",
    why="seeding or reading the CPU generator on one rank must not affect another",
    scope="while simulated ranks run",
    undone="torch's generator is restored",
)
def generator_patch() -> bool:
    """Return whether torch's functions for CPU randomness use `torch.random.default_generator`."""
    mine, before = torch.Generator(), torch.get_rng_state()
    with generator_per_thread(lambda: mine):
        torch.manual_seed(7)
        inside, seed = torch.get_rng_state(), torch.initial_seed()
        torch.set_rng_state(inside)
    theirs = torch.equal(torch.get_rng_state(), before)
    return theirs and seed == 7 == mine.initial_seed() and torch.equal(inside, mine.get_state())


@patch(
    name="host generators of simulated ranks",
    replaces="the functions of random and numpy.random that draw from the generator of the process",
    why="draws of Python's or numpy's generators must not depend on the order of the ranks' threads",
    scope="while simulated ranks run",
    undone="the modules' functions are restored",
)
def host_generators_patch() -> bool:
    """Return whether the functions of `random` and `numpy.random` are methods of one generator each, called by name."""
    mine = random.Random(7), numpy.random.RandomState(7)
    before = random.getstate(), numpy.random.get_state()[1].copy()  # type: ignore[index]
    with host_generators(lambda: mine):
        inside = random.random(), random.randint(0, 9), numpy.random.rand(), numpy.random.randint(9)
    again = random.Random(7), numpy.random.RandomState(7)
    same = inside == (again[0].random(), again[0].randint(0, 9), again[1].rand(), again[1].randint(9))
    after = random.getstate(), numpy.random.get_state()[1]  # type: ignore[index]
    return same and after[0] == before[0] and bool((after[1] == before[1]).all())


# torch creates a process group by the name of its backend, and cannot unregister one. So it is registered when such
# ranks first run, not when the package is imported, and nothing else uses the name.
BACKEND = "autoplan_threads"


def know_backend(make: Callable[..., Any], name: str = BACKEND) -> None:
    """Make torch create process groups of this name by `make` (store, rank, number of ranks, timeout) from now on."""
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, make, devices=["cpu"])


@patch(
    name="backend of simulated ranks",
    replaces="nothing: torch.distributed.Backend.register_backend adds a backend name",
    why="thread-based ranks have their own type of process group, which counts messages",
    scope="from the first run of simulated ranks on",
    undone="not undone: torch cannot unregister a backend, and nothing else uses this name",
)
def rank_backend_patch() -> bool:
    """Return whether a registered backend is known by its name alone, and not the default of a device that had one."""
    before, name = dict(dist.Backend.default_device_backend_map), f"{BACKEND}_canary"
    know_backend(lambda *given: None, name)
    return name in dist.Backend.backend_list and dist.Backend.default_device_backend_map == before

"""Patches that make runs comparable: seeds that ranks share, and double precision."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoplan.patches.patched import Hold, Patch, Place, hold

# Notice when a rank is seeded, without writing anything into its generators.
#
# The problem: ranks share one stream of random numbers, and must agree on it again after seeding, which happens on all
# of them at once; draws of a single rank do not count. A generator's state does not distinguish the two, and a mark in
# it would be visible to others: data loaders seed from `torch.initial_seed()`. So torch's seeding functions are
# wrapped. Each call gives the rank's generators a new number; a state that is restored, as `fork_rng` and checkpoints
# do, has the number under which it was taken.

_NAMES = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "get_rng_state")


class _Seedings:
    """The number of the present seeding of one rank's generators, and the count of seedings."""

    def __init__(self) -> None:
        self.now = self.made = 0


class RankGenerator(torch.Generator):
    """The generator of one simulated rank."""

    def __init__(self) -> None:
        self.seedings = _Seedings()


_of_process = _Seedings()
_of_state: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # by the id of a state that is still referenced


def watch_seeding() -> Hold:
    """Watch seeding until the hold is released."""
    holders = [(holder, name) for holder in (torch, torch.random, torch.cuda, torch.cuda.random) for name in _NAMES]
    return hold(SEEDING, [Place(holder, name, _noting) for holder, name in holders if name in vars(holder)])


def seeding() -> int:
    """Return the number of this rank's present seeding."""
    return _mine().now


def note_seed() -> None:
    """Give this rank's generators a new number after seeding."""
    mine = _mine()
    mine.made += 1
    mine.now = mine.made


def is_simulated() -> bool:
    """Return whether this thread is a simulated rank, with a generator of its own in torch's place."""
    return isinstance(torch.random.default_generator.get_state.__self__, RankGenerator)


def _mine() -> _Seedings:
    generator = torch.random.default_generator.get_state.__self__
    return generator.seedings if isinstance(generator, RankGenerator) else _of_process


def _noting(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def noting(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        if plain.__name__ == "get_rng_state":
            _keep(result)
            return result
        restored = _known(args[0] if args else kwargs.get("new_state")) if plain.__name__ == "set_rng_state" else None
        if restored is None:
            note_seed()
        else:
            _mine().now = restored
        return result

    return noting


def _keep(state: torch.Tensor) -> None:
    """Remember under which seeding a state was taken, as long as it is referenced."""
    key = id(state)
    _of_state[key] = weakref.ref(state, lambda _: _of_state.pop(key, None)), seeding()


def _known(state: Any) -> int | None:
    record = _of_state.get(id(state))
    return record[1] if record is not None and record[0]() is state else None


def _canary() -> bool:
    """Return whether these functions seed and restore the generator in torch.random, and a fork restores it."""
    with torch.random.fork_rng(devices=()):
        with watch_seeding():
            before = seeding()
            torch.manual_seed(7)
            seeded = seeding()
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(7)
                inside = seeding()
            after = seeding()
            torch.set_rng_state(torch.get_rng_state().clone())
        first = next(iter(inspect.signature(torch.set_rng_state).parameters))
        return len({before, seeded, inside, seeding()}) == 4 and after == seeded and first == "new_state"


SEEDING = Patch(
    name="seeding of ranks",
    replaces=f"{', '.join(_NAMES)} of torch, torch.random, torch.cuda and torch.cuda.random",
    why="ranks re-synchronise their random stream after seeding, which the state of a generator does not show",
    scope="while a model sharded by `parallelize` that may draw random numbers is alive",
    undone="torch's functions are restored when the last such model is collected",
    canary=_canary,
)


# Double precision throughout: computations in single precision inside a model are lifted too.
#
# Norms, softmax, routers and rotary tables often compute in float32 whatever the model's dtype. In a float64 check that
# leaves rounding errors of 1e-7, and where large terms cancel (a gradient that is otherwise zero) they look like an
# error of 1e-4. So while a float64 model is checked, every request for float32 gets float64.


class Lifted(TorchFunctionMode):
    """A mode in which `.float()`, `.to(torch.float32)` and `dtype=torch.float32` mean float64. So does a tensor made of
    a number: the least float64, as in masks, overflows in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(_lifted(value) for value in args)
        named = {name: _lifted(value) for name, value in (kwargs or {}).items()}
        if func in (torch.tensor, torch.as_tensor, torch.full) and any(isinstance(value, float) for value in args):
            named.setdefault("dtype", torch.float64)
        return func(*args, **named)


def _lifted(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _double_precision_canary() -> bool:
    """Return whether all ways to request float32 pass a function mode."""
    x = torch.ones(2, dtype=torch.float64)
    with Lifted():
        results = (x.float(), x.to(torch.float32), x.sum(dtype=torch.float32), torch.full((1,), 0.5), torch.tensor(0.5))
    return all(result.dtype == torch.float64 for result in results) and x.float().dtype == torch.float32


DOUBLE_PRECISION = Patch(
    name="double precision",
    replaces="torch.float32 in calls of torch functions, by torch.float64 (a torch function mode)",
    why="float32 computations inside a float64 model would look like errors of the plan",
    scope="while a float64 model is checked",
    undone="the mode is exited",
    canary=_double_precision_canary,
)

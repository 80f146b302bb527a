"""Inputs for a plain module, from its forward's signature and from the first consumer of each required argument.

Nothing says what `forward(x)` takes, but the code does: an embedding wants ids below its rows, a linear floats of its
in-features, a convolution channels. So a copy without storage is run on a guess, watched until an operation with a
weight consumes an argument; what that operation wants is the next guess. Where no such operation tells (masks, time
steps), a short list of usual shapes is tried. At most a few dozen runs, each without storage.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

import torch
from torch import nn

from autoplan.capture.consumers import Want, Watch
from autoplan.capture.draw import Draw
from autoplan.capture.dry_run import SMALL, depends_on_data, own, quiet, with_storage, without_storage
from autoplan.capture.outside import refusing_outsiders
from autoplan.common.dtypes import working_dtype
from autoplan.common.errors import CaptureError, OutsideError
from autoplan.common.random_values import untouched_randomness

__all__ = ["derive"]

_MOST_RUNS = 60
_PLAIN = {int: 0, float: 1.0, bool: False, "int": 0, "float": 1.0, "bool": False}


@dataclass
class _Guess:
    """What is believed about one argument: `wants` are tried in order, from `index`."""

    wants: list[Want]
    index: int = 0
    known: bool = False  # a consumer said so
    past: list[Want] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    @property
    def want(self) -> Want:
        return self.wants[self.index]


def derive(model: nn.Module, batch: int, length: int, seed: int, *, first: bool = False) -> dict[str, Any]:
    """Keyword arguments for one forward. Raises CaptureError that names the argument nothing is known about.

    `first`: the first argument is given even if it may be left out.
    """
    fixed, guesses = _arguments(model, first)
    if not guesses:
        return fixed
    trial = _Trial(model, fixed, batch, length, seed)
    with untouched_randomness(seed), quiet():
        failure = trial.settle(guesses)
    if failure is None:
        return trial.draw(guesses)
    name = trial.blamed if trial.blamed in guesses else next(iter(guesses))
    told = guesses[name].seen
    known = f" ({told[-1]})" if told else ""
    wanted = ", ".join(f"{n!r}: ..." for n in guesses)
    raise CaptureError(
        f"no input could be derived for argument {name!r} of {type(model).__name__}.forward{known}: after {trial.runs} "
        f"tries the nearest still ends in {type(failure).__name__}: {_first_line(failure)}",
        hint=f"pass inputs={{{wanted}}} with tensors, or let the builder return them",
    ) from failure


def _arguments(model: nn.Module, first: bool) -> tuple[dict[str, Any], dict[str, _Guess]]:
    """Required arguments: plain values for annotated numbers, guesses for the rest."""
    fixed: dict[str, Any] = {}
    guesses: dict[str, _Guess] = {}
    parameters = inspect.signature(model.forward).parameters.values()
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is not parameter.empty and not (first and parameter is next(iter(parameters))):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise CaptureError(
                f"argument {parameter.name!r} of {type(model).__name__}.forward is positional-only",
                hint="entries are keyword arguments; wrap the model in a module whose forward names its arguments",
            )
        if parameter.annotation in _PLAIN:
            fixed[parameter.name] = _PLAIN[parameter.annotation]
        else:
            guesses[parameter.name] = _Guess(_usual(len(guesses) == 0))
    stars = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    if stars and not guesses:
        raise CaptureError(
            f"{type(model).__name__}.forward takes *{stars[0]} only",
            hint="wrap the model in a module whose forward names its arguments, or pass inputs={...}",
        )
    return fixed, guesses


def _usual(first: bool) -> list[Want]:
    """What arguments usually are, when no consumer tells."""
    tokens, steps = Want("ids", ("batch", "length")), Want("float", ("batch",))
    rest = [Want("ids", ("batch",)), Want("float", ("batch", "length")), Want("float", ("batch", "length", "width"))]
    mask = [Want("bool", ("batch", "length")), Want("bool", ("length", "length")), Want("none", ())]
    return [tokens, steps, *rest, *mask] if first else [tokens, steps, rest[0], *mask[:2], *rest[1:], mask[2]]


class _Trial:
    """Runs of a copy of the model on guessed inputs: without storage, or real where Python looks at the values."""

    def __init__(self, model: nn.Module, fixed: dict[str, Any], batch: int, length: int, seed: int):
        self.model, self.fixed, self.batch, self.length, self.seed = model, fixed, batch, length, seed
        self.dtype = working_dtype(model)
        self.grids = _grids(model)
        self.runs, self.blamed = 0, ""
        self.mode: AbstractContextManager[Any]
        self.mode, self.twin = without_storage(model)

    def settle(self, guesses: dict[str, _Guess]) -> Exception | None:
        """Refine the guesses until a run ends; the most telling failure when none does."""
        telling: Exception | None = None
        while self.runs < _MOST_RUNS:
            self.runs += 1
            watch = Watch({name: guess.want.shape for name, guess in guesses.items()}, self.grids)
            failure = self._run(guesses, watch)
            learnt = self._learn(guesses, watch)
            if failure is None and not learnt:
                return None
            if failure is None or learnt:
                continue
            if depends_on_data(failure) and self._become_real():
                continue
            if telling is None or guesses.get(watch.last, _Guess([])).known:
                telling, self.blamed = failure, watch.last
            if not self._next(guesses, watch.last):
                break
        return telling or CaptureError("the guesses go round in circles")

    def _run(self, guesses: dict[str, _Guess], watch: Watch) -> Exception | None:
        with self.mode, torch.no_grad(), refusing_outsiders(self.twin):
            values = {name: own(value) for name, value in self.draw(guesses).items()}
            try:
                with watch.over({n: v for n, v in values.items() if isinstance(v, torch.Tensor)}, self.twin):
                    self.twin(**values)
            except OutsideError:
                raise
            except Exception as error:  # the user's forward, run on a guess, may raise anything
                return error
        return None

    def _become_real(self) -> bool:
        """Python looks at values (a mask, a length): run a small model for real. False when it already is, or large."""
        large = sum(p.numel() for p in self.model.parameters()) > SMALL
        if large or isinstance(self.mode, nullcontext):
            return False
        self.mode, self.twin = nullcontext(), with_storage(self.model)
        return True

    def _learn(self, guesses: dict[str, _Guess], watch: Watch) -> bool:
        """Take over what consumers said; False when there was nothing new."""
        learnt = False
        for name, wants in watch.wanted.items():
            guess = guesses[name]
            if guess.want in wants or guess.known and set(wants) <= set(guess.past):
                continue
            guess.past += wants
            guess.wants, guess.index, guess.known = list(wants), 0, True
            guess.seen.append(watch.reasons[name])
            learnt = True
        return learnt

    def _next(self, guesses: dict[str, _Guess], last: str) -> bool:
        """Go on to the next possibility of the argument that was touched last, else of any other."""
        for name in [n for n in (last,) if n in guesses] + [n for n in reversed(guesses) if n != last]:
            guess = guesses[name]
            if guess.index + 1 < len(guess.wants):
                guess.index += 1
                return True
        return False

    def draw(self, guesses: dict[str, _Guess]) -> dict[str, Any]:
        """Real CPU tensors for the present guesses."""
        draw = Draw(self.seed, self.dtype)
        widths = [g.want.shape[-1] for g in guesses.values() if g.known and isinstance(g.want.shape[-1], int)]
        sizes = {"batch": self.batch, "length": self.length, "width": widths[0] if widths else 16}
        return {**self.fixed, **{name: guess.want.make(draw, sizes) for name, guess in guesses.items()}}


def _grids(model: nn.Module) -> tuple[int, ...]:
    """Patches per side that a table of positions would fit: tables have n * n rows, or one or two more."""
    rows = {size for p in model.parameters() if p.dim() >= 2 for size in p.shape[:-1] if size > 3}
    squares = {isqrt(size - more) for size in rows for more in (0, 1, 2) if isqrt(size - more) ** 2 == size - more}
    return tuple(sorted(n for n in squares if 2 <= n <= 64))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")

"""A run that did not end: its error, the model's own frames, and the arguments that it is about."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autoplan.capture.feeding.failures.blame import Place, places_of
from autoplan.capture.feeding.wants import Path, State
from autoplan.capture.feeding.watch import Watch, origin


class NothingRead(ValueError):
    """A run that ended without reading a weight: it went through nothing of what it was given."""

    def __init__(self) -> None:
        super().__init__("it reads no weight")


@dataclass(frozen=True)
class Failure:
    """A run that did not end."""

    state: State
    error: Exception
    watch: Watch

    @cached_property
    def text(self) -> str:
        return str(self.error)

    @cached_property
    def places(self) -> list[Place]:
        return places_of(self.error)

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The arguments that it is about, the surest first; all where nothing tells."""
        call = self.watch.failed
        of_call = [path for tensor in call.tensors() for path in origin(tensor)] if call is not None else []
        of_places = [path for place in reversed(self.places) for path in place.paths()]
        every = [path for path, _ in self.state.leaves()]
        known = [path for path in (*of_call, *of_places, *self.watch.last, *every) if path in every]
        return tuple(dict.fromkeys(known))

    @cached_property
    def blamed(self) -> tuple[Path, ...]:
        """The arguments that the call or the expression that failed was given."""
        call = self.watch.failed
        of_call = [path for tensor in call.tensors() for path in origin(tensor)] if call is not None else []
        of_place = self.places[-1].paths() if self.places else ()
        return tuple(dict.fromkeys(path for path in (*of_call, *of_place) if self.state.at(path) is not None))

    @property
    def first_line(self) -> str:
        return next(iter(self.text.strip().splitlines()), "")

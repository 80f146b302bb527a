"""Replace a thing of another package for a while, and put it back.

The problem: models are recorded in several threads at once, sharded models live side by side, and they end in any
order, some only when garbage is collected. Whoever came first must not take away what another still needs. So what
stands in a place is counted: the first user replaces it, the last one puts the original back.

If someone else has put a thing of theirs over ours meanwhile, theirs stays: to put the original back would take it away
without a word.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CellType
from typing import Any, NamedTuple

from autoplan.common.errors import AutoplanError

__all__ = ["Hold", "Patch", "Place", "hold", "patched"]


@dataclass(frozen=True)
class Patch:
    """A thing of another package that autoplan replaces.

    `replaces`: its dotted path, or what it is. `scope`: how long. `undone`: how it comes back. `where`: our file.
    `canary`: False, or an error, where the installed version has moved or changed it.
    """

    name: str
    replaces: str
    why: str
    scope: str
    undone: str
    where: str
    canary: Callable[[], bool]


# ---------------------------------------------------------------------------------------------------- what stands where


class Place(NamedTuple):
    """An attribute of a module or class, or what a function keeps in its closure, and what is to stand there."""

    holder: Any
    name: str
    make: Callable[[Any], Any]  # from the original

    def now(self) -> Any:
        if isinstance(self.holder, CellType):
            try:
                return self.holder.cell_contents
            except ValueError:  # emptied
                return None
        return vars(self.holder)[self.name]  # not getattr: a static method must come back as one

    def put(self, value: Any) -> None:
        setattr(self.holder, self.name, value)


@dataclass(eq=False)
class _Standing:
    """What was replaced, what stands there now, and how many need it."""

    key: tuple[str, int, str]
    place: Place
    original: Any
    ours: Any
    users: int = 0

    def still_ours(self) -> bool:
        try:
            return self.place.now() is self.ours
        except KeyError:  # someone has deleted it
            return False


@dataclass(eq=False)
class Hold:
    """Keeps replacements standing, until it is released."""

    held: list[_Standing] = field(default_factory=list)

    def release(self) -> None:
        """Put back what nobody else needs. A second time does nothing."""
        with _lock:
            _leave(self)
        _clear_up()

    def until_gone(self, owner: Any) -> None:
        """Release when `owner` is collected, if nobody has done so before."""
        weakref.finalize(owner, _end_later, self).atexit = False


_lock = threading.Lock()
_standing: dict[tuple[str, int, str], _Standing] = {}
_ended: deque[Hold] = deque()  # by garbage collection, and not yet cleared up


def hold(patch: Patch, places: Iterable[Place], *, together: bool = False) -> Hold:
    """Replace what stands in `places`. They may be found as they are asked for: nobody replaces anything meanwhile.

    `together`: keep all else that `patch` has replaced too: a search does not find what another has replaced already.
    """
    mine = Hold()
    with _lock:
        try:
            for one in list(_standing.values()) if together else ():
                if one.key[0] == patch.name:
                    _join(mine, one)
            for place in places:
                _join(mine, _stand(patch, place))
        except BaseException:
            _leave(mine)
            raise
    _clear_up()
    return mine


@contextmanager
def patched(patch: Patch, places: Iterable[Place], *, together: bool = False) -> Iterator[None]:
    """`hold` for the time of a block."""
    mine = hold(patch, places, together=together)
    try:
        yield
    finally:
        mine.release()


def _stand(patch: Patch, place: Place) -> _Standing:
    key = patch.name, id(place.holder), place.name
    found = _standing.get(key)
    if found is None:
        try:
            original = place.now()
        except KeyError as error:
            raise AutoplanError(
                f"{patch.name}: {place.holder!r} has no {place.name!r}, which stands for {patch.replaces}",
                hint="install versions that pyproject.toml allows",
            ) from error
        ours = place.make(original)
        place.put(ours)
        found = _standing[key] = _Standing(key, place, original, ours)
    return found


def _join(mine: Hold, one: _Standing) -> None:
    if one not in mine.held:
        one.users += 1
        mine.held.append(one)


def _leave(mine: Hold) -> None:
    while mine.held:
        one = mine.held.pop()
        one.users -= 1
        if not one.users:
            del _standing[one.key]
            if one.still_ours():
                one.place.put(one.original)


def _end_later(mine: Hold) -> None:
    """Garbage is collected in the middle of anything, also of the code above in this thread: never wait for the lock.

    Whoever has it looks here again after giving it back.
    """
    _ended.append(mine)
    _clear_up()


def _clear_up() -> None:
    while _ended and _lock.acquire(blocking=False):
        try:
            while _ended:
                _leave(_ended.popleft())
        finally:
            _lock.release()

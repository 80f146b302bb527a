"""Replace an attribute of another package for a while, and put it back.

The problem: models are recorded in several threads at once, sharded models exist side by side, and they end in any
order, some only at garbage collection. The first user must not remove what another one still needs. So users of a
replacement are counted: the first one installs it, the last one restores the original.

If someone else has replaced ours meanwhile, theirs stays: restoring the original would silently remove it.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any, NamedTuple, Protocol

from autoplan.common.errors import AutoplanError
from autoplan.common.requirements import untested


def owns(lock: Any) -> bool:
    """Return whether this thread holds an RLock."""
    return bool(lock._is_owned())


class Alone:
    """A lock that runs functions one at a time, and cannot stay locked.

    An interrupt may come at the very line where a lock is released, and the next user would wait for ever. And code
    that runs at garbage collection may run inside the code that has the lock, in the same thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def run(self, work: Callable[[], object], *, wait: bool = True) -> bool:
        """Run `work` and return whether it ran: not if the lock is held by this thread, or by another and `wait` is
        False."""
        if owns(self._lock):
            return False
        try:
            try:
                if not self._lock.acquire(blocking=wait):
                    return False
                work()
            finally:
                self._give_back()
        finally:  # if an interrupt came in the line above
            self._give_back()
        return True

    def _give_back(self) -> None:
        while owns(self._lock):
            self._lock.release()


@dataclass(frozen=True)
class Patch:
    """The description of something in another package that autoplan replaces.

    `replaces`: its dotted path, or what it is. `scope`: how long. `undone`: how it is restored. `canary`: False, or an
    error, where the installed version has moved or changed it. `without`: what does not work if it is left out. Under
    untested versions such a patch is left out, with a warning, if its canary fails; a patch without this text is needed
    for right numbers, and fails. `where`: our file that uses it, if it is not the one of its canary.
    """

    name: str
    replaces: str
    why: str
    scope: str
    undone: str
    canary: Callable[[], bool]
    without: str = ""
    where: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", self.where or self.canary.__module__.replace(".", "/") + ".py")


def patch(
    name: str, replaces: str, why: str, scope: str, undone: str, without: str = "", where: str = ""
) -> Callable[[Callable[[], bool]], Patch]:
    """Make a patch of the function that is its canary."""
    return lambda canary: Patch(name, replaces, why, scope, undone, canary, without, where)


def while_split(name: str, replaces: str, why: str, without: str = "") -> Callable[[Callable[[], bool]], Patch]:
    """Make a patch that lasts as long as parameters lie on ranks of the function that is its canary."""
    scope = "while a model sharded by `parallelize`, or one of its parameters, is alive"
    undone = "torch's own is restored when the last such model is collected or undone"
    return patch(name, replaces, why, scope, undone, without, "autoplan/execute/parameters/optimizer.py")


_INHERITED = object()


class Place(NamedTuple):
    """An attribute of a module or class, or a cell of a closure, and its replacement. `inherited`: a class may inherit
    it; then what was set on the class itself is deleted again."""

    holder: Any
    name: str
    make: Callable[[Any], Any]  # from the original
    inherited: bool = False

    def now(self) -> Any:
        if isinstance(self.holder, CellType):
            try:
                return self.holder.cell_contents
            except ValueError:  # emptied
                return None
        if self.inherited:
            return vars(self.holder).get(self.name, _INHERITED)
        return vars(self.holder)[self.name]  # not getattr: a static method must stay one

    def put(self, value: Any) -> None:
        if value is _INHERITED:
            delattr(self.holder, self.name)
            return
        setattr(self.holder, self.name, value)


_ABSENT = object()


class Registered(NamedTuple):
    """An entry of another package's dict, by its key; or, where `holder` is a set, `key` as its member."""

    holder: Any
    key: Any
    value: Any = True

    @property
    def name(self) -> str:
        return f"{self.key} ({id(self.key)})"

    def make(self, original: Any) -> Any:
        return self.value

    def now(self) -> Any:
        if isinstance(self.holder, set):
            return True if self.key in self.holder else _ABSENT
        return self.holder.get(self.key, _ABSENT)

    def put(self, value: Any) -> None:
        if isinstance(self.holder, set):
            self.holder.discard(self.key) if value is _ABSENT else self.holder.add(self.key)
        elif value is _ABSENT:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


@dataclass(eq=False)
class _Standing:
    """A replacement: the original, ours, and its users."""

    key: tuple[str, int, str]
    place: Place | Registered
    original: Any
    ours: Any
    users: set[Hold] = field(default_factory=set)

    def still_ours(self) -> bool:
        try:
            return self.place.now() is self.ours
        except KeyError:  # someone has deleted it
            return False


@dataclass(eq=False)
class Hold:
    """A user of replacements, until it is released."""

    held: list[_Standing] = field(default_factory=list)

    def __post_init__(self) -> None:
        for notes in list(getattr(_noted, "by", ())):
            notes.holds.append(self)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Restore what no other hold needs. Idempotent."""
        _alone.run(lambda: _leave(self))
        _clear_up()

    def until_gone(self, owner: Any) -> None:
        """Release when `owner` is collected, if it was not released before."""
        weakref.finalize(owner, _end_later, self).atexit = False


class Kept:
    """An object that keeps a hold until the last reference to it is gone. Copies share it."""

    def __init__(self, held: Hold) -> None:
        held.until_gone(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return self


_noted = threading.local()  # of this thread: who notes holds; whether holds are apart
_alone = Alone()
_standing: dict[tuple[str, int, str], _Standing] = {}
_replaced: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # the original of each function of ours
_ended: deque[Hold] = deque()  # ended by garbage collection, not yet cleared up


def hold(patch: Patch, places: Iterable[Place | Registered], *, together: bool = False) -> Hold:
    """Replace what is in `places`. They may be found lazily: nothing is replaced meanwhile.

    `together`: also keep everything else that `patch` has replaced, which a search would not find.
    """
    mine = Hold()
    _fill(mine, patch, places, together)
    return mine


@contextmanager
def patched(patch: Patch, places: Iterable[Place | Registered], *, together: bool = False) -> Iterator[None]:
    """Hold replacements inside the block."""
    mine = Hold()
    with mine:
        _fill(mine, patch, places, together)
        yield


@contextmanager
def apart() -> Iterator[None]:
    """Make holds of this thread share nothing with others: a canary tries a patch that a sharded model may hold."""
    _noted.apart = True
    try:
        yield
    finally:
        _noted.apart = False


def original_of(value: Any) -> Any:
    """Return what a function of ours has replaced, also after it was taken away; anything else as it is."""
    while isinstance(value, FunctionType) and value in _replaced:
        value = _replaced[value]
    return value


class Notes(Protocol):
    """An object that must release the holds made meanwhile."""

    holds: list[Hold]


def note_holds(notes: Notes) -> None:
    """Add every hold that this thread makes to `notes.holds`, as long as `notes` lives, before it holds anything."""
    if not hasattr(_noted, "by"):
        _noted.by = weakref.WeakSet()
    _noted.by.add(notes)


_asked: dict[Callable[[], bool], bool] = {}  # results of the canaries of optional patches


def _is_left_out(patch: Patch) -> bool:
    """Return whether an optional patch is left out: under untested versions its canary decides, once."""
    if not patch.without or not untested():
        return False
    if patch.canary not in _asked:

        def ask() -> None:
            try:
                _asked[patch.canary] = patch.canary()
            except Exception:  # whatever has moved: the patch is left out, with a warning
                _asked[patch.canary] = False

        _asked[patch.canary] = True  # the canary itself uses the patch
        thread = threading.Thread(target=ask)  # a thread without this one's modes
        thread.start()
        thread.join()
        if not _asked[patch.canary]:
            text = f"disabled, since the installed version changed {patch.replaces}: {patch.without}"
            warnings.warn(f"{patch.name}: {text}; see `autoplan doctor`", UserWarning, stacklevel=2)
    return not _asked[patch.canary]


def _fill(mine: Hold, patch: Patch, places: Iterable[Place | Registered], together: bool) -> None:
    if _is_left_out(patch):
        return

    def fill() -> None:
        try:
            for standing in list(_standing.values()) if together else ():
                if standing.key[0] == patch.name:
                    _join(mine, standing)
            for place in places:
                _stand(mine, patch, place)
        except BaseException:  # undo, then raise
            _leave(mine)
            raise

    ran = _alone.run(fill)
    assert ran, "places are located without replacing anything"
    _clear_up()


def _stand(mine: Hold, patch: Patch, place: Place | Registered) -> None:
    """Install ours in a place, or share what is installed. It is recorded first: an interrupt may come in between."""
    name = f"{patch.name}, tried apart" if getattr(_noted, "apart", False) else patch.name
    key = name, id(place.holder), place.name
    present = _standing.get(key)
    if present is not None:
        _join(mine, present)
        return
    try:
        original = place.now()
    except KeyError as error:
        raise AutoplanError(
            f"{patch.name}: {place.holder!r} has no {place.name!r}, which is patched to replace {patch.replaces}",
            hint="`autoplan doctor` lists what changed in the installed versions",
        ) from error
    standing = _Standing(key, place, original, place.make(original))
    _join(mine, standing)
    _standing[key] = standing
    if isinstance(standing.ours, FunctionType):
        _replaced[standing.ours] = original
    place.put(standing.ours)


def _join(mine: Hold, standing: _Standing) -> None:
    if standing not in mine.held:
        mine.held.append(standing)
        standing.users.add(mine)


def _leave(mine: Hold) -> None:
    """Release all replacements. A second call, or one after an interrupt, does what is left."""
    while mine.held:
        standing = mine.held[-1]
        standing.users.discard(mine)
        if not standing.users:
            if standing.still_ours():
                standing.place.put(standing.original)
            _standing.pop(standing.key, None)
        mine.held.pop()


def _end_later(mine: Hold) -> None:
    """Release later: garbage collection may run inside the code above, in this thread, and must never wait for the
    lock. Whoever has it checks again after releasing it."""
    _ended.append(mine)
    _clear_up()


def _clear_up() -> None:
    def leave() -> None:
        while _ended:
            _leave(_ended[0])
            _ended.popleft()

    while _ended and _alone.run(leave, wait=False):
        pass

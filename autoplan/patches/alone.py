"""One thread at a time, and no lock that stays shut: after an interrupt at any line, and in the middle of a collection.

The problem: an interrupt may come at the very line where a lock is given back, and whoever asks next waits for ever.
And what runs when garbage is collected may run inside the code that has the lock, in the same thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Alone"]


class Alone:
    """Runs functions one at a time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def run(self, work: Callable[[], object], *, wait: bool = True) -> bool:
        """Run it, and say whether it ran: not where this thread is in here already, or another one and nobody waits."""
        if self._mine():
            return False
        try:
            try:
                if not self._lock.acquire(blocking=wait):
                    return False
                work()
            finally:
                self._give_back()
        finally:  # an interrupt came in the line above
            self._give_back()
        return True

    def _mine(self) -> bool:
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def _give_back(self) -> None:
        while self._mine():
            self._lock.release()

"""Replacements are counted: whoever comes first does not take away what another still needs."""

from __future__ import annotations

import gc
import threading
from types import ModuleType
from typing import Any

import pytest

from autoplan.common.errors import AutoplanError
from autoplan.patches import patched as machinery
from autoplan.patches.patched import Patch, Place, hold, patched

PATCH = Patch("planted", "library.asked", "for a test", "in a block", "put back", "here", lambda: True)


class Owner:
    """Something that lives for a while."""


@pytest.fixture
def library() -> ModuleType:
    module = ModuleType("library")
    vars(module)["asked"] = "theirs"
    return module


def ours(library: ModuleType) -> Place:
    return Place(library, "asked", lambda original: f"ours for {original}")


def test_blocks_may_nest_and_overlap(library: Any) -> None:
    with patched(PATCH, [ours(library)]):
        with patched(PATCH, [ours(library)]):
            assert library.asked == "ours for theirs"
        assert library.asked == "ours for theirs"
    assert library.asked == "theirs"
    first, second = hold(PATCH, [ours(library)]), hold(PATCH, [ours(library)])
    first.release()
    first.release()
    assert library.asked == "ours for theirs"
    second.release()
    assert library.asked == "theirs"


def test_it_is_put_back_whatever_is_raised(library: Any) -> None:
    with pytest.raises(KeyboardInterrupt), patched(PATCH, [ours(library)]):
        raise KeyboardInterrupt
    assert library.asked == "theirs"

    def places() -> Any:
        yield ours(library)
        raise ValueError("the search fails half way")

    with pytest.raises(ValueError, match="half way"):
        hold(PATCH, places())
    assert library.asked == "theirs" and not any(key[0] == "planted" for key in machinery._standing)


def test_together_keeps_what_another_has_replaced(library: Any) -> None:
    first = hold(PATCH, [ours(library)])
    second = hold(PATCH, [], together=True)  # does not find it any more
    first.release()
    assert library.asked == "ours for theirs"
    second.release()
    assert library.asked == "theirs"


def test_what_someone_else_puts_over_ours_stays(library: Any) -> None:
    with patched(PATCH, [ours(library)]):
        library.asked = "a third one's"
    assert library.asked == "a third one's"


def test_a_place_that_is_gone_is_named(library: Any) -> None:
    with pytest.raises(AutoplanError, match=r"planted: .*library.* has no 'moved', which stands for library\.asked"):
        hold(PATCH, [Place(library, "moved", lambda original: original)])


def test_static_methods_and_closures_come_back_as_they_were() -> None:
    class Kind:
        @staticmethod
        def method() -> str:
            return "theirs"

    kept = "theirs"

    def function() -> str:
        return kept

    assert function.__closure__ is not None
    before = vars(Kind)["method"]
    places = [
        Place(Kind, "method", lambda _: staticmethod(lambda: "ours")),
        Place(function.__closure__[0], "cell_contents", lambda _: "ours"),
    ]
    with patched(PATCH, places):
        assert Kind().method() == function() == "ours"
    assert Kind().method() == function() == "theirs" and vars(Kind)["method"] is before


def test_it_ends_with_its_owner_even_inside_the_lock(library: Any) -> None:
    """Garbage may be collected while this very thread holds the lock."""
    owner = Owner()
    hold(PATCH, [ours(library)]).until_gone(owner)
    gc.collect()
    assert library.asked == "ours for theirs"
    other = ModuleType("other")
    vars(other)["asked"] = "theirs"

    def places() -> Any:
        nonlocal owner
        del owner
        gc.collect()
        assert library.asked == "ours for theirs"  # not while another works here
        yield ours(other)

    with patched(PATCH, places()):
        assert library.asked == "theirs" and vars(other)["asked"] == "ours for theirs"


def test_many_threads(library: Any) -> None:
    wrong: list[str] = []

    def work() -> None:
        for _ in range(200):
            with patched(PATCH, [ours(library)]):
                if library.asked != "ours for theirs":
                    wrong.append(library.asked)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and library.asked == "theirs"

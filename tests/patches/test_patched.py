"""Replacements are counted: whoever comes first does not take away what another still needs."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from mesh_toys import mesh_of, model_of, plan_of
from torch import nn
from torch.distributed.tensor import DTensor

import autoplan
from autoplan.check.ranks.run import run_processes
from autoplan.common.errors import AutoplanError
from autoplan.patches import patched as machinery
from autoplan.patches.classes import code_lies_open
from autoplan.patches.patched import Kept, Patch, Place, Registered, hold, patched

PATCH = Patch("planted", "library.asked", "for a test", "in a block", "put back", lambda: True)


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
    with pytest.raises(
        AutoplanError, match=r"planted: .*library.* has no 'moved', which is patched to replace library\.asked"
    ):
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


def test_what_is_in_a_set_or_a_dict_comes_out_again() -> None:
    names, table = {"theirs"}, {"theirs": 1}
    places = [
        Registered(names, "ours"),
        Registered(names, "theirs"),
        Registered(table, "ours", 2),
        Registered(table, "theirs", 3),
    ]
    first, second = hold(PATCH, places), hold(PATCH, places)
    first.release()
    assert names == {"ours", "theirs"} and table == {"ours": 2, "theirs": 3}
    second.release()
    assert names == {"theirs"} and table == {"theirs": 1}
    with patched(PATCH, places):
        table["theirs"] = 4  # someone else's, over ours
    assert table == {"theirs": 4}


def test_copies_keep_a_hold_too(library: Any) -> None:
    kept = [Kept(hold(PATCH, [ours(library)]))]
    other = copy.deepcopy(kept)
    kept.clear()
    gc.collect()
    assert library.asked == "ours for theirs"
    del other
    gc.collect()
    assert library.asked == "theirs"


def _told() -> list[bool]:
    """Do compilers leave classes alone, and does DTensor know an op by which torch asks for NaN?"""
    gc.collect()
    rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    classes = torch._dynamo.config.nontraceable_tensor_subclasses
    return [bool(classes), torch.ops.aten._is_any_true.default in rules]


def told(rank: int) -> list[list[bool]]:
    """Before there is a split model, with one, with a copy of it, without; and with one whose plan is undone."""
    before = _told()
    models = [autoplan.parallelize(model_of("gpt2"), mesh_of(tp=2), plan_of("gpt2", 2))]
    found = [before, _told()]
    models = copy.deepcopy(models)
    found.append(_told())
    models.clear()
    found.append(_told())
    model = autoplan.parallelize(model_of("gpt2"), mesh_of(tp=2), plan_of("gpt2", 2))
    autoplan.applied(model).undo()
    return [*found, _told()]


def test_what_torch_is_told_of_split_models_ends_with_them() -> None:
    no, yes = [False, False], [True, True]
    assert run_processes(told, (), 2) == [[no, yes, yes, no, no]] * 2


def test_functions_that_come_later_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached functions run uncached while a model is recorded. Modules are searched once: again when they are new or
    have other names, while names are replaced too."""
    module, calls = ModuleType("of_a_user"), list[int]()
    with code_lies_open(nn.Identity()):
        pass
    module.first = functools.cache(calls.append)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def twice(number: int) -> list[int]:
        calls.clear()
        for _ in range(2):
            module.first(number)
            if hasattr(module, "second"):
                module.second(-number)
        return list(calls)

    with code_lies_open(nn.Identity()):
        assert twice(1) == [1, 1]
        module.second = functools.cache(calls.append)  # type: ignore[attr-defined]
        with code_lies_open(nn.Identity()):
            pass
    with code_lies_open(nn.Identity()):
        assert twice(2) == [2, -2, 2, -2]
    assert twice(3) == [3, -3]

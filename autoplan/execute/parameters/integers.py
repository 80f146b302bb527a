"""Editing the integers a module stores, on the module itself and never on a config that others share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from autoplan.common.errors import PlanMismatchError
from autoplan.execute.executors import At, executes
from autoplan.values import IntegerEdit

__all__: list[str] = []


@executes(IntegerEdit)
def _edit(edit: IntegerEdit, at: At) -> Callable[[], None]:
    """Set one integer and return how to undo it. What a holder shares with others is copied for this module alone."""
    holder, key, name, rank = edit.holder, edit.attribute, at.name, at.group.rank
    state = at.module.__dict__
    if holder:
        if holder not in state:
            raise _mismatch(name, edit, "no such attribute")
        shared = state[holder]
        own = copy.copy(shared)
        _set(own.__dict__, key, name, edit, rank)
        state[holder] = own
        return lambda: state.__setitem__(holder, shared)
    before = state.get(key)
    _set(state, key, name, edit, rank)
    return lambda: state.__setitem__(key, before)


def _set(state: dict[str, Any], key: str, name: str, edit: IntegerEdit, rank: int) -> None:
    if key not in state:
        raise _mismatch(name, edit, "no such attribute")
    new = edit.on_rank(rank)
    stored = state[key]
    if edit.index is None:
        if stored != edit.old:
            raise _mismatch(name, edit, f"it is {stored!r}")
        state[key] = new
        return
    if not isinstance(stored, (list, tuple)) or stored[edit.index] not in (edit.old, new):
        raise _mismatch(name, edit, f"it is {stored!r}")
    items = list(stored)
    items[edit.index] = new
    state[key] = type(stored)(items)


def _mismatch(name: str, edit: IntegerEdit, found: str) -> PlanMismatchError:
    return PlanMismatchError(
        f"the plan turns {name or 'the model'}.{edit.name} from {edit.old} into {edit.new}, but {found}",
        hint="the plan was made for another model or the model is already sharded; plan this one again",
    )

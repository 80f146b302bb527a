"""Each thing of another package that is replaced, and each undocumented one that is used, is still what it was.

A canary that fails here says which, by name: the installed torch or transformers has moved it.
"""

from __future__ import annotations

from typing import Any

import pytest

from autoplan.common.errors import AutoplanError
from autoplan.patches.patched import Private, require
from autoplan.patches.registry import ENTRIES, PRIVATE
from autoplan.patches.uses import files, private_uses


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_canary(entry: Any) -> None:
    require(entry)


@pytest.mark.parametrize("canary", [lambda: False, lambda: [].moved], ids=["changed", "gone"])  # type: ignore[attr-defined]
def test_a_canary_fails_by_name(canary: Any) -> None:
    with pytest.raises(AutoplanError, match=r"torch\._C\.moved: autoplan relies on") as caught:
        require(Private("torch._C.moved", "parameters are read through it", canary))
    assert "parameters are read through it" in str(caught.value)


def test_a_version_that_moves_a_thing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.optim import Optimizer, SGD

    monkeypatch.setattr(SGD, "__init__", lambda self, params, lr: vars(self).update(param_groups=[{"params": params}]))
    (optimizers,) = [entry for entry in ENTRIES if entry.name == "creation of optimizers"]
    with pytest.raises(AutoplanError, match=r"creation of optimizers: autoplan relies on torch\.optim\.Optimizer"):
        require(optimizers)
    assert not hasattr(Optimizer.__init__, "__wrapped__")


def is_entered(use: str) -> bool:
    """A dotted use belongs to an entry of that name or of what it is a part of; an attribute to any entry that ends so."""
    if "." in use:
        return any(use == one.name or use.startswith(f"{one.name}.") for one in PRIVATE)
    return any(use == one.name.rpartition(".")[2] or f": {use}" in one.name for one in PRIVATE)


def test_every_private_name_in_the_code_has_a_canary() -> None:
    missing = {f"{path}: {use}" for path, source in files().items() for use in private_uses(source) if not is_entered(use)}
    assert not missing, f"enter these in autoplan/patches/private_*.py, each with a canary: {sorted(missing)}"


def test_private_names_are_seen_however_they_are_written() -> None:
    source = """
import torch
import torch.distributed as dist
from torch.nn.modules import module as calls
from torch._dynamo import reset
class Own:
    def _mine(self): self._kept = 1
torch._C._x()
dist.distributed_c10d._world
calls._global_hooks
value._theirs, value._mine, value._kept
getattr(value, "_asked", None), vars(value)["_looked_up"], value.__dict__.get("_got")
rule("_softmax")
"""
    assert private_uses(source) == {
        "torch._dynamo.reset",
        "torch._C._x",
        "torch.distributed.distributed_c10d._world",
        "torch.nn.modules.module._global_hooks",
        "_theirs",
        "_asked",
        "_looked_up",
        "_got",
    }
    assert not is_entered("torch._dynamo.reset") and not is_entered("_theirs")

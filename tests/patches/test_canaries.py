"""Each thing of another package that is replaced, and each undocumented one that is used, is still what it was.

A canary that fails here says which, by name: the installed torch or transformers has moved it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from canaries.limits import ENTRIES, entry_of, generated, with_generated
from canaries.uses import files, private_uses

from autoplan.common.errors import AutoplanError
from autoplan.doctor.examine import Private, require

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_canary(entry: Any) -> None:
    require(entry)


@pytest.mark.parametrize("canary", [lambda: False, lambda: [].moved], ids=["changed", "gone"])  # type: ignore[attr-defined]
def test_a_canary_fails_by_name(canary: Any) -> None:
    with pytest.raises(AutoplanError, match=r"torch\._C\.moved: autoplan relies on") as caught:
        require(Private("torch._C.moved", "parameters are read through it", canary))
    assert "parameters are read through it" in str(caught.value)


def test_a_version_that_moves_a_thing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.optim import SGD, Optimizer

    monkeypatch.setattr(SGD, "__init__", lambda self, params, lr: vars(self).update(param_groups=[{"params": params}]))
    before = Optimizer.__init__
    (optimizers,) = [entry for entry in ENTRIES if entry.name == "creation of optimizers"]
    with pytest.raises(AutoplanError, match=r"creation of optimizers: autoplan relies on torch\.optim\.Optimizer"):
        require(optimizers)
    assert Optimizer.__init__ is before


def test_every_private_name_in_the_code_has_a_canary() -> None:
    missing = {
        f"{path}: {use}" for path, source in files().items() for use in private_uses(source) if entry_of(use) is None
    }
    assert not missing, f"enter these in tests/helpers/canaries/private_*.py, each with a canary: {sorted(missing)}"


def test_a_private_name_is_used_in_one_file() -> None:
    places: dict[str, list[str]] = {}
    for path, source in files().items():
        for name in {use.rpartition(".")[2] for use in private_uses(source)}:
            places.setdefault(name, []).append(path)
    several = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not several, f"give these a function in one file, for torch autoplan/common/torch_internals.py: {several}"


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
    assert entry_of("torch._dynamo.reset") is None and entry_of("_theirs") is None


def test_the_page_of_limits_is_what_registry_and_source_say() -> None:
    page = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    assert page == with_generated(page), "run: PYTHONPATH=tests/helpers python -m canaries.limits docs/limits.md"
    for entry in ENTRIES:
        assert entry.name in page and entry.why in page


def test_the_page_names_the_files() -> None:
    rows = {row.split("|")[1].strip(): row for row in generated().splitlines() if row.startswith("| `")}
    assert "`common/torch_internals.py`" in rows["`torch._C._is_torch_function_mode_enabled`"]
    assert not [name for name, row in rows.items() if not row.rstrip("| ").endswith("`")], "an entry that nobody uses"
    assert "`common/torch_internals.py`" in rows["`torch.nn.Module._parameters`"]

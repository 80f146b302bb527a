"""What all tests run under: no terminal, and a garbage collector that does not look at what stays.

Tables are as wide as where output is redirected, also in a worker of pytest-xdist. And torch, transformers and the
tests are a million objects that no collection can free: a tenth of the time went into looking at them again and again.
"""

import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from autoplan.common.requirements import VersionError

os.environ.pop("COLUMNS", None)

# Files of half a minute and more, the longest first, so that none of them is the last one that a process runs.
LONGEST = ("redteam", "peft", "doc_commands_run", "choose", "examples", "compile", "training_hosts", "trl", "context",
           "quantised_hosts", "interrupts", "audit", "repairs", "docs", "fuzzers", "estimate", "expert_parallel",
           "quantised_states", "in_others_hands", "quantised", "dry_runs", "op_database", "inputs")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ranks of tests with other libraries come from a server that has imported these, too."""
    from autoplan.check.ranks.common import PRELOADED  # torch and transformers: not in the process that deals tests out

    if any(item.get_closest_marker("hosts") for item in session.items):
        PRELOADED.extend(name for name in ("accelerate", "transformers.trainer", "peft", "trl") if find_spec(name))
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """A feature that the installed version is too old for is not tried; under the lock none is."""
    try:
        return (yield)
    except VersionError as error:
        pytest.skip(f"NOT TRIED: {error}")

"""What all tests run under: no terminal, and a garbage collector that does not look at what stays.

Tables are as wide as where output is redirected, also in a worker of pytest-xdist. And torch, transformers and the
tests are a million objects that no collection can free: a tenth of the time went into looking at them again and again.
"""

import gc
import os
from collections.abc import Iterator

import pytest

from autoplan.common.requirements import VersionError

os.environ.pop("COLUMNS", None)


def pytest_collection_finish() -> None:
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

"""What all tests run under: no terminal, and a garbage collector that does not look at what stays.

Tables are as wide as where output is redirected, also in a worker of pytest-xdist. And torch, transformers and the
tests are a million objects that no collection can free: a tenth of the time went into looking at them again and again.
"""

import gc
import os

os.environ.pop("COLUMNS", None)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)

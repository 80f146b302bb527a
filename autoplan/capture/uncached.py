"""Caches that must not see a traced run.

While a model is recorded its sizes are traced integers, which know where they come from. To a cache keyed on sizes
(einops keeps one for each pattern and shape, models keep tables by length) they equal plain ones: it would hand out
sizes that came from another module, or from a recording long gone, and keep ours for whoever asks next. So for the time
of a recording, functions that modules have wrapped in `functools.lru_cache` or `functools.cache` run without it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

__all__ = ["uncached_functions"]

_WRAPPER = type(functools.lru_cache(len))
# Their caches are of plain numbers, of no model's sizes, or of what is to be said once only.
_LEFT_ALONE = ("torch", "numpy", "sympy", "autoplan", "transformers", "huggingface_hub")
_lock = threading.Lock()
_recording = 0
_replaced: list[tuple[ModuleType, str, Any]] = []


@contextmanager
def uncached_functions() -> Iterator[None]:
    """Module-level functions without their caches, until the last thread that asked for it is done."""
    global _recording
    with _lock:
        _recording += 1
        if _recording == 1:
            _replaced.extend(_cached_functions())
            for module, name, function in _replaced:
                setattr(module, name, function.__wrapped__)
    try:
        yield
    finally:
        with _lock:
            _recording -= 1
            if _recording == 0:
                for module, name, function in _replaced:
                    setattr(module, name, function)
                _replaced.clear()


def _cached_functions() -> Iterator[tuple[ModuleType, str, Any]]:
    standard = sys.stdlib_module_names
    for module_name, module in list(sys.modules.items()):
        top = module_name.partition(".")[0]
        if isinstance(module, ModuleType) and top not in standard and top not in _LEFT_ALONE:
            for name, value in list(vars(module).items()):
                if type(value) is _WRAPPER:
                    yield module, name, value

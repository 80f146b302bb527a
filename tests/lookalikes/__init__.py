"""Small models shaped like those that come with their own code: the names of their modules, and what is odd in them.

`load(name)` imports one under a module name like the one that transformers gives to remote code.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["load"]


def load(name: str) -> ModuleType:
    """The look-alike `name` as a module of "transformers_modules", with a hash in its path."""
    full = f"transformers_modules.someone.{name}.0f3c9d1e.modeling_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).parent / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]

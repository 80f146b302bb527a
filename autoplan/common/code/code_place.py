"""What a torch call is called, and where in a module's own Python it stands, in words that hold on every run.

The few calls that must run differently on a rank have to be found again when the sharded model runs: with a cache, with
another mask, with more rounds of a loop than when it was planned. Counting calls is not enough, for such runs have more
or fewer of them. So a call is known by the way to it through the source, from the module's `forward` down:
"forward:12:8-30>repeat_kv:3:20-41" is the call in columns 20 to 41 of the third line of `repeat_kv`, called from line
twelve of `forward`. Lines count from where the function begins.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.nn.modules.module as module_calls

_OURS = str(Path(__file__).resolve().parents[2]) + os.sep  # the package
_TORCH = os.path.dirname(os.path.dirname(os.path.dirname(module_calls.__file__))) + os.sep  # module.py is in nn/modules


def call_name(function: Any) -> str:
    """The name of a torch function: property getters are "attr:shape", aten's own "linear.default" is "linear"."""
    if isinstance(function, torch._ops.OpOverload):
        return function._schema.name.rpartition("::")[2]
    name: str = getattr(function, "__name__", str(function))
    owner = getattr(function, "__self__", None)
    if name in ("__get__", "__set__") and owner is not None:
        return f"attr:{getattr(owner, '__name__', '?')}"
    return name


def code_place() -> str:
    """The place of the torch call that is being handled, inside the module whose forward runs."""
    steps: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file == module_calls.__file__:
            break
        machinery = file.startswith(_OURS) or code.co_name == "__torch_function__"
        if not machinery and (code.co_name == "forward" or not file.startswith(_TORCH)):
            steps.append(_step(code, frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    first = next((i for i in reversed(range(len(steps))) if steps[i].startswith("forward:")), len(steps) - 1)
    return ">".join(steps[first::-1])


@lru_cache(maxsize=65536)
def _step(code: CodeType, instruction: int) -> str:
    line, _, column, last = next(islice(code.co_positions(), instruction // 2, None))
    if line is None or column is None:  # a Python that was told to keep no columns
        return f"{code.co_name}:{instruction}"
    return f"{code.co_name}:{line - code.co_firstlineno}:{column}-{last}"

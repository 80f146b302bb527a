"""Write a corrected plan as a file in its own dialect, and read it back: what is written is what was audited.

Torch's style objects are Python, so they become a module with `PLAN`; names and specs are JSON, YAML or Python, by the
suffix of the file; a plan of ours is a plan file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pprint import pformat
from typing import Any

import yaml

from autoplan.check.audit.lines import read_foreign
from autoplan.check.audit.repair.dialects import LAYOUTS, dialect_of
from autoplan.common.errors import AutoplanError
from autoplan.values import Plan


def write_fixed(plan: Any, path: Path, title: str) -> None:
    """Write a plan (a Plan, or a dict in another dialect) to a file."""
    if isinstance(plan, Plan):
        plan.save(path)
        return
    has_objects = any(not isinstance(style, (str, Mapping, list)) for style in plan.values())
    if has_objects and path.suffix != ".py":
        raise AutoplanError(f"{path}: style objects are written as Python", hint=f"-o {path.with_suffix('.py').name}")
    if path.suffix == ".py":
        path.write_text(_module(plan, title, has_objects), encoding="utf-8")
    elif path.suffix in (".yaml", ".yml"):
        path.write_text(yaml.safe_dump(dict(plan), sort_keys=False), encoding="utf-8")
    else:
        path.write_text(json.dumps(dict(plan), indent=2) + "\n", encoding="utf-8")


def _module(plan: Mapping[str, Any], title: str, has_objects: bool) -> str:
    heading = f'"""{title}: corrected by `autoplan audit --fix`."""\n\n'
    if not has_objects:
        return f"{heading}PLAN = {pformat(dict(plan), sort_dicts=False, width=110)}\n"
    foreign = read_foreign(plan, None, title)
    assert not isinstance(foreign, str)
    dialect = dialect_of(foreign)
    assert dialect is not None
    texts = {key: dialect.text(style) for key, style in plan.items()}
    imports: dict[str, set[str]] = {}
    for style in plan.values():
        if not isinstance(style, str):
            cls = type(style)
            module = "torch.distributed.tensor.parallel" if cls.__module__.startswith("torch.") else cls.__module__
            imports.setdefault(module, set()).add(cls.__qualname__)
    layouts = {name for name in LAYOUTS if any(f"{name}(" in text for text in texts.values())}
    if layouts:
        imports["torch.distributed.tensor"] = layouts
    lines = [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imports.items())]
    rows = [f"    {key!r}: {text}," for key, text in texts.items()]
    code = "\n".join([*lines, "", "PLAN = {", *rows, "}", ""])
    made: dict[str, Any] = {}
    try:
        exec(code, made)
        same = all(repr(dialect.key_of(made["PLAN"][key])) == repr(dialect.key_of(plan[key])) for key in plan)
    except Exception as error:  # a class that no import reaches, or that takes other arguments
        raise AutoplanError(f"a style cannot be written as Python: {error}", hint="correct the rows by hand") from error
    if not same:
        raise AutoplanError("a style cannot be written as Python: it comes back otherwise", hint="correct it by hand")
    return heading + code

"""layers: what FSDP wraps and checkpointing recomputes, against the blocks that the model has.

Such mistakes are silent: nothing was wrapped, or children of blocks were; a class is not in this instance; a tower was
missed; a unit holds two dtypes. Settings are class names, paths, patterns, modules, or a function of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from autoplan.check.audit.subject import Audited, Level
from autoplan.common.errors import AutoplanError
from autoplan.common.patterns import matches, nearest
from autoplan.values import Finding

NAME = "layers"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    given = subject.settings.layers
    if given is None:
        return
    for purpose, setting in (given if isinstance(given, Mapping) else {"layers": given}).items():
        chosen, unknown = _modules(subject, setting)
        for name in unknown:
            classes = {type(module).__name__ for module in subject.modules.values()}
            close = nearest(name, [*classes, *subject.modules])
            hint = f"the model has {', '.join(close)}" if close else _blocks_hint(subject)
            yield Finding(NAME, "error", purpose, f"{purpose}: {name} is not a class or path of this model", hint)
        if chosen:
            yield from _compared(subject, purpose, chosen)
        elif not unknown:
            yield Finding(NAME, "error", purpose, f"{purpose}: the setting selects no module", _blocks_hint(subject))


def _modules(subject: Audited, setting: Any) -> tuple[list[str], list[str]]:
    """Names of the selected modules, and entries of the setting that select none."""
    if callable(setting) and not isinstance(setting, type):
        setting = setting(subject.model)
    entries = [setting] if isinstance(setting, (str, type)) or not isinstance(setting, Iterable) else list(setting)
    chosen: list[str] = []
    unknown: list[str] = []
    for entry in entries:
        names = [name for name, module in subject.modules.items() if name and _selects(entry, name, module)]
        chosen += names
        unknown += [] if names else [str(entry) if isinstance(entry, str) else type(entry).__name__]
    return list(dict.fromkeys(chosen)), unknown


def _selects(entry: Any, name: str, module: Any) -> bool:
    if isinstance(entry, str):
        cls = type(module)
        return entry in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}") or matches(entry, name)
    if isinstance(entry, type):
        return isinstance(module, entry)
    if hasattr(entry, "parameters"):
        return entry is module
    raise AutoplanError(f"layers: {entry!r} is not a class name, path or module", hint="pass names, paths or modules")


def _compared(subject: Audited, purpose: str, chosen: list[str]) -> Iterator[Finding]:
    blocks = {block: stack for stack in subject.stacks for block in stack.fqns}
    taken = [name for name in chosen if name in blocks]
    inside = [name for name in chosen if name not in blocks and _above(name, blocks)]
    around = [name for name in chosen if name not in blocks and any(b.startswith(f"{name}.") for b in blocks)]
    if not taken:
        level: Level = "warn" if inside else "error"
        what = f"{len(inside)} parts of blocks" if inside else ", ".join(around[:3]) or "no block"
        text = f"{purpose}: selects {what}, but none of the {len(blocks)} blocks"
        yield Finding(NAME, level, purpose, text, _blocks_hint(subject), _bytes(subject, list(blocks)))
        return
    if inside:
        text = f"{purpose}: selects {len(inside)} modules inside blocks too ({subject.folded(inside)})"
        yield Finding(NAME, "warn", purpose, text, "select only the blocks", _bytes(subject, inside))
    for stack in subject.stacks:
        missed = [block for block in stack.fqns if block not in chosen and not _above(block, dict.fromkeys(chosen))]
        if missed:
            text = f"{purpose}: {len(missed)} of {len(stack.fqns)} {stack.kind} blocks of {stack.name} are not selected"
            hint = f"add {subject.folded(missed)}"
            yield Finding(NAME, "warn", purpose, text, hint, _bytes(subject, missed))
    # FSDP2 flattens the parameters of a unit into one buffer, which has one dtype
    for block in taken if purpose != "checkpointing" else ():
        dtypes: dict[str, str] = {}
        for name, parameter in subject.modules[block].named_parameters():
            dtypes.setdefault(str(parameter.dtype).removeprefix("torch."), name)
        if len(dtypes) > 1:
            held_in = ", ".join(f"{name} in {dtype}" for dtype, name in dtypes.items())
            text = f"{purpose}: the unit {block} mixes {len(dtypes)} dtypes ({held_in})"
            yield Finding(NAME, "warn", purpose, text, "make a unit for each dtype, or use one dtype")
            return


def _above(name: str, known: Mapping[str, Any]) -> str:
    """The known module that holds `name`, if any."""
    parts = name.split(".")
    return next((".".join(parts[:n]) for n in range(1, len(parts)) if ".".join(parts[:n]) in known), "")


def _bytes(subject: Audited, names: list[str]) -> int:
    holders = dict.fromkeys(names)
    return sum(weight.bytes for weight in subject.weights if _above(weight.name, holders))


def _blocks_hint(subject: Audited) -> str:
    kinds = [type(subject.modules[stack.fqns[0]]).__name__ for stack in subject.stacks]
    blocks = [f"{subject.folded(stack.fqns)} ({kind})" for stack, kind in zip(subject.stacks, kinds, strict=True)]
    return f"the blocks are {', '.join(blocks)}" if blocks else "the model has no repeated blocks"

"""Which attribute of an experts' module counts its experts, where another attribute happens to be the same number.

Both are told apart on a tiny clone of the model, which has other sizes: there only one of them equals the number of
matrices in the stack. The clone is built and looked at, never run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torch import nn

from autoplan.capture.traced_ints import integer_attributes
from autoplan.common.errors import AutoplanError
from autoplan.hf.source import Source
from autoplan.values import IntegerEdit, LocalExperts, Runtime


def without_namesakes(source: Source, runtime: Runtime, classes: dict[str, str]) -> Runtime:
    """The edits without those of attributes that only happen to equal the number of experts, as far as can be told."""
    counts = {site.pattern: site.experts for site in runtime.of(LocalExperts)}
    counting = [edit for edit in runtime.of(IntegerEdit) if counts.get(edit.pattern) == edit.old]
    edits = Counter(edit.pattern for edit in counting)
    unclear = {classes[pattern] for pattern, edited in edits.items() if edited > 1}
    if not unclear:
        return runtime
    try:
        clone = source.tiny()
    except AutoplanError:
        return runtime
    known = {name: found for name in unclear if (found := _counting(clone, name))}
    namesakes = [edit for edit in counting if edit.name not in known.get(classes[edit.pattern], (edit.name,))]
    return replace(runtime, instructions=tuple(one for one in runtime.instructions if one not in namesakes))


def _counting(clone: nn.Module, class_name: str) -> set[str]:
    """The attributes that equal the length of the stack, in the first module of the class."""
    module = next((module for module in clone.modules() if type(module).__name__ == class_name), None)
    stacks = [] if module is None else [p for p in module.parameters(recurse=False) if p.dim() > 2]
    if module is None or not stacks:
        return set()
    return {name for name, value in integer_attributes(module).items() if value == stacks[0].shape[0]}

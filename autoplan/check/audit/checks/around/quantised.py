"""quantised: a weight and its scales must be cut together, between blocks; else numbers are rescaled by the wrong
block.

Where the config says how weights are stored, arithmetic proves what parts; else companions are recognised by shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoplan.check.audit.stored import partings
from autoplan.check.audit.subject import Audited, Level, Said
from autoplan.values import Finding

NAME = "quantised"
_WAYS_OUT = "place experts whole on different ranks, use fewer ranks, or leave it whole: autoplan.plan says which"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    yield from _parted(subject)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for module, held in subject.modules.items():
        tensors = {**held._parameters, **held._buffers}
        biases = {name for name in tensors if name.endswith("bias")}  # of a stack of layers: they scale nothing
        matrices = {n: t for n, t in tensors.items() if t is not None and t.dim() == 2 and n not in biases}
        if len(matrices) < 2:
            continue
        name = max(matrices, key=lambda n: matrices[n].numel())
        for other, scale in matrices.items():
            blocks = _blocks(matrices[name], scale)
            if other == name or blocks is None:
                continue
            problem = _problem(subject, f"{module}.{name}", f"{module}.{other}", matrices[name], blocks)
            if problem:
                line = subject.plan.line_for(f"{module}.{name}") or subject.plan.line_for(f"{module}.{other}")
                key = (line.pattern if line else module, problem, other)
                groups.setdefault(key, []).append(module)
    for (pattern, problem, other), modules in groups.items():
        text = f"{modules[0]}: {problem}"
        yield Finding(NAME, _level(subject), pattern, text, f"cut the weight and {other} as one unit, between blocks",
                      proof=subject.proof() if subject.is_wrong else "")  # fmt: skip


def _parted(subject: Audited) -> Iterator[Finding]:
    """What the config says is stored, held against what the plan cuts."""
    if subject.plan.plan is not None:
        return  # ours cuts stored tensors with their weight
    alike: dict[tuple[str, str, str], list[str]] = {}
    for one in partings(subject.plan, subject.packed, subject.modules, subject.tp_size):
        alike.setdefault((one.line.pattern, one.message, one.proof), []).append(one.weight)
    for (pattern, message, proof), names in alike.items():
        text = f"{subject.folded(names)}: {message}"
        size = sum(weight.bytes for weight in subject.packed if weight.name in names)
        yield Finding(NAME, "error", pattern, text, _WAYS_OUT, size, proof)


def _level(subject: Audited) -> Level:
    return "error" if subject.is_wrong else "warn"


def _blocks(weight: Any, scale: Any) -> tuple[int, int] | None:
    """Rows and columns of the weight that one element of `scale` describes."""
    sizes = tuple(-(-w // s) for w, s in zip(weight.shape, scale.shape, strict=True))
    fits = all(-(-w // b) == s for w, s, b in zip(weight.shape, scale.shape, sizes, strict=True))
    return (sizes[0], sizes[1]) if fits and max(sizes) > 1 else None


def _problem(subject: Audited, weight: str, scale: str, tensor: Any, blocks: tuple[int, int]) -> str:
    cut, other = _cut(subject, weight), _cut(subject, scale)
    if cut is None or cut.dim is None:
        return "the scales are cut and the weight is whole" if other is not None and other.dim is not None else ""
    block = blocks[cut.dim]
    local = len(cut.rows[0])
    if local % block and block < tensor.shape[cut.dim]:
        return f"a rank holds {local} of {tensor.shape[cut.dim]} along dim {cut.dim}, inside a block of {block}"
    if block < tensor.shape[cut.dim] and (other is None or other.dim != cut.dim):
        return f"the weight is cut along dim {cut.dim} and {scale.rpartition('.')[2]} is not"
    return ""


def _cut(subject: Audited, name: str) -> Said | None:
    """What happens to a parameter, or to a buffer (of which no library cuts any, unless a plan of ours says so)."""
    if name in subject.by_name:
        return subject.by_name[name].said
    if subject.plan.plan is None:
        return None
    from autoplan.common.layout import Layout
    from autoplan.common.patterns import best_match

    rule = best_match(subject.plan.plan.runtime.parameters, name)
    if rule is None or rule.dim is None or rule.layout is None:
        return None
    return Said(None, rule.dim, 1, Layout.parse(rule.layout).rows_of_all(subject.tp_size))

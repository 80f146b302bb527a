"""Do the tensors of a quantised weight part when a foreign plan cuts each of them by itself? Arithmetic proves it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoplan.check.audit.lines import ForeignPlan, Line
from autoplan.check.audit.subject import Audited, Level, Said, plain_rows, said_by
from autoplan.common.torch_internals import own_buffers, own_parameters
from autoplan.values import Finding
from autoplan.values.quantised import PackedDim, PackedTensor, PackedWeight


@dataclass(frozen=True)
class Parting:
    """A stored tensor that does not follow its weight, with the numbers that show it."""

    weight: str
    line: Line
    message: str
    proof: str


def partings(
    plan: ForeignPlan, packed: tuple[PackedWeight, ...], modules: Mapping[str, Any], tp: int
) -> tuple[Parting, ...]:
    """The weights that part at a size, each with its first tensor that does."""
    lines = ((weight, plan.line_for(weight.name)) for weight in packed)
    cuts = ((w, said_by(plan, line, w.name, w.shape, modules, tp)) for w, line in lines if line is not None)
    return tuple(divided for weight, cut in cuts if (divided := parting(weight, cut, tp)) is not None)


def parting(weight: PackedWeight, said: Said, tp: int) -> Parting | None:
    """Return what is wrong with the stored tensors of a weight that is sharded so; None if they follow it."""
    if said.dim is None or said.line is None:
        return None
    for tensor in weight.tensors:
        if not tensor.dims:
            continue  # a number is left whole
        place = said.dim if len(tensor.dims) >= len(weight.shape) else -1
        dim = tensor.dims[place]
        if dim.of and dim.of != (said.dim,):
            text = f"the dims of {tensor.name} are in another order: its dim {said.dim} is not that of the weight"
            return Parting(weight.name, said.line, text, f"{tensor.name} is {list(tensor.shape)}")
        if not dim.of and len(tensor.dims) <= len(weight.shape):
            text = f"{tensor.name} has {dim.size} entries for the whole of dim {said.dim}, which every rank needs"
            held = ", ".join(str(len(rows)) for rows in plain_rows(dim.size, 1, tp))
            return Parting(weight.name, said.line, text, f"{tensor.name} is sharded to [{held}]")
        if dim.of and dim.factor > 1 and (apart := _apart(weight, tensor, dim, said, tp)) is not None:
            return apart
    return None


def _apart(weight: PackedWeight, tensor: PackedTensor, dim: PackedDim, said: Said, tp: int) -> Parting | None:
    """Return a finding if a rank does not hold exactly the blocks of its rows."""
    assert said.dim is not None and said.line is not None
    held = plain_rows(dim.size, said.parts, tp)
    segments = weight.segments if said.dim == weight.rows else ()
    for rank, rows in enumerate(said.rows):
        wanted = list(dict.fromkeys(_block(row, dim.factor, segments) for row in rows))
        mine = list(dict.fromkeys(row // dim.each for row in held[rank]))
        if wanted != mine:
            size, local = weight.shape[said.dim] // said.parts, len(rows) // said.parts
            text = f"a rank holds {local} of {size} along dim {said.dim}, {local / dim.factor:g} blocks of {dim.factor}"
            counts = ", ".join(str(len(one) // dim.each) for one in held)
            needs = f"rank {rank} needs {_said(wanted)}, holds {_said(held[rank])}"
            return Parting(weight.name, said.line, text, f"{tensor.name} is sharded to [{counts}]; {needs}")
    return None


def _block(row: int, block: int, segments: tuple[int, ...]) -> int:
    """The block that a row is in, where each segment begins with a block of its own."""
    before = 0
    for size in segments[:-1]:
        if row < size:
            break
        before, row = before + -(-size // block), row - size
    return before + row // block


def _said(rows: Sequence[int]) -> str:
    if not rows:
        return "none"
    return f"{rows[0]}–{rows[-1]}" if [*rows] == [*range(rows[0], rows[-1] + 1)] else str([*rows])


_WAYS_OUT = "place experts on different ranks, use fewer ranks, or replicate it: see autoplan.plan"


def quantised(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """quantised: a weight and its scales must be cut together, between blocks; else numbers are rescaled by the wrong
    block.

    Where the config says how weights are stored, arithmetic proves what parts; else companions are recognised by shape.
    """
    if subject.plan.plan is None:  # a plan of ours cuts stored tensors with their weight
        parted: dict[tuple[str, str, str], list[str]] = {}
        for divided in partings(subject.plan, subject.packed, subject.modules, subject.tp_size):
            parted.setdefault((divided.line.pattern, divided.message, divided.proof), []).append(divided.weight)
        for (pattern, message, proof), names in parted.items():
            size = sum(weight.bytes for weight in subject.packed if weight.name in names)
            yield Finding(check, "error", pattern, f"{subject.folded(names)}: {message}", _WAYS_OUT, size, proof)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for module, held in subject.modules.items():
        tensors = {**own_parameters(held), **own_buffers(held)}
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
        level: Level = "error" if subject.is_wrong else "warn"
        text, proof = f"{modules[0]}: {problem}", subject.proof() if subject.is_wrong else ""
        hint = f"shard the weight and {other} together, between blocks"
        yield Finding(check, level, pattern, text, hint, proof=proof)


def _blocks(weight: Any, scale: Any) -> tuple[int, int] | None:
    """Rows and columns of the weight that one element of `scale` describes."""
    sizes = tuple(-(-w // s) for w, s in zip(weight.shape, scale.shape, strict=True))
    fits = all(-(-w // b) == s for w, s, b in zip(weight.shape, scale.shape, sizes, strict=True))
    return (sizes[0], sizes[1]) if fits and max(sizes) > 1 else None


def _problem(subject: Audited, weight: str, scale: str, tensor: Any, blocks: tuple[int, int]) -> str:
    cut, other = _cut(subject, weight), _cut(subject, scale)
    if cut is None or cut.dim is None:
        return "the scales are sharded, but the weight is not" if other is not None and other.dim is not None else ""
    block = blocks[cut.dim]
    local = len(cut.rows[0])
    if local % block and block < tensor.shape[cut.dim]:
        return f"a rank holds {local} of {tensor.shape[cut.dim]} along dim {cut.dim}, inside a block of {block}"
    if block < tensor.shape[cut.dim] and (other is None or other.dim != cut.dim):
        return f"the weight is sharded along dim {cut.dim} but {scale.rpartition('.')[2]} is not"
    return ""


def _cut(subject: Audited, name: str) -> Said | None:
    """Return how a parameter or a buffer is sharded (no library shards buffers, unless an autoplan plan says so)."""
    return subject.by_name[name].said if name in subject.by_name else subject.said_by_rule(None, name)

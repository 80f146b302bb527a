"""Plans under sequence parallelism: the stream between parts is cut along the sequence, and every row must know.

People write it in three ways, and a plan is corrected in its own: norms that hand on the whole sequence (Automodel),
inputs of attention and MLP that are gathered (`PrepareModuleInput`, torchtitan), or column layers that gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.check.audit.lines import ForeignPlan
from autoplan.check.audit.repair.dialects import Dialect
from autoplan.check.audit.subject import Audited
from autoplan.decide.plan.folding import starred
from autoplan.emit.exports import expressible
from autoplan.values import Plan


def is_sequence_parallel(plan: ForeignPlan) -> bool:
    """Does a plan of torch's styles cut the sequence anywhere?"""
    return plan.dialect == "torch" and any(_cuts_sequence(style) for style in plan.raw.values())


def _cuts_sequence(style: Any) -> bool:
    if _is_norm(style):
        return bool(style.sequence_sharding[0].dim == 1)  # a norm of heads is "cut" along these
    for side in ("input_layouts", "output_layouts"):
        layouts = getattr(style, side, None)
        for layout in layouts if isinstance(layouts, tuple) else (layouts,):
            if getattr(layout, "dim", None) == 1:
                return True
    return False


def sequence_ways(
    subject: Audited, dialect: Dialect, says: Mapping[str, Any], right: Plan, whole: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """The ways of writing a plan with the stream cut along the sequence, or `whole`, the nearest to the plan first."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    parts = expressible.parts_of(right)
    inner = {starred(part.container) for part in parts if part.kind != "end"}
    columns = [starred(e.pattern) for p in parts if p.kind != "end" for e in p.entries if "colwise" in e.style]
    rows = [starred(e.pattern) for p in parts if p.kind != "end" for e in p.entries if "rowwise" in e.style]
    ends = [entry for part in parts if part.kind == "end" for entry in part.entries]
    tables = [starred(e.pattern) for e in ends if e.style.startswith("embedding_rowwise")]
    heads = [starred(e.pattern) for e in ends if starred(e.pattern) not in tables]
    marked = {name: style for name, style in says.items() if _is_norm(style) and _cuts_sequence(style)}
    within = {name: style for name, style in whole.items() if _is_norm(style)}  # norms of heads
    classes = {type(subject.modules[name]).__name__ for name in subject.modules if starred(name) in marked}
    norms = {
        starred(name)
        for name, module in subject.modules.items()
        if type(module).__name__ in classes and not any(starred(name).startswith(f"{place}.") for place in inner)
    }
    last = {name for name in norms if "*" not in name}
    kinds = {type(style): style for style in marked.values()}
    gathering = next((style for cls, style in kinds.items() if cls.__name__ != "SequenceParallel"), None)
    prepared = {name: style for name, style in says.items() if type(style).__name__.startswith("PrepareModule")}
    logits = [says[head] for head in heads if head in says]
    own_output = getattr(logits[0], "output_layouts", None) if logits else None
    local = getattr(logits[0], "use_local_output", True) if logits else True
    out = own_output[0] if isinstance(own_output, tuple) and own_output else Replicate()
    stream: dict[str, Any] = {"output_layouts": Shard(1)}
    if any(not getattr(says.get(name), "use_local_output", True) for name in (*tables, *rows)):
        stream["use_local_output"] = False  # a DTensor, which says how long the whole sequence is
    ends_of = {
        **{name: RowwiseParallel(input_layouts=Replicate(), **stream) for name in tables},
        **{name: RowwiseParallel(**stream) for name in rows},
        **within,
    }
    whole_head = {name: ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()) for name in heads}
    own_head = {
        name: ColwiseParallel(input_layouts=Shard(1), output_layouts=out, use_local_output=local) for name in heads
    }
    plain = {name: SequenceParallel() for name in norms}
    bare = {name: ColwiseParallel() for name in columns}
    ways: list[Mapping[str, Any]] = [whole]
    for head in (own_head, whole_head):
        if gathering is not None:
            norms_of = {name: SequenceParallel() if name in last else gathering for name in norms}
            ways.append({**ends_of, **norms_of, **bare, **head})
        if prepared or gathering is None:
            before = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            inputs = {name: prepared.get(name, before) for name in {*prepared, *inner}}
            ways.append({**ends_of, **plain, **inputs, **bare, **head})
            ways.append({**ends_of, **plain, **dict.fromkeys(inner, before), **bare, **head})
        gathers = {name: ColwiseParallel(input_layouts=Shard(1)) for name in columns}
        ways.append({**ends_of, **plain, **gathers, **head})
    return sorted(ways, key=lambda way: _distance(dialect, says, way))


def _is_norm(style: Any) -> bool:
    return any(cls.__name__ == "SequenceParallel" for cls in type(style).__mro__)


def _distance(dialect: Dialect, says: Mapping[str, Any], way: Mapping[str, Any]) -> int:
    return sum(dialect.key_of(says.get(n)) != dialect.key_of(way.get(n)) for n in {**says, **way})

"""The parts of a model (an attention, an MLP, the table, the head), what the plan says in each, and how it may be said.

Parts meet only in the residual stream, which every rank holds whole, so each is right or wrong by itself. Sequence
parallelism is corrected in the plan's own way: gathering norms, gathered inputs (`PrepareModuleInput`), or column
layers that gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from os.path import commonprefix
from typing import Any

from autoplan.check.audit.lines import ForeignPlan
from autoplan.check.audit.rows import DeepSpeed, Dialect, Torch, Transformers
from autoplan.check.audit.subject import Audited
from autoplan.common.patterns import starred
from autoplan.emit.exports import expressible
from autoplan.emit.exports.hf import hf_entries
from autoplan.emit.words import few
from autoplan.values import Plan

Values = Mapping[str, Any]  # by starred name; no entry: no row


@dataclass(frozen=True)
class Part:
    """`places`: the containers of these blocks. `says`: what the plan says there; `ways`: what it may say instead;
    `obstacle`: what its cheapest split needs and styles do not do."""

    container: str
    places: tuple[str, ...]
    says: Values
    ways: tuple[Values, ...]
    obstacle: str = ""
    blocks: frozenset[str] = frozenset()  # of the whole model: those that it is about

    def names(self, relative: str) -> tuple[str, ...]:
        """A starred name of the part, in each of its blocks."""
        rest = relative[len(self.container) :]
        return tuple(f"{place}{rest}" for place in self.places)


def block_of(name: str) -> str:
    """Return the outermost numbered module that a name is in; "" if none.

    >>> block_of("model.layers.3.mlp.experts.1"), block_of("lm_head")
    ('model.layers.3', '')
    """
    segments = name.split(".")
    place = next((place for place, segment in enumerate(segments) if segment.isdigit()), -1)
    return ".".join(segments[: place + 1])


def parts_of(subject: Audited, right: Plan, dialect: Dialect) -> tuple[Part, ...]:
    """Every part in which the plan says anything, or could."""
    exported = expressible.parts_of(right)
    ways_of: dict[str, list[Values]] = {}
    for part in exported:
        ways_of.setdefault(starred(part.container), []).extend(_ways(subject, right, part, dialect))
    around = _around(exported, subject)
    members: dict[str, list[list[Values]]] = {}
    for container, own in ways_of.items():
        members.setdefault(around.get(container, container), []).append(own)
    ways = {container: _side_by_side(each) for container, each in members.items()}
    styles: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys([*subject.modules, *subject.parameters]):
        if name and not (isinstance(dialect, DeepSpeed) and name not in subject.parameters):
            module = name.removesuffix(".weight") if isinstance(dialect, DeepSpeed) else name
            value = dialect.value_at(name)
            place = _place(module, ways_of)
            place = ".".join(place.split(".")[: len(around.get(starred(place), place).split("."))])
            styles.setdefault(place, {})
            if value is not None:
                styles[place][module] = value
    groups: dict[tuple[str, Any], list[str]] = {}
    for place, values in styles.items():
        signature = tuple(sorted((name[len(place) :], repr(dialect.key_of(value))) for name, value in values.items()))
        if values or starred(place) in ways:
            groups.setdefault((starred(place), signature), []).append(place)
    obstacles = {starred(part.container): _obstacle(part) for part in exported}
    parts = []
    for (container, _), places in groups.items():
        says = {starred(name): value for name, value in styles[places[0]].items()}
        written = (*ways.get(container, ()), {})
        parts.append(Part(container, tuple(places), says, written, obstacles.get(container, "")))
    return _joined(parts, subject, right, dialect)


def _around(parts: Iterable[expressible.Part], subject: Audited) -> dict[str, str]:
    """Return, for containers whose layers are cut along one axis, the module around them: they are right or wrong
    together. A block's queries and the layer after its attention may be in different containers."""
    around: dict[str, str] = {}
    blocks: dict[str, set[str]] = {}
    for name in (*subject.modules, *subject.parameters):
        blocks.setdefault(starred(name), set()).add(block_of(name))
    for one, other in combinations([part for part in parts if part.kind != "end"], 2):
        both = [starred(part.container) for part in (one, other)]
        shared = commonprefix([name.split(".") for name in both])
        in_blocks = [blocks.get(starred(part.entries[0].pattern), set()) for part in (one, other)]
        same_block = in_blocks[0] & in_blocks[1] and shared.count("*") == both[0].count("*") == both[1].count("*")
        if one.axes & other.axes and both[0] != both[1] and shared and same_block:
            for name in both:
                around[name] = min(".".join(shared), around.get(name, name), key=len)
    return around


def _side_by_side(members: Sequence[Sequence[Values]]) -> list[Values]:
    """The ways of several parts as ways of one: the first of each, the second of each, …"""
    count = max(map(len, members))
    return [{n: v for own in members if own for n, v in own[min(number, len(own) - 1)].items()}
            for number in range(count)]  # fmt: skip


def _obstacle(part: expressible.Part) -> str:
    """Return what a plain split of the part needs and no style does; "" if unknown."""
    if part.needs:
        return str(part.needs[0])
    own = [f"{e.pattern}.{name}" for e in part.entries if e.pattern == part.container for name in e.parameters]
    return f"{few(own)} would have to be sharded with the layers" if own and part.kind == "other" else ""


def _joined(parts: list[Part], subject: Audited, right: Plan, dialect: Dialect) -> tuple[Part, ...]:
    """Parts that hold one tied weight are right or wrong together."""
    tied = {name.rpartition(".")[0] for weight in subject.weights if len(weight.names) > 1 for name in weight.names}
    together = [part for part in parts if {*part.says, *part.ways[0]} & tied and len(part.places) == 1]
    if len(together) < 2:
        return tuple(parts)
    says = {name: value for part in together for name, value in part.says.items()}
    ways = _side_by_side([part.ways for part in together])
    if isinstance(dialect, Transformers):
        lines = {name: dialect.value(style) for name, style in hf_entries(right)[0].items() if name in tied}
        ways[0] = {**ways[0], **lines}
    return (Part("", ("",), says, tuple(ways)), *(part for part in parts if part not in together))


def _place(name: str, containers: Mapping[str, Any]) -> str:
    """The innermost container that a module is in, or is; where none is known, the module that holds it."""
    segments = name.split(".")
    for length in range(len(segments), 0, -1):
        if starred(".".join(segments[:length])) in containers:
            return ".".join(segments[:length])
    return name.rpartition(".")[0]


def _ways(subject: Audited, plan: Plan, part: expressible.Part, dialect: Dialect) -> Iterator[Values]:
    """Yield how the dialect can express the split of a part, the one that moves least first."""
    # Modules of the container that every rank holds whole, and that see only what is this rank's
    inside = [w for w in subject.weights if starred(w.module).startswith(f"{starred(part.container)}.")]
    partial = [starred(w.module) for w in inside if w.fact.dim is None and w.fact.gradient != "local"]
    summed = dict.fromkeys(partial, "replicated_with_grad_allreduce")
    stars = {starred(entry.pattern): entry for entry in part.entries}
    if isinstance(dialect, (Torch, DeepSpeed)):
        styles = {pattern: entry.style for pattern, entry in stars.items()}
        if part.kind == "end":
            table = {p: s for p, s in styles.items() if s.startswith("embedding_rowwise")}
            styles = {p: table.get(p, "colwise_gather_output") for p in styles}
    else:
        lines, _ = hf_entries(plan)
        container = starred(part.container)
        styles = {key: style for key, style in lines.items() if _place(key, {container: None}) == container}
    yield from _said(styles, stars, dialect)
    plain = {pattern: entry.style for pattern, entry in stars.items()}
    if part.kind != "end" and plain != styles:
        yield from _said(plain, stars, dialect)
    if not styles and summed:
        styles = plain
    if {**styles, **summed} != styles:
        yield from _said({**styles, **summed}, stars, dialect)
    by_kind = {True: "rowwise_split_input", False: "colwise_gather_output"}
    gathered = {starred(e.pattern): by_kind[e.style.startswith("rowwise")] for e in part.gathered}
    yield from _said(gathered, stars, dialect)


def _said(styles: Mapping[str, str], stars: Mapping[str, Any], dialect: Dialect) -> Iterator[Values]:
    values = {pattern: dialect.value(style, stars.get(pattern)) for pattern, style in styles.items()}
    if values and None not in values.values():
        yield values
    elif isinstance(dialect, DeepSpeed) and any(value is not None for value in values.values()):
        yield {pattern: value for pattern, value in values.items() if value is not None}


def is_sequence_parallel(plan: ForeignPlan) -> bool:
    """Return whether a plan of torch's styles shards the sequence anywhere."""
    return plan.dialect == "torch" and any(_cuts_sequence(style) for style in plan.raw.values())


def _cuts_sequence(style: Any) -> bool:
    if _is_norm(style):
        return bool(style.sequence_sharding[0].dim == 1)  # a norm of heads is "cut" along these
    sides = (getattr(style, side, None) for side in ("input_layouts", "output_layouts"))
    layouts = (layout for side in sides for layout in (side if isinstance(side, tuple) else (side,)))
    return any(getattr(layout, "dim", None) == 1 for layout in layouts)


def sequence_ways(
    subject: Audited, dialect: Dialect, says: Mapping[str, Any], right: Plan, whole: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """The ways of writing a plan with the stream cut along the sequence, or `whole`, the nearest to the plan first."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    parts = expressible.parts_of(right)
    inner = {starred(part.container) for part in parts if part.kind != "end"}
    layers = [entry for part in parts if part.kind != "end" for entry in part.entries]
    columns, rows = ([starred(e.pattern) for e in layers if kind in e.style] for kind in ("colwise", "rowwise"))
    ends = [entry for part in parts if part.kind == "end" for entry in part.entries]
    tables = [starred(e.pattern) for e in ends if e.style.startswith("embedding_rowwise")]
    heads = [starred(e.pattern) for e in ends if starred(e.pattern) not in tables]
    marked = {name: style for name, style in says.items() if _is_norm(style) and _cuts_sequence(style)}
    unchanged = {
        name: style for name, style in marked.items() if "*" not in name and type(style) is not SequenceParallel
    }
    marked = {name: style for name, style in marked.items() if name not in unchanged}  # rotary tables are not norms
    within = {name: style for name, style in whole.items() if _is_norm(style)}  # norms of heads
    classes = {type(subject.modules[name]).__name__ for name in subject.modules if starred(name) in marked}
    norms = {starred(name) for name, module in subject.modules.items() if type(module).__name__ in classes}
    norms = {name for name in norms if not name.startswith(tuple(f"{place}." for place in inner))}
    last = {name for name in norms if "*" not in name}
    kinds = {type(style): style for style in marked.values()}
    gathering = next((style for cls, style in kinds.items() if cls.__name__ != "SequenceParallel"), None)
    prepared = {name: style for name, style in says.items() if type(style).__name__.startswith("PrepareModule")}
    logits = [says[head] for head in heads if head in says]
    own_output = getattr(logits[0], "output_layouts", None) if logits else None
    local = getattr(logits[0], "use_local_output", True) if logits else True
    out = own_output[0] if isinstance(own_output, tuple) and own_output else Replicate()
    # A local tensor, or a DTensor, which says how long the whole sequence is
    streams: list[dict[str, Any]] = [{}, {"use_local_output": False}]
    if any(not getattr(says.get(name), "use_local_output", True) for name in (*tables, *rows)):
        streams = streams[1:]
    whole_head = {name: ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()) for name in heads}
    own: dict[str, Any] = {"output_layouts": out, "use_local_output": local}
    own_head = {name: ColwiseParallel(input_layouts=Shard(1), **own) for name in heads}
    plain = {name: SequenceParallel() for name in norms}
    bare = {name: ColwiseParallel() for name in columns}
    before = {name: _gathered_input(keyword) for name, keyword in _keywords(subject.extra["clone"], inner).items()}
    ways: list[Mapping[str, Any]] = [whole]

    def by_rows(name: str) -> type[RowwiseParallel]:
        """The plan's own subclass, if it has one."""
        return type(says[name]) if isinstance(says.get(name), RowwiseParallel) else RowwiseParallel

    for head, stream in product((own_head, whole_head), streams):
        ends_of = {
            **{name: by_rows(name)(input_layouts=Replicate(), output_layouts=Shard(1), **stream) for name in tables},
            **{name: by_rows(name)(output_layouts=Shard(1), **stream) for name in rows},
            **within,
            **unchanged,
        }
        if gathering is not None:
            norms_of = {name: SequenceParallel() if name in last else gathering for name in norms}
            ways.append({**ends_of, **norms_of, **bare, **head})
        if prepared or gathering is None:
            inputs = {name: prepared.get(name, before.get(name)) for name in {*prepared, *inner}}
            ways.append({**ends_of, **plain, **inputs, **bare, **head})
            ways.append({**ends_of, **plain, **before, **bare, **head})
        gathers = {name: ColwiseParallel(input_layouts=Shard(1)) for name in columns}
        ways.append({**ends_of, **plain, **gathers, **head})
    return sorted(ways, key=lambda way: sum(not dialect.same(says.get(n), way.get(n)) for n in {**says, **way}))


def _gathered_input(keyword: str) -> Any:
    """The style that gathers a module's first input, which is given by this keyword ("": by position)."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import PrepareModuleInput

    if not keyword:
        return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    cut, whole = {keyword: Shard(1)}, {keyword: Replicate()}
    return PrepareModuleInput(input_kwarg_layouts=cut, desired_input_kwarg_layouts=whole)


def _keywords(clone: Any, containers: Iterable[str]) -> dict[str, str]:
    """Return the keyword by which each of these gets the stream when the clone runs; "" if by position."""
    import torch

    from autoplan.capture.copies import copied

    keywords = dict.fromkeys(containers, "")
    model = copied(clone.model)

    def look(name: str, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        streams = (key for key, value in kwargs.items() if isinstance(value, torch.Tensor) and value.dim() == 3)
        keywords[name] = "" if args else next(streams, "")

    for name, module in model.named_modules():
        if starred(name) in keywords:
            module.register_forward_pre_hook(partial(look, starred(name)), with_kwargs=True)
    with torch.no_grad():
        for feed in clone.feeds.values():
            model(**feed)
    return keywords


def _is_norm(style: Any) -> bool:
    return any(cls.__name__ == "SequenceParallel" for cls in type(style).__mro__)

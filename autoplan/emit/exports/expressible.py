"""The part of a plan that a target can express, and how its weights are stored."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autoplan.common.errors import AutoplanError
from autoplan.common.layout import Layout
from autoplan.common.patterns import is_under, matches, starred
from autoplan.decide.rulebook.read import exported_as
from autoplan.emit.words import bytes_text
from autoplan.values import Entry, Plan
from autoplan.values.quantised import PackedWeight

# Plans of quantised models: each entry is written by its plain weight, since other systems cut their own stored
# tensors.


def cut_otherwise(plan: Plan, entry: Entry) -> str:
    """Return why a cut of each stored tensor along the weight's dim is wrong for an entry; "" if it is right."""
    for weight in _stored(plan, entry):
        dim = _cut(plan, weight)[0]
        renamed = weight.tensors[:1] if weight.tensors[0].name != weight.parameter else ()
        wrong = next((t for t in (*renamed, *weight.tensors) if t in renamed or t.dims and t.dim != dim), None)
        if dim is not None and wrong is not None:
            return f"it is stored as {weight.scheme.title}: {wrong.name} is not sharded along the dim of the weight"
    return ""


def _plain(entry: Entry, plan: Plan) -> Entry:
    parameters = dict(zip(entry.parameters, entry.segments, strict=True))
    for weight in _stored(plan, entry):
        dim, layout = _cut(plan, weight)
        named = next((n for n in parameters if n.rpartition(".")[2] == weight.tensors[0].name), None)
        if named is None:
            continue
        before = named.removesuffix(weight.tensors[0].name)
        gone = {f"{before}{tensor.name}" for tensor in weight.tensors}
        others = {name: segment for name, segment in parameters.items() if name not in gone}
        parameters = {f"{before}{weight.parameter}": "whole" if dim is None else f"{dim}:{layout}"} | others
    return replace(entry, parameters=tuple(parameters), segments=tuple(parameters.values()))


def _stored(plan: Plan, entry: Entry) -> list[PackedWeight]:
    """Return the first of equal stored weights, for each parameter."""
    mine = [w for w in plan.packed if matches(entry.pattern, w.owner) or matches(entry.pattern, w.name)]
    return list({weight.parameter: weight for weight in reversed(mine)}.values())


def _cut(plan: Plan, weight: PackedWeight) -> tuple[int | None, str | None]:
    rules = plan.runtime.parameters
    rule_of_weight = next((rule for rule in rules if matches(rule.pattern, weight.name)), None)
    return (None, None) if rule_of_weight is None else (rule_of_weight.dim, rule_of_weight.layout)


# The part of a plan that another system can express, by parts of a block (its attention, its MLP), each fully or not:
#
#     plain     column and row layers
#     gathered  every layer computes its shard and gathers at once: exact but costlier; used where plain is impossible
#     refused   neither: the part stays replicated there, and its bytes are named


# Words that rules use in `exported_as`.
HEADS = frozenset(("head", "tied_head"))
_ENDS = HEADS | {"table"}
_LATENT = frozenset(("latent", "latent_query", "small"))
OBSTACLES = ("edited", "read", "shape")
_COLUMN, _ROW = ("colwise", "packed_colwise"), ("rowwise", "rowwise_scatter", "packed_rowwise")


class ExportError(AutoplanError):
    """A plan that another system cannot express."""


@dataclass(frozen=True)
class Refused:
    """A module that stays replicated in the other system: its pattern, the bytes that are not split, and why."""

    pattern: str
    bytes: int
    why: str


@dataclass(frozen=True)
class Need:
    """A need of a plain cut that other systems cannot meet. `packed`: to cut a weight segment by segment."""

    text: str
    packed: bool = False

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Part:
    """The planned modules of one container, and how they can be expressed elsewhere."""

    container: str
    entries: tuple[Entry, ...]
    kind: str  # "end" | "plain" | "experts" | "latent" | "packed" | "other"
    needs: tuple[Need, ...] = field(default=())
    hindered: tuple[tuple[str, str], ...] = field(default=())  # modules whose call cannot be wrapped, with the reason

    @property
    def is_plain(self) -> bool:
        return self.kind in ("plain", "end") and not self.needs

    @property
    def axes(self) -> frozenset[int]:
        return frozenset(axis for entry in self.entries for axis in entry.axes)

    @property
    def gathered(self) -> tuple[Entry, ...]:
        """Return the linear layers of the part, each of which is exact by itself; the rest of it stays replicated when
        products are gathered."""
        hindered = dict(self.hindered)
        return tuple(e for e in self.entries if _is_linear(e) and e.pattern not in hindered and not _is_uneven(e))

    def refused(self, why: str) -> Iterator[Refused]:
        for entry in self.entries:
            if entry.style != "replicated_with_grad_allreduce":
                yield Refused(entry.pattern, entry.bytes, why)


def parts_of(plan: Plan, obstacles: Container[str] = OBSTACLES) -> tuple[Part, ...]:
    """Group planned modules by container. `obstacles`: the kinds that hinder the other system."""
    if plan.packed:
        plan = replace(plan, entries=tuple(_plain(entry, plan) for entry in plan.entries))
    parents = {entry.pattern.rpartition(".")[0] for entry in plan.entries}
    groups: dict[str, list[Entry]] = {}
    for entry in plan.entries:
        own = is_end(entry) or entry.pattern in parents  # a container's own parameters belong to it
        groups.setdefault(entry.pattern if own else entry.pattern.rpartition(".")[0], []).append(entry)
    hindered = {starred(obstacle.pattern): obstacle.why for obstacle in plan.obstacles if obstacle.kind in obstacles}
    parts = [_part(plan, container, tuple(entries), groups, hindered) for container, entries in groups.items()]
    while (linked := [_with_neighbours(part, parts) for part in parts]) != parts:
        parts = linked
    return tuple(parts)


def _with_neighbours(part: Part, parts: list[Part]) -> Part:
    """Add the needs of parts that share an axis: these are cut together."""
    if part.needs:
        return part
    for other in parts:
        if other is not part and part.axes & other.axes and (other.kind == "end") == (part.kind == "end"):
            if other.needs:
                theirs = other.needs[0]
                text = f"it is coupled to {other.container or 'the model'}: {theirs}"
                return replace(part, needs=(Need(text, theirs.packed),))
            if part.kind != "other" and other.kind == "other" or part.kind == "plain" != other.kind:
                return replace(part, needs=(Need(f"it shares its axis with {other.entries[0].pattern}"),))
    return part


def _part(
    plan: Plan, container: str, entries: tuple[Entry, ...], containers: Iterable[str], hindered: Mapping[str, str]
) -> Part:
    kind = _kind(entries)
    stopped = tuple((e.pattern, hindered[starred(e.pattern)]) for e in entries if starred(e.pattern) in hindered)
    needs = [Need(f"{pattern}: {why}") for pattern, why in stopped]
    needs += _needs(plan, container, entries, kind, containers)
    return Part(container, entries, kind, tuple(dict.fromkeys(needs)), stopped)


def _kind(entries: Iterable[Entry]) -> str:
    """Return the kind of a part, from what its entries' rules are exported as."""
    roles = {(exported_as(entry.rule), _is_linear(entry)) for entry in entries}
    words = {word for word, _ in roles}
    if words <= _ENDS:
        return "end"
    if words <= {"layers", "small"} and ("layers", False) not in roles:
        return "plain"
    if "latent" in words and words <= _LATENT:
        return "latent"
    if words == {"expert_stack"}:
        return "experts"
    return "packed" if words == {"halves"} else "other"


def is_end(entry: Entry) -> bool:
    """Return whether an entry is the token embedding or the head."""
    return exported_as(entry.rule) in _ENDS


def _needs(
    plan: Plan, container: str, entries: tuple[Entry, ...], kind: str, containers: Iterable[str]
) -> Iterator[Need]:
    """Yield what a plain cut of the part would need besides column and row layers."""
    containers = list(containers)
    for instruction in plan.runtime.instructions:
        if instruction.in_styles:
            continue
        # The innermost container that the module is in, or is; patterns are compared as written
        pattern = instruction.pattern
        around = [c for c in containers if pattern == c or is_under(c, pattern) or matches(c, pattern)]
        if container == max(around, key=lambda name: name.count("."), default=None):
            yield Need(instruction.beyond_styles())
    for entry in entries:
        layout = layout_of(entry)
        if any("@" in segment for segment in entry.segments):
            yield Need(f"{entry.pattern} is sharded over groups of ranks")
        packed = layout is not None and not layout.one_run(plan.tp_size)
        if kind in ("plain", "latent") and entry.style in _COLUMN + _ROW and packed:
            yield Need(f"{entry.pattern} is packed", packed=True)
        if _is_uneven(entry):
            yield Need(f"{entry.pattern} is sharded unevenly, between blocks")


def _is_uneven(entry: Entry) -> bool:
    """Return whether the cut is uneven, which no other system does, not even with gathering."""
    layout = layout_of(entry)
    return layout is not None and layout.is_uneven


def layout_of(entry: Entry) -> Layout | None:
    """Return the layout of an entry's leading parameter; None if it is replicated."""
    leading = next((s for s in entry.segments if s != "whole"), "")
    return Layout.parse(leading.partition(":")[2]) if leading else None


def _is_linear(entry: Entry) -> bool:
    """Return whether an entry is a weight of [out, in] in its own module, cut along the dim that its style implies."""
    if not entry.parameters or entry.parameters[0] != "weight" or set(entry.parameters) - {"weight", "bias"}:
        return False
    dim = entry.segments[0].partition(":")[0]
    return (entry.style in (*_COLUMN, "colwise_gather_output") and dim == "0") or (entry.style in _ROW and dim == "1")


def check_nothing_lost(refused: list[Refused], dialect: str, drop: bool) -> None:
    """Raise on what a dialect cannot express, unless the caller agrees to leave it replicated."""
    if refused and not drop:
        lost = sum(item.bytes for item in refused)
        lines = "\n".join(f"    {r.pattern}: {bytes_text(r.bytes)} ({r.why})" for r in refused)
        raise ExportError(
            f"{dialect} cannot express {len(refused)} entries of the plan; {bytes_text(lost)} would be "
            f"replicated:\n{lines}",
            hint="export with drop=True (--drop) to replicate them, or to torch, where the plan itself is applied",
        )

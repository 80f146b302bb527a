"""The parts of a model that a plan treats by themselves, what the plan says in each, and how each may be said right.

A part is what stands together in a container (an attention, an MLP, the table, the head), in all blocks where the plan
says the same of it: one layer of four that is written otherwise is a part of its own. Parts meet only in the residual
stream, which every rank holds whole, so each of them is right or wrong by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autoplan.check.audit.repair.dialects import DeepSpeed, Dialect, Torch, Transformers
from autoplan.check.audit.subject import Audited
from autoplan.decide.plan.folding import starred
from autoplan.emit.exports import expressible
from autoplan.emit.exports.hf import hf_entries
from autoplan.values import Plan

Values = Mapping[str, Any]  # by starred name; no entry: no row


@dataclass(frozen=True)
class Part:
    """`places`: the containers of these blocks. `says`: what the plan says there; `ways`: what it may say instead."""

    container: str
    places: tuple[str, ...]
    says: Values
    ways: tuple[Values, ...]

    def names(self, relative: str) -> tuple[str, ...]:
        """A starred name of the part, in each of its blocks."""
        rest = relative[len(self.container) :]
        return tuple(f"{place}{rest}" for place in self.places)


def parts_of(subject: Audited, right: Plan, dialect: Dialect) -> tuple[Part, ...]:
    """Every part in which the plan says anything, or could."""
    exported = {part.container: part for part in expressible.parts_of(right)}
    ways: dict[str, list[Values]] = {}
    for container, part in exported.items():
        ways.setdefault(starred(container), []).extend(_ways(subject, right, part, dialect))
    said: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys([*subject.modules, *subject.parameters]):
        if name and not (isinstance(dialect, DeepSpeed) and name not in subject.parameters):
            module = name.removesuffix(".weight") if isinstance(dialect, DeepSpeed) else name
            value = dialect.value_at(name)
            place = _place(module, ways)
            said.setdefault(place, {})
            if value is not None:
                said[place][module] = value
    groups: dict[tuple[str, Any], list[str]] = {}
    for place, values in said.items():
        signature = tuple(sorted((name[len(place) :], repr(dialect.key_of(value))) for name, value in values.items()))
        if values or starred(place) in ways:
            groups.setdefault((starred(place), signature), []).append(place)
    parts = [
        Part(container, tuple(places), _starred(said[places[0]]), (*ways.get(container, ()), {}))
        for (container, _), places in groups.items()
    ]
    return _joined(parts, subject, right, dialect)


def _joined(parts: list[Part], subject: Audited, right: Plan, dialect: Dialect) -> tuple[Part, ...]:
    """Parts that hold one tied weight are right or wrong together."""
    tied = {name.rpartition(".")[0] for weight in subject.weights if len(weight.names) > 1 for name in weight.names}
    together = [part for part in parts if {*part.says, *part.ways[0]} & tied and len(part.places) == 1]
    if len(together) < 2:
        return tuple(parts)
    says = {name: value for part in together for name, value in part.says.items()}
    count = max(len(part.ways) for part in together)
    ways = [{n: v for part in together for n, v in part.ways[min(number, len(part.ways) - 1)].items()}
            for number in range(count)]  # fmt: skip
    if isinstance(dialect, Transformers):
        lines = {name: dialect.value(style) for name, style in hf_entries(right)[0].items() if name in tied}
        ways[0] = {**ways[0], **lines}
    return (Part("", ("",), says, tuple(ways)), *(part for part in parts if part not in together))


def _starred(values: Values) -> dict[str, Any]:
    return {starred(name): value for name, value in values.items()}


def _place(name: str, containers: Mapping[str, Any]) -> str:
    """The innermost container that a module is in, or is; where none is known, the module that holds it."""
    segments = name.split(".")
    for length in range(len(segments), 0, -1):
        if starred(".".join(segments[:length])) in containers:
            return ".".join(segments[:length])
    return name.rpartition(".")[0]


def _ways(subject: Audited, plan: Plan, part: expressible.Part, dialect: Dialect) -> Iterator[Values]:
    """How the dialect can say the split of a part, the one that moves least first."""
    summed = dict.fromkeys(_with_summed_gradients(subject, starred(part.container)), "replicated_with_grad_allreduce")
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
    gathered = {
        starred(e.pattern): "rowwise_split_input" if e.style.startswith("rowwise") else "colwise_gather_output"
        for e in part.gathered
    }
    yield from _said(gathered, stars, dialect)


def _said(styles: Mapping[str, str], stars: Mapping[str, Any], dialect: Dialect) -> Iterator[Values]:
    values = {pattern: dialect.value(style, stars.get(pattern)) for pattern, style in styles.items()}
    if values and None not in values.values():
        yield values
    elif isinstance(dialect, DeepSpeed) and any(value is not None for value in values.values()):
        yield {pattern: value for pattern, value in values.items() if value is not None}


def _with_summed_gradients(subject: Audited, container: str) -> Iterator[str]:
    """Modules of a container that every rank holds whole, and that see only what is this rank's."""
    for weight in subject.weights:
        module = starred(weight.module)
        if module.startswith(f"{container}.") and weight.fact.dim is None and weight.fact.gradient != "local":
            yield module

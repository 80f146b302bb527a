"""Write a plan as transformers does: {pattern: style name}, with `*` for every number in a name.

transformers merges a plan into the one it ships, so shipped keys that are not used are written as `replicate`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from autoplan.common.patterns import grouped, matches, starred
from autoplan.decide.rulebook.read import exported_as
from autoplan.emit.exports.expressible import (
    HEADS,
    OBSTACLES,
    Need,
    Part,
    Refused,
    check_nothing_lost,
    cut_otherwise,
    layout_of,
    parts_of,
)
from autoplan.values import AllReduceGradient, Entry, Plan
from autoplan.values.reasons import OfDim

OLD_NAMES = {"colwise_gather_output": "colwise_rep", "rowwise_split_input": "rowwise_rep",
             "packed_colwise": "local_packed_colwise"}  # fmt: skip
_DIGITS = tuple(map(str, range(100)))
_NOT_IN_OLD = ("embedding_rowwise", "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts",
               "packed_colwise", "replicate")  # fmt: skip


def to_hf(plan: Plan, *, shipped: Iterable[str] = (), old: bool = False, drop: bool = False) -> dict[str, str]:
    """Return the dict, in the spelling before 5.1 if `old`. Raise ExportError on what transformers cannot express,
    unless `drop`."""
    styles, refused = hf_entries(plan)
    # transformers cuts each stored tensor of a quantised module alike: containers for which that is wrong are refused
    why = {entry.pattern: problem for entry in plan.entries if (problem := cut_otherwise(plan, entry))}
    coupled = {starred(pattern).rpartition(".")[0]: pattern for pattern in why}
    for entry in plan.entries:
        home = starred(entry.pattern).rpartition(".")[0]
        if home in coupled and starred(entry.pattern) in styles:
            problem = why.get(entry.pattern) or f"it is coupled to {coupled[home]}"
            refused.append(Refused(entry.pattern, entry.bytes, problem))
    styles = {key: style for key, style in styles.items() if key.rpartition(".")[0] not in coupled}
    if old:
        # A container in which one style has no old name is not written at all
        missing = {key for key, style in styles.items() if style in _NOT_IN_OLD}
        # A head goes with its tied table: one of them alone would cut the other.
        missing |= {starred(e.pattern) for e in plan.entries if exported_as(e.rule) == "tied_head"} & styles.keys()
        containers = {key.rpartition(".")[0] for key in missing if styles[key] != "embedding_rowwise"}
        dropped = {key for key in styles if key in missing or key.rpartition(".")[0] in containers - {""}}
        refused += [
            Refused(e.pattern, e.bytes, "the old spelling has no name for it or its partner")
            for e in plan.entries
            if starred(e.pattern) in dropped and e.style != "replicated_with_grad_allreduce"
        ]
        styles = {key: OLD_NAMES.get(style, style) for key, style in styles.items() if key not in dropped}
    check_nothing_lost(refused, "transformers (old spelling)" if old else "transformers", drop)
    if not old:
        styles |= {key: "replicate" for key in shipped if starred(key) not in styles}
    return styles


def hf_entries(plan: Plan, obstacles: Container[str] = OBSTACLES) -> tuple[dict[str, str], list[Refused]]:
    """Return what transformers can express, and what it cannot. `obstacles`: the kinds that hinder the reader."""
    styles: dict[str, str] = {}
    refused: list[Refused] = []
    # Modules that the plan leaves alone, as keys: such a key may also match others that are split
    split = [entry.pattern for entry in plan.entries]
    modules = {whole.fqn.rpartition(".")[0] for whole in plan.replicated}
    kept_whole = {starred(module) for module in modules if not any(matches(pattern, module) for pattern in split)}
    for part in _merged(parts_of(plan, obstacles), kept_whole):
        lines = dict(_lines(part, plan))
        if lines:
            styles |= lines
            hindered = dict(part.hindered)
            refused += [
                Refused(e.pattern, e.bytes, hindered.get(e.pattern, "no style of transformers shards it here"))
                for e in part.entries
                if lines.get(starred(e.pattern), "mla_kv_a_proj") == "mla_kv_a_proj"
                and e.style != "replicated_with_grad_allreduce"
            ]
        else:
            why = str(part.needs[0]) if part.needs else f"no transformers style does it ({part.entries[0].style})"
            refused += part.refused(why)
    return styles, refused


def _merged(parts: Iterable[Part], kept_whole: Container[str]) -> Iterator[Part]:
    """Merge parts that transformers cannot distinguish, since its keys have no layer numbers."""
    groups = grouped((starred(part.container), part) for part in parts)
    for container, several in groups.items():
        entries = tuple(entry for part in several for entry in part.entries)
        kinds = {part.kind for part in several}
        needs = tuple(dict.fromkeys(need for part in several for need in part.needs))
        hindered = tuple(dict.fromkeys(hindrance for part in several for hindrance in part.hindered))
        styles: dict[str, set[str]] = {}
        for entry in entries:
            styles.setdefault(starred(entry.pattern), set()).add(entry.style)
        kind = kinds.pop() if len(kinds) == 1 else "other"
        if any(len(style) > 1 for style in styles.values()):
            kind, needs = "mixed", (Need("layers are planned differently, and a key applies to every layer"),)
        elif any(entry.pattern.rpartition(".")[2] in ("*", *_DIGITS) for entry in entries):
            kind, needs = "mixed", (Need("a key cannot distinguish modules whose names are only numbers"),)
        elif any(starred(entry.pattern) in kept_whole for entry in entries):
            needs = (*needs, Need("a key applies to every layer, and the plan replicates the weight in some of them"))
        yield Part(container, entries, kind, needs, hindered)


def _lines(part: Part, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the keys of a part, or nothing."""
    if part.kind == "end":
        if part.needs or _has_tied_bias(plan):
            return
        for entry in part.entries:
            head = exported_as(entry.rule) != "table"
            if not head and not entry.style.startswith("embedding_rowwise"):
                return
            yield starred(entry.pattern), "colwise_gather_output" if head else "embedding_rowwise"
            yield from ((module, "embedding_rowwise") for module in _unused_holders(plan, entry))
    elif part.is_plain:
        yield from _as_they_are(part.entries)
    elif part.kind == "latent" and not part.needs:
        gathered = [e for e in part.entries if e.style == "colwise_gather_output"]
        latent = {e.pattern for e in gathered if exported_as(e.rule) == "latent"}
        others = [e for e in part.entries if e.style != "replicated_with_grad_allreduce" and e.pattern not in latent]
        yield from _as_they_are(others)
        yield from ((starred(pattern), "mla_kv_a_proj") for pattern in latent)
        # The projection whose output partly enters split heads without passing a column layer
        split = {starred(entry.pattern) for entry in part.entries}
        matrices = {starred(w.fqn) for w in plan.replicated if any(isinstance(r, OfDim) and r.dim == 1 for r in w.why)}
        for copied in plan.runtime.of(AllReduceGradient):
            name = starred(copied.pattern)
            inside = name.rpartition(".")[0] == part.container and name not in split
            if copied.side == "output" and inside and f"{name}.weight" in matrices:
                yield name, "mla_kv_a_proj"
    elif part.kind == "experts" and not part.needs and _transformers_cuts_alike(part):
        yield from _as_they_are(part.entries)
        yield part.container, "moe_tp_experts"
    elif part.kind == "packed" and not part.needs and all(_is_half_and_half(e) for e in part.entries):
        yield from _as_they_are(part.entries)
    elif part.kind != "mixed":
        for entry in part.gathered:
            column = entry.style in ("colwise", "packed_colwise", "colwise_gather_output")
            yield starred(entry.pattern), "colwise_gather_output" if column else "rowwise_split_input"


def _has_tied_bias(plan: Plan) -> bool:
    """Return whether a head's bias is also another module's, which transformers would restore unsharded."""
    heads = [e for e in plan.entries if exported_as(e.rule) in HEADS and "bias" in e.parameters]
    above = {entry.pattern.rpartition(".")[0] for entry in heads} - {entry.pattern for entry in plan.entries}
    split = [rule.pattern for rule in plan.runtime.parameters if rule.dim is not None]
    return any(name.endswith(".bias") and name.rpartition(".")[0] in above for name in split)


def _unused_holders(plan: Plan, entry: Entry) -> Iterator[str]:
    """Yield modules that no run calls and that hold the entry's table too: transformers may tie from any of them."""
    called = {starred(other.pattern) for other in plan.entries}
    for rule in plan.runtime.parameters:
        module, _, own = starred(rule.pattern).rpartition(".")
        if own == "weight" and f"{rule.dim}:{rule.layout}" == entry.segments[0] and module not in called:
            yield module


def _as_they_are(entries: Iterable[Entry]) -> Iterator[tuple[str, str]]:
    for entry in entries:
        yield starred(entry.pattern), entry.style.removesuffix("_scatter")


def _transformers_cuts_alike(part: Part) -> bool:
    """Return whether weights are stacks of [expert, out, in], the packed one half and half, as its kernels expect."""
    return all(
        (entry.style == "packed_colwise" and entry.segments[0].startswith("1:") and _is_half_and_half(entry))
        or (entry.style == "rowwise" and entry.segments[0].startswith("2:"))
        for entry in part.entries
    )


def _is_half_and_half(entry: Entry) -> bool:
    """Return whether a layout has two segments of one size, each sharded by units (a row layer needs none)."""
    layout = layout_of(entry)
    if entry.style != "packed_colwise" or layout is None:
        return entry.style in ("rowwise", "rowwise_scatter")
    sizes = [segment.size for segment in layout.parts]
    return layout.kind == "concatenation" and len(sizes) == 2 and sizes[0] == sizes[1]

"""Turn a repair into findings: one for each row to change, first, and what follows from it beneath.

A plan of ours is made again under its own choices, else under those of analysis; of the plans that pass, the one that
differs in the fewest places is the correction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

from autoplan.check.audit.repair.search import Repair
from autoplan.check.audit.rows import Change, layout_text, plain_key, row_text
from autoplan.check.audit.subject import Audited, Level
from autoplan.check.audit.trial import drafted
from autoplan.common.patterns import best_match, is_under, matches, nearest, starred
from autoplan.decide.plan.chosen import choices_of_plan, wish_of_plan
from autoplan.emit.words import few
from autoplan.values import Finding, Plan, SequenceBoundary

# Checks that say why a row is wrong, the surest first. Those that hold two rows against each other come last: either
# may be the wrong one.
_SURE = (
    *("dialects", "overlaps", "adapters", "frozen", "tied", "experts", "packed", "units", "norms", "gradients"),
    *("head-counts", "embeddings", "layouts", "sequence", "wrapping", "edges", "pairing"),
)
# Reasons for which no style of the dialect may do, so that all rows of a part change for one mistake.
_LISTED = 8  # rows that a hint writes out
_WHOLE_PART = ("tied", "experts", "packed", "units", "norms", "gradients", "head-counts", "wrapping")


def with_causes(subject: Audited, findings: Sequence[Finding], repair: Repair) -> tuple[Finding, ...]:
    """The causes, then all else; errors that are no cause follow from one."""
    causes: list[Finding] = []
    renamed_alike: dict[tuple[str, str], int] = {}  # places in `causes` of rows whose paths miss in the same way
    for group in repair.changes:
        reasons = [_reason(findings, change) for change in group]
        # Errors in the container of these rows for which its rows may all have to change.
        patterns = [starred(pattern) for change in group for pattern in change.patterns]
        inside = {pattern.rpartition(".")[0] for pattern in patterns} - {""}
        shared = [
            finding
            for finding in (f for f in findings if f.level == "error" and f.check in _WHOLE_PART)
            if any(is_under(home, starred(place)) for place in finding.about for home in (*inside, *patterns))
        ]
        obstacle = next((change.obstacle for change in group if change.obstacle), "")
        if not shared and obstacle:
            text = f"{obstacle}, which no style can do"
            shared = [Finding("pairing", "error", "", text, proof=_proof(findings, repair))]
        if len(group) > 1 and shared and all(_gives_up(change, repair) for change in group):
            first = min(shared, key=lambda finding: _SURE.index(finding.check))
            causes.append(_for_all(repair, group, [f for f in shared if f.check == first.check]))
        else:
            alike: dict[Any, list[Finding]] = {}  # rows of one part that say the same, and for the same reason must not
            for change, reason in zip(group, reasons, strict=True):
                cause = _cause(subject, repair, change, reason, findings)
                home = change.patterns[0].rpartition(".")[0]
                values = [repr(repair.dialect.key_of(value)) for value in (change.old, change.new)]
                alike.setdefault((cause.check, home, *values, repr(change.renames)), []).append(cause)
            for several in alike.values():  # the same mistake in several rows
                places = tuple(place for cause in several for place in cause.about)
                hint, size = "; ".join(dict.fromkeys(c.hint for c in several)), sum(c.bytes for c in several)
                causes.append(replace(several[0], where=few(places), places=places, hint=hint, bytes=size))
                if several[0].check == "dead-keys" and places[0] and len(places) > 1:
                    place = renamed_alike.setdefault(_apart(plain_key(places[0]), places[1]), len(causes) - 1)
                    if place < len(causes) - 1:
                        causes[place] = _both(causes[place], causes.pop())
    rest = []
    names = (change.renames for group in repair.changes for change in group if change.renames is not None)
    renamed = {key for name in names for key in ([name] if isinstance(name, str) else name)}
    replaced = {(cause.check, cause.message) for cause in causes}
    for finding in findings:
        if (finding.check, finding.message) in replaced:
            continue
        if finding.level == "error" and not finding.is_consequence and not causes:
            finding = replace(finding, hint="`--fix -o FILE` writes a plan for this model in the same dialect")
        elif finding.level == "error" and not finding.is_consequence:
            finding = replace(finding, kind="follows", hint="")
        if finding.check in ("dead-keys", "prefixes") and renamed & {*finding.about, *finding.where.split(", ")}:
            finding = replace(finding, kind="follows")
        elif finding.check == "dead-keys":
            finding = replace(finding, hint="remove it: the corrected plan passes without it")
        rest.append(finding)
    return (*causes, *rest)


def _both(one: Finding, other: Finding) -> Finding:
    """Two findings as one, which says what the first one says."""
    places = (*one.about, *other.about)
    hint = f"{one.hint}; {other.hint}"
    return replace(one, where=few(places), places=places, hint=hint, bytes=one.bytes + other.bytes)


def _gives_up(change: Change, repair: Repair) -> bool:
    """Return whether the row is right only with less sharding than it requested: gathered at once, or replicated."""
    less = ("gather", "Replicate", "split_input")
    return change.new is None or any(word in repair.dialect.text(change.new) for word in less)


def _reason(findings: Iterable[Finding], change: Change) -> Finding | None:
    """The finding that says why this row is wrong."""
    about = [f for f in findings if f.level == "error" and not f.is_consequence and _is_about(f, change)]
    sure = [finding for finding in about if finding.check in _SURE]
    if change.key is None:  # a row that is missing: what holds its neighbours against it is about them
        sure = [finding for finding in sure if finding.check in ("gradients", "experts")]
    return min(sure, key=lambda finding: _SURE.index(finding.check), default=None)


def _is_about(finding: Finding, change: Change) -> bool:
    inside = (is_under(place, name) for place in finding.about for name in change.names)
    around = (is_under(starred(p), starred(place)) for place in finding.about for p in change.patterns)
    return change.key in finding.about or any(inside) or any(around)


def _for_all(repair: Repair, group: Sequence[Change], reasons: Sequence[Finding]) -> Finding:
    """One mistake for which several rows change: what is to blame, then the rows."""
    rows = [pattern for change in group for pattern in change.patterns]
    places = tuple(dict.fromkeys([*(place for finding in reasons for place in finding.about if place), *rows]))
    hints = [_fix(repair, change) for change in group]
    return replace(reasons[0], where=few(places), places=places, hint="; ".join(hints))


def _cause(
    subject: Audited, repair: Repair, change: Change, reason: Finding | None, findings: Sequence[Finding]
) -> Finding:
    # The row as it is written, or the modules that it should have named
    places = (change.key,) if isinstance(change.key, str) else change.patterns
    check, message = ("pairing", "") if reason is None else (reason.check, reason.message)
    if change.renames is not None:
        check, key = "dead-keys", change.renames if isinstance(change.renames, str) else change.renames[0]
        message = f"{key!r} matches no module and no parameter, which leaves {few(change.patterns)} without a row"
        places = (key, *change.patterns)
    elif (local := _as_local_or_not(change)) or not message:
        check, message = ("edges", local) if local else _told(repair, change)
    proof, size = (reason.proof, reason.bytes) if reason is not None else ("", 0)
    proof = proof or subject.proof([*change.names, *(f"{name}.weight" for name in change.names)])
    proof = proof or _proof(findings, repair)
    is_error = subject.is_wrong or repair.proof or reason is not None or any(f.level == "error" for f in findings)
    level: Level = "error" if is_error else "warn"
    return Finding(check, level, few(places), message, _fix(repair, change), size, proof, places=places)


def _proof(findings: Iterable[Finding], repair: Repair) -> str:
    return next((f.proof for f in findings if f.proof), "") or repair.proof


def _told(repair: Repair, change: Change) -> tuple[str, str]:
    """Return why a change is needed where no check named its row."""
    names = few(change.patterns)
    if change.old is None:
        return "pairing", f"the plan has no row for {names}, which the rows around it require"
    text = repair.dialect.text(change.old)
    if change.new is None:
        return "layouts", f"{names} must be replicated, but the plan gives it {text}"
    if type(change.old) is type(change.new) and not isinstance(change.old, str | Mapping):
        options = (vars(change.old), vars(change.new))
        old, new = ({name: layout_text(v).replace(",)", ")") for name, v in each.items()} for each in options)
        name = next((name for name in new if old.get(name) != new[name]), "_")
        if not name.startswith("_"):
            return "edges", f"{names} has {name}={old.get(name)}, but its neighbours need {name}={new[name]}"
    return "edges", f"{text} does not fit {names}: the layouts of its neighbours do not match"


def _as_local_or_not(change: Change) -> str:
    """Return what is wrong where only `use_local_output` changes; "" elsewhere."""
    if type(change.old) is not type(change.new) or not hasattr(change.new, "use_local_output"):
        return ""
    old, new = ({name: repr(value) for name, value in vars(style).items()} for style in (change.old, change.new))
    if [name for name in new if new[name] != old.get(name)] != ["use_local_output"]:
        return ""
    if change.new.use_local_output:
        return f"{few(change.patterns)} outputs a DTensor where the model's code expects a plain tensor"
    return f"{few(change.patterns)} outputs a plain tensor, from which the model reads a rank's own length"


def _fix(repair: Repair, change: Change) -> str:
    """Return what to write, in the dialect's words. The plan that has it passed its audit."""
    if change.new is None or change.covered:
        key = change.key if isinstance(change.key, str) else few(change.patterns)
        every = set(change.names) >= set(repair.names_of(change.key))
        return f"remove {key!r}" if every else f"remove {few(change.patterns)} from {key!r}"
    rows = ", ".join(repair.dialect.row(pattern, change.new) for pattern in change.patterns[:_LISTED])
    more = len(change.patterns) - _LISTED
    rows += f" and the same for {more} more" if more > 0 else ""
    if change.renames is not None:
        return f"replace {change.renames!r} by {rows}" if isinstance(change.renames, str) else f"write {rows}"
    if change.key is None:
        return f"add {rows}"
    rest = set(repair.names_of(change.key)) - set(change.names)
    return f"write {rows}" + (f", and add separate rows for the others that {change.key!r} matches" if rest else "")


def candidates(subject: Audited, source: Any) -> tuple[Plan, ...]:
    """Plans that could be meant: the same choices again, what analysis chooses, and both with the sequence sharded as
    the plan's instructions do it, where its flag says otherwise."""
    plan = subject.plan.plan
    assert plan is not None
    captured, model, wish = subject.extra.get("captured"), subject.model, wish_of_plan(plan)
    others = [subject.right, drafted(source, wish, model, captured)]
    cuts = bool(plan.runtime.of(SequenceBoundary))
    if plan.sequence_parallel != cuts:
        wish = replace(wish, sequence_parallel=cuts)
        others += [drafted(source, wish, model, captured, c) for c in (choices_of_plan(plan), None)]
    apart = [(differences(subject, other), other) for other in others if other is not None]
    return tuple(other for places, other in sorted(apart, key=lambda pair: len(pair[0])) if places)


@dataclass(frozen=True)
class Difference:
    """One place in which a plan file is wrong, and what to write there in the file's words."""

    text: str
    fix: str


def _renamed_rows(subject: Audited, plan: Plan, other: Plan) -> dict[str, Difference]:
    """Rows that are right but for their patterns, by the names that they were meant for: these match nothing, or fewer
    blocks than they must."""
    apart: dict[str, Difference] = {}
    names_of_model = dict.fromkeys((*subject.modules, *subject.parameters))
    kinds = [
        [[(row.pattern, text_of(row)) for row in rows_of(each)] for each in (plan, other)] for rows_of, text_of in _ROWS
    ]
    for mine, its in kinds:
        missing = [row for row in its if row not in mine]
        for pattern, text in (row for row in mine if row not in its):
            names = {name for name in names_of_model if matches(pattern, name)}
            alike = {p: {name for name in names_of_model if matches(p, name)} for p, same in missing if same == text}
            wider = [p for p, of_model in alike.items() if names < of_model]
            meant_as = nearest(pattern, wider, count=1)
            if not meant_as:
                continue
            (right,) = meant_as
            missing.remove((right, text))
            if names:
                left_out = subject.folded(name for name in names_of_model if name in alike[right] - names)
                difference = Difference(f"the row for {pattern} leaves out {left_out}", f"write `pattern: {right}`")
            else:
                old, new = _apart(pattern, right)
                difference = Difference(
                    f"patterns with {old!r} match nothing in the model", f"write {new!r} for {old!r}"
                )
                apart[pattern] = difference
            apart |= dict.fromkeys(alike[right], difference)
    return apart


_ROWS: tuple[tuple[Callable[[Plan], Iterable[Any]], Callable[[Any], str]], ...] = (
    (lambda plan: plan.entries, lambda entry: str(entry.style)),
    (lambda plan: plan.runtime.parameters, lambda rule: row_text(replace(rule, pattern=""))),
    (lambda plan: plan.runtime.instructions, lambda done: row_text(replace(done, pattern=""))),
)


def _apart(path: str, other: str) -> tuple[str, str]:
    """Return the parts in which two paths differ.

    >>> _apart("model.decoder.0.up", "model.dec.0.up")
    ('decoder', 'dec')
    >>> _apart("layers.0.up", "model.layers.0.up")
    ('layers', 'model.layers')
    """
    parts, other_parts = path.split("."), other.split(".")
    begin = len(commonprefix([parts, other_parts]))
    end = len(commonprefix([parts[begin:][::-1], other_parts[begin:][::-1]]))
    if begin + end == min(len(parts), len(other_parts)):  # a part more, or one less: with the part beside it
        begin, end = (begin, end - 1) if end else (begin - 1, end)
    return ".".join(parts[begin : len(parts) - end]), ".".join(other_parts[begin : len(other_parts) - end])


def differences(subject: Audited, other: Plan) -> dict[str, Difference]:
    """Each module or parameter that the two plans treat otherwise."""
    plan = subject.plan.plan
    assert plan is not None
    apart: dict[str, Difference] = {}
    if plan.sequence_parallel != other.sequence_parallel:
        says, must = (str(each.sequence_parallel).lower() for each in (plan, other))
        text = f"the plan has `sequence_parallel: {says}`, but its instructions are for {must}"
        apart["sequence_parallel"] = Difference(text, f"write `sequence_parallel: {must}`")
    for field in ("parameters", "instructions"):
        rows = [getattr(each.runtime, field) for each in (plan, other)]
        if not rows[0] and rows[1]:
            text = f"the plan has no `runtime.{field}`, but the model requires {len(rows[1])}"
            apart[f"runtime.{field}"] = Difference(text, f"write the `runtime.{field}` of the corrected plan")
    if any(place.startswith("runtime.") for place in apart):
        return apart
    apart |= _renamed_rows(subject, plan, other)
    for name in subject.modules:
        if name in apart:
            continue
        mine, its = (best_match(p.entries, name) for p in (plan, other))
        if (mine and mine.style) != (its and its.style):
            says, must = mine.style if mine else "whole", its.style if its else "whole"
            fix = f"write `style: {must}`" if mine and its else f"add an entry of style {must}" if its else "remove it"
            apart[name] = Difference(f"the plan says {says}, but the model requires {must}", fix)
    by_entry = set(apart)
    for name in subject.parameters:
        mine_rule, its_rule = (best_match(p.runtime.parameters, name) for p in (plan, other))
        rows = [None if rule is None else row_text(replace(rule, pattern="")) for rule in (mine_rule, its_rule)]
        if rows[0] != rows[1] and not {name, name.rpartition(".")[0]} & by_entry:
            dims = [(None, "") if rule is None else (rule.dim, rule.layout) for rule in (mine_rule, its_rule)]
            cuts = ["whole" if dim is None else f"dim {dim}: {layout}" for dim, layout in dims]
            says, must = cuts if cuts[0] != cuts[1] else map(str, rows)
            fix = "remove it" if its_rule is None else f"{'add' if mine_rule is None else 'write'} {row_text(its_rule)}"
            apart[name] = Difference(f"the plan shards it as {says}, but the model requires {must}", fix)
    for name in subject.modules:
        near = ([row for row in p.runtime.instructions if matches(row.pattern, name)] for p in (plan, other))
        done, needed = (Counter(map(row_text, rows)) for rows in near)
        extra, missing = sorted((done - needed).elements()), sorted((needed - done).elements())
        if (extra or missing) and name not in by_entry:
            again = [f"it has {text}" + (" twice" if text in needed else "") for text in extra[:1]]
            parts = [*again, *(f"it lacks {text}" for text in missing[:1])]
            fixes = [f"remove one of {text}" if text in needed else f"remove {text}" for text in extra[:1]]
            fixes += [f"add {text}" for text in missing[:1]]
            apart[name] = Difference("; ".join(parts), "; ".join(fixes))
    for field in ("random", "random_whole", "draws"):
        drawn, wanted = (getattr(p.runtime, field) for p in (plan, other))
        if drawn != wanted:
            rows = [row_text({field: value}) for value in (drawn, wanted)]
            text = f"random numbers are not drawn as the sharding requires: the plan has {rows[0]}"
            apart[f"runtime.{field}"] = Difference(text, f"write {rows[1]}")
    return apart


def with_differences(subject: Audited, findings: Sequence[Finding], other: Plan) -> tuple[Finding, ...]:
    """The places in which the plan is wrong, then all else, which follows from them."""
    groups: dict[Difference, list[str]] = {}
    for name, difference in differences(subject, other).items():
        groups.setdefault(difference, []).append(name)
    causes = []
    for difference, names in groups.items():
        existing = [name for name in names if name in subject.modules or name in subject.parameters]
        written = tuple(name for name in names if name not in existing)
        places, proof = (*written, *subject.patterns(existing)), subject.proof(names)
        texts = difference.text, difference.fix
        causes.append(Finding("runtime", "error", few(places), *texts, 0, proof, places=places))
    # The plan of another model: each difference follows from that
    whole = [f for f in findings if f.check == "coverage" and f.level == "error"]
    causes = [*whole, *(replace(f, kind="follows", hint="") if whole else f for f in causes)]
    rest = [replace(f, kind="follows", hint="") if f.level == "error" and not f.is_consequence else f for f in findings
            if f not in whole]  # fmt: skip
    return (*causes, *rest)

"""Find the fewest rows of a wrong plan that must change, by auditing changed plans, each of them once.

    the parts of the plan → which of them are wrong by themselves → for each, the way of saying it right that is nearest
    → of its changes, those without which the audit fails → all together, audited once more

No check's suspicion enters here: a change is kept because the plan is wrong without it and right with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoplan.check.audit.checks import CHECKS
from autoplan.check.audit.lines import ForeignPlan, read_foreign
from autoplan.check.audit.repair.parts import Part, block_of, is_sequence_parallel, parts_of, sequence_ways
from autoplan.check.audit.rows import (
    Change,
    Dialect,
    PlanRow,
    changed,
    covered_by,
    dialect_of,
    effective_key,
    overlapping,
    patterns_of,
    plain_key,
    rows_of,
)
from autoplan.check.audit.subject import Audited
from autoplan.check.audit.trial import drafted, run_on
from autoplan.common.errors import AutoplanError
from autoplan.common.options import Wish
from autoplan.common.patterns import fold_names, meant, nearest, starred
from autoplan.decide.written_plans.dialects import spec_for
from autoplan.values import Finding

_MOST = 80  # audits for one repair


@dataclass
class Trials:
    """`passes` audits a plan: on simulated ranks, and by every check."""

    subject: Audited
    dialect: Dialect
    known: dict[str, bool] = field(default_factory=dict)
    proof: str = ""  # what the first plan that failed showed

    def passes(self, rows: Iterable[tuple[Any, Any]]) -> bool:
        """Return whether a plan of these rows (key, value) has no errors; a plan without rows has none."""
        rows = tuple((key, value) for starred_key, value in rows for key in self._keys(starred_key))
        name = repr([(key, repr(self.dialect.key_of(value))) for key, value in rows])
        if not rows:
            return True
        if name not in self.known:
            if len(self.known) >= _MOST:
                return False
            errors = [f for f in self.findings(self.dialect.written(rows)) if f.level == "error"]
            self.known[name] = not errors
            self.proof = self.proof or next((f.proof for f in errors if f.proof), "")
        return self.known[name]

    def _keys(self, key: str) -> tuple[str, ...]:
        """The keys that mean a starred name: transformers never looks up a * in the first place."""
        if self.subject.plan.dialect != "transformers" or not key.startswith("*"):
            return (key,)
        names = [name for name in (*self.subject.modules, *self.subject.parameters) if starred(name) == key]
        return patterns_of(self.subject, names)

    def findings(self, raw: Mapping[str, Any]) -> tuple[Finding, ...]:
        """Return the findings of an audit of this plan; an error if it cannot be tried."""
        try:
            plan = read_foreign(raw, self.subject.model, self.subject.plan.name)
        except AutoplanError as error:
            return (Finding("dialects", "error", "", error.message),)
        assert isinstance(plan, ForeignPlan)
        plan = replace(plan, dialect=self.subject.plan.dialect)
        run = run_on(self.subject.extra["clone"], self.subject.model, plan, self.subject.tp_size)
        if run.numbers is None:
            return (Finding("numbers", "error", "", f"not run: {run.reason}"),)
        extra = {**self.subject.extra, "thawed": run.thawed}
        subject = replace(self.subject, plan=plan, numbers=run.numbers, ran_at_full_size=run.full_size, extra=extra)
        findings: list[Finding] = []
        for check in CHECKS:
            findings += check.run(subject, tuple(findings))
        return tuple(findings)


@dataclass(frozen=True)
class Repair:
    """The changes by part, and the corrected plan, which passes its audit. `proof`: what running the first wrong part
    showed."""

    dialect: Dialect
    changes: tuple[tuple[Change, ...], ...]
    written: tuple[PlanRow, ...]
    raw: Mapping[str, Any]
    proof: str = ""

    def names_of(self, key: Any) -> tuple[str, ...]:
        """The modules and parameters that a row of the plan decides about."""
        return next((row.names for row in self.written if row.key == key), ())


def needs_repair(subject: Audited, findings: Iterable[Finding]) -> bool:
    """Return whether anything is wrong, or written for modules that the model, or blocks that the tiny clone, lacks."""
    if any(finding.level == "error" or finding.check == "dead-keys" for finding in findings):
        return True
    clone = subject.extra.get("clone")
    module_names = {name for name, _ in clone.model.named_modules()} if clone is not None else set()
    single = {line.pattern for line in subject.plan.lines if "*" not in line.pattern and block_of(line.pattern)}
    return clone is not None and not single <= module_names


def repair(subject: Audited, source: Any) -> Repair | None:
    """The smallest change after which the audit passes; None where none was seen to."""
    dialect = dialect_of(subject.plan)
    if dialect is None or subject.extra.get("clone") is None or subject.tp_size == 1:
        return None
    right = drafted(source, Wish(subject.tp_size), subject.model, subject.extra.get("captured"))
    if right is None:
        return None
    trials = Trials(subject, dialect)
    rows = rows_of(subject, dialect)
    parts = parts_of(subject, right, dialect)
    attempts = [(parts, True), (parts, False)]  # what says what analysis says is tried where all together is wrong
    if is_sequence_parallel(subject.plan):
        # Take the plan as one part first: under sequence parallelism parts are right or wrong together.
        whole = {name: value for part in parts for name, value in part.ways[0].items()}
        variants = tuple(
            Part("", ("",), says, tuple(sequence_ways(subject, dialect, says, right, whole)), blocks=blocks)
            for says, blocks in _variants(subject, dialect, rows)
        )
        attempts = [(variants, False), *attempts]
    all_dead = not any(row.names for row in rows)
    tangled: list[tuple[Change, ...]] = [(change,) for change in overlapping(rows, subject)]
    if (untangled := _together(tangled, rows, trials)) is not None:
        return untangled
    for tried, trusting in attempts:
        changes = [_least(part, trials, trusting) for part in tried]
        if None in changes:
            continue
        once = {change.names: change for group in changes for change in reversed(group or ())}
        own = ([change for change in group or () if once.get(change.names) is change] for group in changes)
        groups = [_as_written(group, rows, trials) for group in own if group]
        renamed = _renamed([change for group in groups for change in group], rows, subject, dialect)
        still_tangled = _still_tangled(tangled, groups)
        for more in [renamed, []] if renamed else [[]]:  # a key that matches nothing may have been meant for nothing
            if (corrected := _together([*still_tangled, *groups, *more], rows, trials)) is not None:
                return corrected
        if not groups and not trusting and not subject.is_wrong and not all_dead:
            return None  # right as it is, but for keys that match nothing
    further = _after_renaming(_renamed([], rows, subject, dialect), rows, trials, source)
    return _of_analysis(parts, rows, trials) if further is None and all_dead else further


def _still_tangled(
    tangled: Iterable[tuple[Change, ...]], groups: Iterable[tuple[Change, ...]]
) -> list[tuple[Change, ...]]:
    """Return the changes of wide rows without what a narrower row hands back to them."""
    changes: list[tuple[Change, ...]] = []
    for change in (change for group in tangled for change in group):
        back = {name for group in groups for other in group if change.key in other.covered for name in other.names}
        names = tuple(name for name in change.names if name not in back)
        if names:
            changes.append((replace(change, names=names),))
    return changes


def _after_renaming(
    renamed: Sequence[tuple[Change, ...]], rows: Sequence[PlanRow], trials: Trials, source: Any
) -> Repair | None:
    """Correct the plan whose keys reach the model: a key that matches nothing may also have a wrong value."""
    if not renamed:
        return None
    subject, dialect = trials.subject, trials.dialect
    changes = [change for group in renamed for change in group]
    raw = dialect.written([(row.key, row.value) for row in changed(rows, changes, subject)])
    plan = read_foreign(raw, subject.model, subject.plan.name)
    assert isinstance(plan, ForeignPlan)
    plan = replace(plan, dialect=subject.plan.dialect)
    run = run_on(subject.extra["clone"], subject.model, plan, subject.tp_size)
    extra = {**subject.extra, "thawed": run.thawed}
    further = repair(
        replace(subject, plan=plan, numbers=run.numbers, ran_at_full_size=run.full_size, extra=extra), source
    )
    if further is None:
        return None
    key_of = {change.names: change.renames for change in changes}
    groups = [
        tuple(replace(c, key=None, renames=key_of.pop(c.names)) if c.names in key_of else c for c in group)
        for group in further.changes
    ]
    groups += [(change,) for change in changes if change.names in key_of]
    groups.sort(key=lambda group: all(change.renames is None for change in group))  # paths first
    return replace(further, changes=tuple(groups), written=tuple(rows), proof="")


def _of_analysis(parts: Iterable[Part], rows: Sequence[PlanRow], trials: Trials) -> Repair | None:
    """A plan for this model in the dialect of one that was written for another model. No row of it is to blame."""
    groups = []
    for part in parts:
        way = next((way for way in part.ways if way and trials.passes(way.items())), {})
        meant_for = [(tuple(n for n in part.names(name) if n), value) for name, value in way.items()]
        groups.append(tuple(Change(n, patterns_of(trials.subject, n), None, value) for n, value in meant_for))
    corrected = _together([group for group in groups if group], (), trials)
    return None if corrected is None else replace(corrected, changes=(), written=tuple(rows))


def _variants(
    subject: Audited, dialect: Dialect, rows: Sequence[PlanRow]
) -> list[tuple[dict[str, Any], frozenset[str]]]:
    """Return what a plan says by starred name, for each kind of block that it tells apart, and these blocks.

    Most blocks come first; "" stands for what is in no block.
    """
    values_of = {name: row.value for row in rows for name in row.names}
    spoken = {starred(name) for name in values_of}
    values: dict[str, dict[str, Any]] = {}  # by starred name, then by block
    for name in [*subject.modules, *subject.parameters]:
        if starred(name) in spoken:
            values.setdefault(starred(name), {})[block_of(name)] = values_of.get(name)

    def says(block: str) -> dict[str, Any]:
        """What a block says of its stack. Another block speaks for a module that it lacks."""
        of_stack = {name: at for name, at in values.items() if starred(next(iter(at))) == starred(block)}
        of_block = {name: at.get(block, next(iter(at.values()))) for name, at in of_stack.items()}
        return {name: value for name, value in of_block.items() if value is not None}

    stacks: dict[str, dict[str, list[str]]] = {}
    for block in dict.fromkeys(block for at in values.values() for block in at if block):
        text = repr(sorted((name, repr(dialect.key_of(value))) for name, value in says(block).items()))
        stacks.setdefault(starred(block), {}).setdefault(text, []).append(block)
    kinds = [sorted(groups.values(), key=len, reverse=True) for groups in stacks.values()]
    variants = []
    for number in range(max(map(len, kinds), default=1)):
        chosen = [groups[number if number < len(groups) else 0] for groups in kinds]
        own = [blocks for blocks, groups in zip(chosen, kinds, strict=True) if number < len(groups)]
        every = {name: value for blocks in chosen for name, value in says(blocks[0]).items()} | says("")
        variants.append((every, frozenset(["", *(block for blocks in own for block in blocks)])))
    return variants


def _least(part: Part, trials: Trials, trusting: bool) -> tuple[Change, ...] | None:
    """The fewest changes that make a part right: none where it is; None where no way of saying it was seen to be."""
    says, same = part.says, trials.dialect.same
    if trusting and any(all(same(says.get(n), way.get(n)) for n in {**says, **way}) for way in part.ways):
        return ()
    if trials.passes(says.items()):
        return ()
    best: tuple[tuple[str, Any], ...] | None = None
    for way in part.ways:
        names = [n for n in {**says, **way} if not same(says.get(n), way.get(n))]
        if not names or not trials.passes(way.items()):
            continue
        needed = _needed(says, way, names, trials)
        if best is None or len(needed) < len(best):
            best = tuple((name, way.get(name)) for name in needed)
        if len(best) == 1:
            break
    if best is None:
        return None
    by_name = {**trials.subject.modules, **trials.subject.parameters}
    changes = []
    for name, value in best:
        meant = tuple(full for full in part.names(name) if full in by_name)
        if part.blocks or part.container == "" and part.places == ("",):
            alike = (full for full in by_name if starred(full) == name)
            meant = tuple(full for full in alike if not part.blocks or block_of(full) in part.blocks)
            if not meant and part.blocks:  # another variant of its stack says the same
                continue
        patterns = patterns_of(trials.subject, meant)
        changes.append(Change(meant, patterns, says.get(name), value, obstacle=part.obstacle))
    order = {name: place for place, name in enumerate(by_name)}
    return tuple(sorted(changes, key=lambda change: order[change.names[0]]))


def _needed(says: Mapping[str, Any], way: Mapping[str, Any], names: list[str], trials: Trials) -> list[str]:
    """Return a subset of these names, none of which can be left at what the plan says."""
    needed = list(names)
    dropped_first = sorted(names, key=lambda name: (name in says, name not in way))  # new rows
    homes: dict[str, list[str]] = {name.rpartition(".")[0]: [] for name in dropped_first}
    for name in names:
        homes[name.rpartition(".")[0]].append(name)
    together = [group for group in homes.values() if 1 < len(group) < len(names)]  # those of an MLP need each other
    for group in [*together, *([name] for name in dropped_first)]:
        fewer = [other for other in needed if other not in group]
        # What the plan says, with the values of `way` for these names, which come last
        mixed = {other: value for other, value in says.items() if other not in fewer}
        mixed |= {other: way[other] for other in fewer if way.get(other) is not None}
        if fewer and fewer != needed and trials.passes(mixed.items()):
            needed = fewer
    return needed


def _as_written(changes: Iterable[Change], rows: Sequence[PlanRow], trials: Trials) -> tuple[Change, ...]:
    """The same changes, each with the row that reaches its names now, or that was written for them and misses."""
    subject, dialect = trials.subject, trials.dialect
    dead = [row for row in rows if not row.names]
    result = []
    for change in changes:
        key = next((row.key for row in rows if row.key == effective_key(subject, dialect, change.names[0])), None)
        misses = _written_for(change, dead, subject) if key is None else None
        placed = replace(change, key=key, renames=misses)
        result.append(replace(placed, covered=covered_by(rows, placed, subject, dialect)))
    return tuple(result)


def _written_for(change: Change, dead: Sequence[PlanRow], subject: Audited) -> Any:
    """The key that matches nothing and was meant for these modules: they are the nearest to it."""
    folded = fold_names([*subject.modules, *subject.parameters])
    for row in dead:
        text = plain_key(row.key)
        same_leaf = text.rpartition(".")[2] == change.patterns[0].rpartition(".")[2]
        if same_leaf or set(nearest(text, folded)[:1]) & set(change.patterns):
            return row.key
    return None


def _renamed(
    changes: Sequence[Change], rows: Sequence[PlanRow], subject: Audited, dialect: Dialect
) -> list[tuple[Change, ...]]:
    """Keys that match nothing, written as the paths that they were meant for, where those have no row."""
    taken = {name for row in rows for name in row.names} | {name for change in changes for name in change.names}
    done = {repr(change.renames) for change in changes}
    model_names = [name for name in [*subject.modules, *subject.parameters] if name]
    result: list[tuple[Change, ...]] = []
    for row in rows:
        if row.names or repr(row.key) in done:
            continue
        text = starred(plain_key(row.key))
        below = [name for name in model_names if f".{starred(name)}".endswith(f".{text}")]
        shorter = text.partition(".")[2]
        names = below or [name for name in model_names if shorter and starred(name) == shorter]
        if isinstance(row.key, tuple):  # AutoTP matches from the start of a name: elsewhere too?
            inside = dialect.written([(tuple(f".*{expression}" for expression in row.key), row.value)])
            reached = [name for name in subject.parameters if spec_for(inside, name) is not None]
            names = [name.removesuffix(".weight") for name in reached] or names
        if not names:
            close = meant(plain_key(row.key), fold_names(model_names))
            names = [name for name in model_names if close and starred(name) == starred(close[0])]
        if names and not taken & set(names):
            taken |= set(names)
            result.append((Change(tuple(names), patterns_of(subject, names), None, row.value, None, row.key),))
    return result


def _together(groups: Sequence[tuple[Change, ...]], rows: Sequence[PlanRow], trials: Trials) -> Repair | None:
    """All changes in one plan, audited."""
    if not groups:
        return None
    corrected = changed(rows, [change for group in groups for change in group], trials.subject)
    corrected = tuple(row for row in corrected if row.names)  # what still matches nothing goes
    raw = trials.dialect.written([(row.key, row.value) for row in corrected])
    if any(finding.level == "error" for finding in trials.findings(raw)):
        return None
    return Repair(trials.dialect, tuple(groups), tuple(rows), raw, trials.proof)

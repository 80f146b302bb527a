"""Does the plan reach the model? Keys that match nothing, words that nobody knows, how much is split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autoplan.check.audit.subject import Audited, Level, Weight
from autoplan.common.conventions import conventions
from autoplan.common.patterns import fold_names, is_under, matches, meant, starred
from autoplan.decide.written_plans.choices import CUTS
from autoplan.emit.words import bytes_text, few
from autoplan.values import Finding

_ENOUGH = 0.9


def dead_keys(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """dead-keys: a key that matches nothing in the model.

    Libraries skip such a key with a log line at best, and the weights it was written for stay whole on every rank. The
    hint names the nearest path that exists. DeepSpeed's AutoTP reads no specs for what is no linear layer and no table.
    """
    names = [*subject.modules, *subject.parameters]
    for line in subject.plan.lines:
        if not any(subject.plan.reaches(line, name) for name in names):
            # What a key may have been meant for: names without a row, for a sharding style with one matrix to shard
            able = {n for w in subject.weights if w.fact.dim is not None and w.is_matrix for n in w.names}
            owners = Counter(name.rpartition(".")[0] for name in able)
            able |= {owner for owner, matrices in owners.items() if matrices == 1}
            cuts = CUTS.get(line.style, "any") not in ("whole", "nothing")
            free = [name for name in names if subject.plan.line_for(name) is None and (name in able or not cuts)]
            close = meant(line.pattern, fold_names(free))
            if subject.plan.dialect == "deepspeed":
                shown = ", ".join(fold_names(subject.parameters)[:3])
                hint = f"DeepSpeed matches from the start of a name (begin with '.*'); names look like {shown}"
                yield Finding(check, "warn", line.pattern, f"{line} matches no parameter that is not yet matched", hint)
                continue
            if subject.plan.dialect == "transformers" and any(matches(line.pattern, name) for name in names):
                if line.pattern.startswith("*"):
                    text, hint = "transformers never looks up * in the first place", "write one row for each number"
                else:
                    text, hint = (
                        "transformers never looks up the number of a block",
                        "write * for it, or remove the row",
                    )
                yield Finding(check, "warn", line.pattern, f"{line}: {text}", hint)
                continue
            hint = f"did you mean {close[0]!r}?" if close else "remove it: no similar path is missing a row"
            weights = [w for w in subject.weights if close and any(matches(close[0], n) for n in (w.name, w.module))]
            size = sum(w.bytes for w in weights)
            yield Finding(check, "warn", line.pattern, f"{line} matches no module and no parameter", hint, size)
        elif subject.plan.dialect == "deepspeed" and CUTS.get(line.style, "whole") != "whole":
            weights = subject.of_line(line)
            if weights and all(weight.said.dim is None for weight in weights):
                owner = type(subject.modules[weights[0].module]).__name__
                text = f"{line} matches {weights[0].name} of {owner}, but AutoTP shards only linear layers and tables"
                yield Finding(check, "warn", line.pattern, text, "remove it: it is replicated")


def prefixes(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """prefixes: keys that are right but for the path in front of them (`model.`, `model.language_model.`).

    Nothing matches, nothing is split, and nothing is said. Where one prefix fixes several keys, it is named.
    """
    dead = [f.where for f in earlier if f.check == "dead-keys"]
    if not dead:
        return
    shapes = {starred(name) for name in [*subject.modules, *subject.parameters]}
    for prefix in sorted((name for name in subject.modules if name), key=lambda name: (name.count("."), name)):
        fixed = [key for key in dead if f"{starred(prefix)}.{starred(key)}" in shapes]
        if fixed:
            text, hint = f"{len(fixed)} of {len(dead)} dead keys exist under {prefix!r}", f"{prefix}.{fixed[0]} etc."
            yield Finding(check, "warn", ", ".join(fixed[:3]), text, f"write them as {hint}")
            return
    stripped = {key: key.partition(".")[2] for key in dead if starred(key.partition(".")[2]) in shapes}
    if stripped:
        first, text = next(iter(stripped)), f"{len(stripped)} dead keys exist without their first part"
        hint = f"write {stripped[first]!r} for {first!r}"
        yield Finding(check, "warn", ", ".join(list(stripped)[:3]), text, hint)


def overlaps(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """overlaps: two keys that say different things of one module or parameter.

    torch applies both styles, one after the other; transformers takes the more exact key. Either way one of the two
    lines is not what happens.
    """
    pairs: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys([*subject.modules, *subject.parameters]):
        lines = [line for line in subject.plan.lines if subject.plan.reaches(line, name)]
        for one, other in zip(lines, lines[1:], strict=False):
            if one.style != other.style:
                pairs.setdefault((str(one), str(other)), []).append(name)
    for (first, second), names in pairs.items():
        text, hint = f"{first} and {second} both match", "keep one of them"
        if subject.level == "error":
            yield subject.suspect(check, subject.patterns(names), text, hint, names=names)
        else:
            yield Finding(check, "warn", subject.folded(names), text, hint)


def dialects(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """dialects: words that the plan's own library does not know, or knows under another name.

    One unknown style may discard a whole plan; old names of transformers' styles are gone or going; and a dict handed
    to `DistributedConfig(tp_plan=…)` is laid over the shipped plan, whose other rules stay in force.
    """
    styles: frozenset[str] = frozenset()
    if subject.plan.dialect == "transformers":
        from autoplan.hf.own_sharding import known_styles

        styles = known_styles()
        # Rules of the shipped plan that a dict does not name, and that transformers keeps
        shipped = conventions().shipped_plan(subject.model)
        added = [f"{key}: {style}" for key, style in shipped.items() if key not in subject.plan.raw]
        if subject.plan.lines and added:
            text = f"DistributedConfig(tp_plan=…) would also apply shipped rules: {few(added)}"
            yield Finding(check, "note", "", text, "write 'replicate' for the ones to disable")
    level: Level = "error" if subject.is_wrong else "warn"
    proof = subject.proof() if subject.is_wrong else ""
    for line in subject.plan.lines:
        written = str(subject.plan.raw.get(line.pattern, line.written))
        if not line.style:
            yield Finding(check, level, line.pattern, line.unread, "use a style that the library knows", proof=proof)
        elif subject.plan.dialect == "torch" and isinstance(subject.plan.raw.get(line.pattern), str):
            text = f"{line} is a string among style objects: parallelize_module refuses it"
            objects = "ColwiseParallel() or RowwiseParallel()" if "wise" in line.style else "a ParallelStyle object"
            yield Finding(check, level, line.pattern, text, f"use {objects}", proof=proof)
        elif subject.plan.dialect == "transformers" and styles and written not in styles:
            text = f"{line}: the installed transformers has no style {written!r}"
            yield Finding(check, level, line.pattern, text, f"write {line.style!r}", proof=proof)
        elif subject.plan.dialect == "transformers" and written != line.style:
            text = f"{line}: {written!r} is a deprecated name of {line.style!r}"
            yield Finding(check, "note", line.pattern, text, f"write {line.style!r}")


def coverage(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """coverage: how much of what could be split is split, and the largest weights that the plan leaves whole.

    A plan may be right and still run out of memory. Counted are weights with two dims or more that analysis can split.
    """
    matrices = [weight for weight in subject.weights if weight.is_matrix]
    level: Level
    if subject.tp_size > 1 and not any(weight.said.dim is not None for weight in matrices):
        total = sum(weight.bytes for weight in subject.weights)
        text, level = f"the plan shards nothing: {bytes_text(total)} are replicated", "warn"
        known, lines = [*subject.modules, *subject.parameters], subject.plan.lines
        # Names of rows that are nearly right are corrected by their own findings, and DeepSpeed's are expressions
        reported = subject.plan.dialect == "deepspeed" or any(finding.check == "prefixes" for finding in earlier)
        if lines and not reported and not any(subject.plan.reaches(line, name) for line in lines for name in known):
            text, level = f"no row matches the model, so {text}", "error"  # the plan of another model
        yield Finding(check, level, "", text, "see `autoplan plan` for what can be sharded", total)
        return
    able = [weight for weight in matrices if weight.fact.dim is not None]
    missed = [weight for weight in able if weight.said.dim is None]
    total = sum(weight.bytes for weight in able)
    if not missed or not total:
        return
    share = 1 - sum(weight.bytes for weight in missed) / total
    held = sum(weight.bytes for weight in missed) * (subject.tp_size - 1) // subject.tp_size
    text = f"{share:.0%} of the shardable bytes are sharded; {_largest(subject, missed)} are replicated"
    # The stack whose blocks are split least, where that is less than half.
    parts = []
    for stack in subject.stacks:
        mine = [weight for weight in able if any(is_under(block, weight.name) for block in stack.fqns)]
        whole = sum(weight.bytes for weight in mine if weight in missed)
        total = sum(weight.bytes for weight in mine)
        if total and whole / total > 0.5:
            parts.append(f"blocks of {stack.name} are sharded by {1 - whole / total:.0%}")
    level = "warn" if share < _ENOUGH or parts else "note"
    hint = "; ".join([*parts, "`autoplan plan` shards them"])
    first = subject.folded([weight.name for weight in missed if starred(weight.name) == starred(missed[0].name)])
    yield Finding(check, level, first, text, hint, held)


def _largest(subject: Audited, missed: list[Weight]) -> str:
    groups: dict[str, list[Weight]] = {}
    for weight in missed:
        groups.setdefault(starred(weight.name), []).append(weight)
    sizes = {subject.folded(w.name for w in group): sum(w.bytes for w in group) for group in groups.values()}
    heavy = sorted(sizes, key=lambda names: -sizes[names])[:3]
    return ", ".join(f"{names} ({bytes_text(sizes[names])})" for names in heavy)

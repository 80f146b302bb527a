"""What carrying the plan out shows: what a plan of ours does besides, numbers on simulated ranks, rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autoplan.capture.copies import copied
from autoplan.check.audit.rows import row_text
from autoplan.check.audit.subject import Audited
from autoplan.common.errors import AutoplanError
from autoplan.common.patterns import fold_names, matches
from autoplan.values import Boundary, CallRewrite, Finding, ParallelBlock, ParameterRule, SplitLogits, VocabularyTable

_SAID: dict[type[Any], str] = {
    ParameterRule: "its layout on ranks does not follow from the plan's choices",
    Boundary: "different collectives at module boundaries",
    ParallelBlock: "branches of a block are summed differently",
    VocabularyTable: "the vocabulary's table or head is handled differently",
    SplitLogits: "the vocabulary's table or head is handled differently",
    CallRewrite: "calls inside the module are rewritten differently",
}  # integers have a check of their own (head_counts.py)


def runtime(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """runtime: a plan of ours does something else than its choices need.

    All that a Plan does on a rank follows from which weights are cut: it is derived again from the plan's own choices,
    and what is missing, added or changed (an edited file, another release of the model) is listed.
    """
    plan, right = subject.plan.plan, subject.right
    if plan is None:
        return
    if right is None:
        yield Finding(check, "warn", "", "no plan can be made from this plan's own choices on this model", "plan again")
        return
    for kind, text in _SAID.items():
        names = dict(subject.parameters if kind is ParameterRule else subject.modules)
        names |= dict(subject.model.named_buffers(remove_duplicate=False))
        items = [p.runtime.parameters if kind is ParameterRule else p.runtime.of(kind) for p in (plan, right)]
        have, need = (_expanded(own, names) for own in items)
        groups: dict[str, list[str]] = {}
        for name in dict.fromkeys([*have, *need]):
            has, needs = have.get(name, set()), need.get(name, set())
            extra, missing = has - needs, needs - has
            if extra or missing:
                parts = [f"it has {item}" for item in sorted(extra)] + [f"it lacks {item}" for item in sorted(missing)]
                groups.setdefault("; ".join(parts[:3]).replace("pattern: '', ", ""), []).append(name)
        for difference, places in groups.items():
            yield subject.suspect(check, subject.patterns(places), f"{text}: {difference}", "plan again", names=places)
    for field in ("random", "random_whole", "draws"):
        have, need = getattr(plan.runtime, field), getattr(right.runtime, field)
        if have != need and (field == "draws" or _modules(subject, have) != _modules(subject, need)):
            yield subject.suspect(check, "", "random numbers are not drawn as the sharding requires", "plan again")


def _expanded(items: tuple[Any, ...], names: dict[str, Any]) -> dict[str, set[Any]]:
    """Return what is said of each name, by whatever pattern."""
    texts: dict[str, set[Any]] = {}
    for item in items:
        for name in names if "*" in item.pattern else (item.pattern,):
            if matches(item.pattern, name):
                text, texts_of_name = row_text(replace(item, pattern="")), texts.setdefault(name, set())
                texts_of_name.add(f"{text} twice" if text in texts_of_name else text)
    return texts


def _modules(subject: Audited, patterns: tuple[str, ...]) -> set[str]:
    return {name for name in subject.modules for pattern in patterns if matches(pattern, name)}


def numbers(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """numbers: the plan, run on simulated ranks, does not compute what the model computes.

    Outputs and every gradient of a tiny clone under the plan, by the plan's own library, against the unsharded model in
    double precision. A plan of ours that was edited, and is not what follows from its choices, runs nowhere:
    `parallelize` refuses it.
    """
    if subject.refused:
        yield Finding(check, "error", "", subject.refused, "see the other findings", kind="cannot-run")
    elif subject.numbers is None and subject.plan.lines and subject.tp_size > 1:
        yield Finding(check, "note", "", f"the plan was not run on ranks: {subject.unproven}")
    if subject.numbers is None:
        return
    errors = [finding for finding in subject.numbers.findings if finding.level == "error"]
    if not errors:
        return
    ranks = f"on {subject.numbers.tp_size} simulated ranks"
    broken = [finding for finding in errors if not finding.where]
    outputs = [finding for finding in errors if finding.where and finding.check != "gradients"]
    hint, places = "see the other findings", tuple[str, ...]()
    if broken:
        yield Finding(check, "error", "", f"cannot run {ranks}", hint, proof=broken[0].message, kind="cannot-run")
        return
    if outputs:
        text = f"outputs are wrong {ranks} ({', '.join(f.where for f in outputs[:3])})"
    else:
        places = tuple(fold_names([finding.where for finding in errors]))
        text = f"outputs are exact, but {len(errors)} gradients are wrong {ranks}"
    proof = "; ".join(f"{finding.where}: {finding.message}" for finding in (outputs or errors)[:3])
    where = ", ".join(places[:6])
    yield Finding(check, "error", where, text, hint, proof=proof, kind="wrong-numbers", places=places)


def rounding(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """rounding: is a difference between sizes a bug, or the order of sums?

    A sum over ranks adds in another order, which in bfloat16 alone moves logits in the third digit. Exact in double
    precision and different in the dtype asked for is rounding, and its size is said.
    """
    dtype, clone = subject.settings.dtype, subject.extra.get("clone")
    if dtype is None:
        return
    if clone is None or subject.numbers is None:
        yield Finding(check, "note", "", f"not run in {dtype}: {subject.unproven}")
        return
    import torch

    from autoplan.check.audit.trial import sharding_for
    from autoplan.check.verify.sharded import check_sharding
    from autoplan.common.random_values import cast_numbers, inputs_in

    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype):
        raise AutoplanError(f"dtype={dtype!r} is not a torch dtype", hint="use 'bfloat16' or 'float16'")
    model = copied(clone.model)
    cast_numbers(model, wanted)
    feeds = inputs_in(wanted, clone.feeds)
    report = check_sharding(model, feeds, sharding_for(subject.plan), subject.numbers.tp_size, checks=("forward",))
    forward, gradient = report.forward or 0.0, max(report.gradients.values(), default=0.0)
    seen = f"in {dtype}, outputs differ by up to {forward:.1e} and gradients by up to {gradient:.1e}"
    if subject.is_wrong:
        text = f"{seen}, which is not rounding: the plan is wrong in double precision too"
        yield Finding(check, "error", "", text, "see the other findings", proof=subject.proof())
    else:
        yield Finding(check, "note", "", f"{seen}: this is rounding, since the plan is exact in double precision")

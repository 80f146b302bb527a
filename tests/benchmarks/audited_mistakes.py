"""Does an audit name the culprit? Mistakes are made in right plans of real models, in every dialect, and audited.

    python tests/benchmarks/audited_mistakes.py [--dialects torch hf] [--only llama] [--sample 4] [--seed 0]
    python tests/benchmarks/audited_mistakes.py --by-hand fixing|held [--dialects torch hf] [--only llama] [--kinds …]

Printed is, by dialect: right plans that pass, mistakes, of these rejected (a plan that is exact all the same is no
mistake), causes that came first, findings in the dialect's words, and corrected plans that pass. Measures, and asserts
nothing.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "helpers"), str(Path(__file__).resolve().parents[1])]

from drawn_plans import mistake_of  # noqa: E402
from drawn_words import halves  # noqa: E402
from mistakes import ARCHITECTURES, DIALECTS, Mistake, Model, mistakes, mistakes_in_file, right_plan  # noqa: E402
from scored_audits import score  # noqa: E402

from autoplan.check.audit.auditor import audit_source  # noqa: E402
from autoplan.common.errors import AutoplanError  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dialects", nargs="*", default=DIALECTS)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--by-hand", choices=("fixing", "held"), help="plans that are wrong as users write them")
    parser.add_argument("--sample", type=int, default=0, help="mistakes of each plan, drawn at random; 0: all")
    parser.add_argument("--kinds", default="", help="an expression for the kinds of mistakes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    totals: dict[str, Counter[str]] = {dialect: Counter() for dialect in options.dialects}
    end = time.monotonic() + 60 * options.minutes
    if options.by_hand is not None:
        for one in sorted(halves()[options.by_hand == "held"], key=lambda one: one.model):
            asked = one.dialect in options.dialects and (not options.only or one.model in options.only)
            if asked and re.search(options.kinds, one.kind) and time.monotonic() < end:
                one_mistake(Model.of(one.model), one.dialect, mistake_of(one), totals[one.dialect])
    for name in () if options.by_hand is not None else options.only or ARCHITECTURES:
        model = Model.of(name)
        for dialect in options.dialects:
            if time.monotonic() < end:
                one_plan(model, dialect, options, totals[dialect], end)
    print("\ndialect      right plans pass  mistakes  exact all the same  rejected  cause first  its words  fix passes")
    for dialect, counts in totals.items():
        wrong = counts["wrong"]
        print(
            f"{dialect:12} {counts['right passes']:>7} of {counts['right']:<3}{wrong:>14}{counts['exact']:>17}"
            + "".join(f"{counts[mark]:>11}" for mark in ("rejected", "cause", "words", "fixed"))
        )


def one_plan(model: Model, dialect: str, options: Any, counts: Counter[str], end: float) -> None:
    """Audit the right plan of a dialect, then the mistakes made in it."""
    right = None if dialect == "plan file" else right_plan(model, dialect)
    if right is None and dialect != "plan file":
        return
    plan = model.plan if right is None else right.written(right.rows)
    counts["right"] += 1
    report = audit_source(model.source, plan, 2, correct=False)
    if not report.ok:
        said = [
            f"{f.check} {f.where}: {f.message[:120]} {f.proof[:300]}" for f in report.findings if f.level == "error"
        ]
        print(f"REJECTED {model.name} {dialect}: {said}", flush=True)
        return
    counts["right passes"] += 1
    chance = random.Random(f"{options.seed} {model.name} {dialect}")
    found = mistakes_in_file(model, options.seed) if right is None else mistakes(model, right, options.seed)
    found = [mistake for mistake in found if re.search(options.kinds, mistake.kind)]
    if options.sample:
        found = chance.sample(found, min(options.sample, len(found)))
    for mistake in found:
        if time.monotonic() > end:
            return
        one_mistake(model, dialect, mistake, counts)


def one_mistake(model: Model, dialect: str, mistake: Mistake, counts: Counter[str]) -> None:
    """Audit a wrong plan, and count how it ends."""
    start = time.perf_counter()
    try:
        outcome, said = score(model, dialect, mistake)
    except AutoplanError as error:
        outcome, said = "refused", str(error)
    took = time.perf_counter() - start
    marks = outcome.split()
    counts["exact" if marks[0] == "exact," else "wrong"] += 1
    counts.update(marks)
    good = outcome in ("rejected cause words fixed", "exact, said", "exact, silent")
    mark = "ok " if good else "BAD"
    causes = "" if good else f" {mistake.causes[0][:3]}"
    print(f"{mark} {model.name:12} {dialect:10} {mistake.kind:28} {outcome:30} {took:5.1f}s{causes}")
    print("" if good else f"      {said}\n", end="", flush=True)


if __name__ == "__main__":
    main()

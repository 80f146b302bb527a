"""Every op of torch's own op database on simulated ranks: exact, or whole with its reason?

    python tests/benchmarks/op_database.py [--only OP] [--samples N] [--json FILE] [--document FILE] [--verbose]

Each sample of each op stands between linears (tests/helpers/op_samples.py), along every dim of its first float tensor
that is longer than 1; with `--samples` at most so many of an op, spread evenly over those it has. The plan is what
analysis alone derives. Counted is what became of each case, and named is each one that is wrong or raises an error that
autoplan did not mean to raise; then the exit code is 1. `--document` writes the counts into a section of docs/reach.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from op_law import BROKEN, KINDS, Outcome, judge
from op_samples import Case, Unusable, cases, database, name_of, usable_samples

HEADING = "## Every op of torch's own database"
MOST_REASONS = 12
REASONS = {
    "gathered": "Why an op takes no shares",
    "whole": "Why dims stay whole",
    "refused": "Why there is no plan",
    "unusable": "Why samples are no cases",
}


@dataclass
class Counts:
    """What became of the cases, and of the samples and ops that they are from."""

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=lambda: {kind: Counter() for kind in KINDS})
    beside: int = 0
    ops: set[str] = field(default_factory=set)
    all_ops: set[str] = field(default_factory=set)
    samples: set[tuple[str, int]] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)

    def add(self, case: Case | Unusable, outcome: Outcome) -> None:
        self.outcomes[outcome.kind] += 1
        self.beside += outcome.beside
        self.all_ops.add(case.op)
        if outcome.kind != "unusable":
            self.ops.add(case.op)
            self.samples.add((case.op, case.number))
        if outcome.reason:
            self.reasons[outcome.kind][outcome.reason_kind] += 1
        if outcome.kind in BROKEN:
            self.broken.append(f"{outcome.kind}: {told(case)}: {outcome.reason}")

    def as_dict(self) -> dict[str, Any]:
        cut = sum(self.outcomes[kind] for kind in KINDS if kind != "unusable")
        return {
            "ops": len(self.ops),
            "ops_unusable": sorted(self.all_ops - self.ops),
            "samples": len(self.samples),
            "cases": cut,
            "outcomes": {kind: self.outcomes[kind] for kind in KINDS},
            "whole_with_something_else_cut": self.beside,
            "reasons": {kind: dict(found.most_common()) for kind, found in self.reasons.items()},
            "broken": self.broken,
        }


def counted(only: list[str], most: int | None, verbose: bool) -> Counts:
    """Op by op in a process of its own kind: what crashes takes nothing with it but itself."""
    counts, start = Counts(), time.perf_counter()
    names = [name_of(op) for op in database()]
    names = [name for name in dict.fromkeys(names) if not only or name in only]
    workers = Workers()
    for place, name in enumerate(names):
        try:
            found = workers.run(judged, name, most)
        except BrokenProcessPool:
            found = [(Unusable(name, 0, ""), Outcome("raw", "the process that ran its samples died"), 0.0)]
        for case, outcome, seconds in found:
            counts.add(case, outcome)
            if verbose or outcome.kind in BROKEN:
                print(f"{outcome.kind:8} {told(case)} {outcome.reason} ({seconds:.1f} s)", flush=True)
        if place % 20 == 19:
            print(f"# {place + 1} of {len(names)} ops, {sum(counts.outcomes.values())} cases, "
                  f"{time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
    workers.close()
    return counts


class Workers:
    """One process after the other, each for some tasks."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["op_law", "torch.testing._internal.common_methods_invocations"])
        self.pool: ProcessPoolExecutor | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.pool is None:
            self.pool = ProcessPoolExecutor(1, self.context, max_tasks_per_child=40)
        try:
            return self.pool.submit(function, *args).result()
        except BrokenProcessPool:
            self.close()
            raise

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
        self.pool = None


def judged(name: str, most: int | None) -> list[tuple[Case | Unusable, Outcome, float]]:
    """Every case of one op, without its module, and what became of it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    op = next(op for op in database() if name_of(op) == name)
    wanted = spread_evenly(usable_samples(op), most)
    found = []
    for case in cases(op, lambda number, *_: number in wanted):
        start = time.perf_counter()
        outcome = judge(case)
        bare = replace(case, model=nn.Module(), inputs={}) if isinstance(case, Case) else case
        found.append((bare, outcome, time.perf_counter() - start))
    return found


def told(case: Case | Unusable) -> str:
    return str(case) if isinstance(case, Case) else f"{case.op}[{case.number}]"


def spread_evenly(numbers: list[int], most: int | None) -> set[int]:
    if most is None or len(numbers) <= most:
        return set(numbers)
    return {numbers[round(place * (len(numbers) - 1) / max(most - 1, 1))] for place in range(most)}


def text_of(found: dict[str, Any], *, names: bool = True) -> str:
    """The counts in Markdown, with the names of all ops that have no case if they are wanted."""
    lines = [
        f"{found['ops']} ops, {found['samples']} of their samples, {found['cases']} cases (a sample along one dim):",
        "",
        "| cases | what became of them |",
        "| ---: | --- |",
        *(f"| {found['outcomes'][kind]} | {text} |" for kind, text in KINDS.items()),
        "",
        f"In {found['whole_with_something_else_cut']} of those that stay whole, other weights of the module are cut, "
        "and exact.",
    ]
    for kind, title in REASONS.items():
        reasons = list(found["reasons"][kind].items())
        if reasons:
            lines += ["", f"{title}:", "", *(f"- {count}: {reason}" for reason, count in reasons[:MOST_REASONS])]
            rest = sum(count for _, count in reasons[MOST_REASONS:])
            lines += [f"- {rest}: {len(reasons) - MOST_REASONS} other reasons"] if rest else []
    none = found["ops_unusable"]
    lines += ["", f"{len(none)} ops have no case{': ' + ', '.join(none) if names else ''}."] if none else []
    lines += ["", *(f"- **{line}**" for line in found["broken"])] if found["broken"] else []
    return "\n".join(lines)


def document(path: Path, text: str) -> None:
    """Put the text into its section, in the place of what was there."""
    before = path.read_text(encoding="utf-8") if path.exists() else "# How far autoplan reaches\n"
    section = f"{HEADING}\n\n{text}\n"
    pattern = re.compile(rf"{re.escape(HEADING)}\n.*?(?=\n## |\Z)", re.S)
    after = pattern.sub(lambda _: section.rstrip("\n") + "\n", before) if HEADING in before else f"{before}\n{section}"
    path.parent.mkdir(exist_ok=True)
    path.write_text(after, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--samples", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--document", type=Path)
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found = counted(given.only, given.samples, given.verbose).as_dict()
    text = text_of(found)
    print(text)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if given.document:
        document(given.document, f"`{' '.join(('python', *command()))}`, with torch {torch.__version__.split('+')[0]}, "
                 f"printed on {time.strftime('%Y-%m-%d')}:\n\n{text_of(found, names=False)}")  # fmt: skip
    return int(bool(found["broken"]))


def command() -> list[str]:
    """How this was called, without where the output went."""
    kept: list[str] = ["tests/benchmarks/op_database.py"]
    items = iter(sys.argv[1:])
    for item in items:
        if item in ("--json", "--document"):
            next(items)
        elif item != "--verbose":
            kept.append(item)
    return kept


if __name__ == "__main__":
    raise SystemExit(main())

"""How much do the static checks see, and how much the ranks? Faults planted into good plans, at many places.

    python tests/benchmarks/mutants.py [--only llama] [--places 3]

Every kind of fault that a plan can hold (tests/helpers/planted_faults.py) is planted into the inferred plans of tiny
clones of a cross-section of architectures, at up to `--places` places of each. Printed is, by kind: how many mutants
there are, how many the audit's static checks see without running anything, how many verify sees on two simulated ranks,
and which ones nobody sees. Of these, a mutant is called equivalent when it is exact at tp 2 and 4 with two sets of
weights (4 where the clone can be split so far). Measures, and asserts nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autoplan.analyse.solve import solve
from autoplan.check.audit.auditor import subject_of
from autoplan.check.audit.checks import CHECKS
from autoplan.check.audit.lines import foreign_of
from autoplan.check.audit.subject import Audited
from autoplan.check.verify.clone import Clone, clone_of
from autoplan.check.verify.on_ranks import sharding_of
from autoplan.check.verify.sharded import check_sharding
from autoplan.common.errors import AutoplanError
from autoplan.common.random_values import randomise
from autoplan.decide.plan.planner import make_plan
from autoplan.hf.source import resolve
from autoplan.values import Plan, Runtime

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from planted_faults import FAULTS, Fault  # noqa: E402

ARCHITECTURES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gpt_neox", "gptj", "opt",
    "bloom", "falcon", "mpt", "starcoder2", "stablelm", "olmo2", "cohere", "granite", "apertus", "codegen", "biogpt",
    "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "dbrx", "olmoe", "mamba", "mamba2", "falcon_h1", "bamba",
    "qwen3_next", "bert:BertForMaskedLM", "roberta:RobertaForMaskedLM", "t5", "bart:BartForConditionalGeneration",
    "whisper", "llava",
)  # fmt: skip
FIELDS = ("parameters", "instructions")
PLANTED = tuple(fault for fault in FAULTS if fault.tamper is None)  # the others are not in the plan


@dataclass(frozen=True)
class Mutant:
    """One fault in one plan. `unseen`: what running it at other sizes and weights says, where nobody saw it."""

    architecture: str
    fault: str
    place: int
    static: bool
    verified: bool
    unseen: str = ""


def mutations(fault: Fault, plan: Plan, places: int) -> Iterator[Plan]:
    """The fault at each place that the plan has for it: every field is turned so that another item comes first."""
    seen = {repr(plan.runtime)}
    found = 0
    for turn in range(max(len(getattr(plan.runtime, field)) for field in FIELDS)):
        spoiled = fault.spoil(replace(plan, runtime=_turned(plan.runtime, turn)))
        if spoiled is None:
            return
        mutant = replace(plan, runtime=_restored(plan.runtime, _turned(plan.runtime, turn), spoiled.runtime))
        if repr(mutant.runtime) not in seen:
            seen.add(repr(mutant.runtime))
            found += 1
            yield mutant
        if found == places:
            return


def _turned(runtime: Runtime, by: int) -> Runtime:
    fields = {field: getattr(runtime, field) for field in FIELDS}
    return replace(runtime, **{f: (items[by % len(items) :] + items[: by % len(items)]) if items else items
                               for f, items in fields.items()})  # fmt: skip


def _restored(original: Runtime, turned: Runtime, spoiled: Runtime) -> Runtime:
    """What was changed, in the order in which it was."""
    fields: dict[str, Any] = {}
    for field in FIELDS:
        items, after = list(getattr(turned, field)), list(getattr(spoiled, field))
        if items == after:
            fields[field] = getattr(original, field)
            continue
        start = getattr(original, field).index(items[0])
        kept = len(items)
        if len(after) < kept:  # one was dropped: leave its place empty
            gap = next((i for i, (a, b) in enumerate(zip(items, after, strict=False)) if a != b), len(after))
            after.insert(gap, None)
        cut = kept - start
        ordered = after[cut:kept] + after[:cut] + after[kept:]
        fields[field] = tuple(item for item in ordered if item is not None)
    return replace(spoiled, **fields)


class Bench:
    """One architecture, ready to have faults planted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clone: Clone = clone_of(resolve(name))
        self.source = resolve(self.clone.model, inputs=self.clone.feeds)
        self.subject: Audited = subject_of(self.source, "inferred", 2, run=False)
        assert self.subject.plan.plan is not None
        self.plan = self.subject.plan.plan
        self.quiet = self._findings(self.plan)

    def _findings(self, plan: Plan) -> set[str]:
        subject = replace(self.subject, plan=foreign_of(plan, self.name))
        return {repr(f) for check in CHECKS for f in check.run(subject, ()) if f.level != "note"}

    def seen_statically(self, mutant: Plan) -> bool:
        return bool(self._findings(mutant) - self.quiet)

    def seen_on_ranks(self, mutant: Plan, fault: Fault, model: Any = None) -> bool:
        model = self.clone.model if model is None else model
        sharding = sharding_of(mutant)
        return not check_sharding(model, self.clone.feeds, sharding, mutant.tp_size, checks=fault.checks).ok

    def elsewhere(self, mutant: Plan, fault: Fault, place: int) -> str:
        """Is a mutant that nobody noticed equivalent? Other weights at tp 2, and the same fault at tp 4."""
        other = copy.deepcopy(self.clone.model)
        randomise(other, seed=7)
        if self.seen_on_ranks(mutant, fault, other):
            return "seen with other weights"
        solution = solve(self.subject.solution.trace, 4)
        wide = make_plan(solution, model=self.name)
        if not any(fact.dim is not None for fact in solution.parameters):
            return "exact at tp 2 with two sets of weights; the clone has no tp 4"
        planted = list(mutations(fault, wide, place + 1))
        if len(planted) <= place:
            return "exact at tp 2 with two sets of weights; no such place at tp 4"
        for model in (self.clone.model, other):
            if self.seen_on_ranks(planted[place], fault, model):
                return "seen at tp 4"
        return "equivalent: exact at tp 2 and 4 with two sets of weights"


def measure(name: str, places: int) -> Iterator[Mutant]:
    bench = Bench(name)
    for fault in PLANTED:
        for place, mutant in enumerate(mutations(fault, bench.plan, places)):
            static = bench.seen_statically(mutant)
            verified = bench.seen_on_ranks(mutant, fault)
            unseen = "" if verified else bench.elsewhere(mutant, fault, place)
            yield Mutant(name, fault.name, place, static, verified, unseen)


def table(mutants: list[Mutant]) -> str:
    lines = [f"{'kind':<42}{'mutants':>8}{'static':>8}{'ranks':>8}{'neither':>9}"]
    for kind in [*dict.fromkeys(m.fault for m in mutants), "all"]:
        mine = [m for m in mutants if kind in (m.fault, "all")]
        static, ranks = sum(m.static for m in mine), sum(m.verified for m in mine)
        neither = sum(not m.static and not m.verified for m in mine)
        lines.append(f"{kind:<42}{len(mine):>8}{static:>8}{ranks:>8}{neither:>9}")
    lines.append("")
    lines += [
        f"{count:5} unseen on two ranks: {why}" for why, count in Counter(m.unseen for m in mutants if m.unseen).items()
    ]
    left = [m for m in mutants if m.unseen]
    lines += [f"      {m.architecture}: {m.fault} (place {m.place}): {m.unseen}" for m in left]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=ARCHITECTURES)
    parser.add_argument("--places", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: list[Mutant] = []
    start = time.perf_counter()
    for name in options.only:
        try:
            mine = list(measure(name, options.places))
        except AutoplanError as error:
            print(f"{name}: {error.message}", flush=True)
            continue
        found += mine
        print(f"{name}: {len(mine)} mutants, {time.perf_counter() - start:.0f} s", flush=True)
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps([vars(m) for m in found], indent=1))


if __name__ == "__main__":
    main()

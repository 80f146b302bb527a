"""Plan files of several models, edited at random: each is refused with a clear error on load or apply, or runs exact.

    PYTHONPATH=. python tests/fuzz/edited_plans.py --count 2000 --seed 0

What is accepted is run on simulated ranks, outputs, loss and gradients. Prints one line of counts; exit 1 if any case
ended badly.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from plan_mutants import SUBJECTS, subject, try_mutants


def run(count: int, seed: int) -> bool:
    counts, problems = Counter[str](), list[str]()
    for name in SUBJECTS:
        outcome = try_mutants(subject(name), -(-count // len(SUBJECTS)), seed)
        counts += outcome.counts
        problems += outcome.problems
    for one in problems:
        print(one, file=sys.stderr)
    clear = counts["refused on load"] + counts["refused on apply"]
    told = f"clear={clear} exact={counts['exact']} raw={counts['raw'] + counts['unclear']} wrong={counts['wrong']}"
    print(f"edited_plans cases={sum(counts.values())} {told}")
    return not problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(0 if run(given.count, given.seed) else 1)

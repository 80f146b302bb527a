"""`parallelize`, interrupted at any line: the model is whole, or bit for bit as it was.

    PYTHONPATH=. python tests/fuzz/interrupts.py --count 4000 --seed 0

A dense model at every line where `--count` allows, experts, a hybrid and a model of several modes at lines that are
drawn; each with and without FSDP2 and checkpointing. Prints one line of counts; exit 1 if any case ended badly.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from interrupted_models import HOW, KINDS, apply_to, build_of, whole
from interrupts import fake_world, interrupted_everywhere


def run(count: int, seed: int) -> bool:
    cases = kept = 0
    problems: list[str] = []
    with fake_world(4):
        for kind in KINDS:
            for how in HOW:
                share = count // (len(KINDS) * len(HOW))
                chance = random.Random(f"{kind} {how} {seed}")

                def choose(seen: list[Any], share: int = share, chance: random.Random = chance) -> list[int]:
                    return sorted(chance.sample(range(len(seen)), min(share, len(seen))))

                tried, whole_ones, found = interrupted_everywhere(
                    build_of(kind), apply_to(kind, how), whole(how), choose
                )
                cases, kept = cases + tried, kept + whole_ones
                problems += [f"{kind}, {how}: {one}" for one in found]
    for one in problems:
        print(one, file=sys.stderr)
    print(f"interrupts cases={cases} as_it_was={cases - kept - len(problems)} whole={kept} half={len(problems)}")
    return not problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(0 if run(given.count, given.seed) else 1)

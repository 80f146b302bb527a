"""Are configs of public quantised checkpoints planned as they are stored? Sizes only: no weights, two minutes.

    python tests/benchmarks/quantised_plans.py [--tp 8] [--only qwen3]

For each config under examples/shapes/quantised: the method, how many weights are stored how, the bytes as stored and as
bf16, the sizes that part no block, and what would be parted at --tp with the ways out. Exit code 1 if any is read as
unquantised, or cannot be planned.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import autoplan
from autoplan.common.patterns import matches
from autoplan.hf.source import resolve

SHAPES = Path(__file__).parents[2] / "examples" / "shapes" / "quantised"


def line(folder: Path, tp: int) -> tuple[str, bool]:
    start = time.perf_counter()
    try:
        made = autoplan.plan(str(folder), tp_size=tp, prove="none")
    except autoplan.AutoplanError as error:
        return f"{folder.name}: {error}", False
    names = [name for name, _ in resolve(str(folder)).module().named_parameters()]
    stored = plain = 0
    for weight in made.packed:
        count = sum(weight.name == name or matches(weight.name, name) for name in names)
        stored, plain = stored + count * weight.bytes, plain + 2 * count * weight.elements
    said = next(
        (f.message for f in made.findings if f.check == "quantised" and f.level == "note"), "READ AS UNQUANTISED"
    )
    parted = [f for f in made.findings if f.check == "quantised" and f.level == "warn"]
    text = (
        f"{folder.name}: {said.removeprefix('stored quantised: ')}; {stored / 1e9:.1f} GB for {plain / 1e9:.1f} GB; "
        f"valid tp: {', '.join(map(str, made.legal_tp))} ({time.perf_counter() - start:.1f} s)"
    )
    return "\n    ".join([text, *(f"{f.where}: {f.message} | {f.hint}" for f in parted)]), bool(made.packed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--only", action="append", help="part of a name; repeatable")
    given = parser.parse_args()
    fine = 0
    folders = [
        one for one in sorted(SHAPES.iterdir()) if not given.only or any(part in one.name for part in given.only)
    ]
    for folder in folders:
        text, good = line(folder, given.tp)
        fine += good
        print(text, flush=True)
    print(f"{fine} of {len(folders)} planned as they are stored")
    return fine != len(folders)


if __name__ == "__main__":
    sys.exit(main())

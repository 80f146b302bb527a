"""Run the red team and print the table by class: `python tests/redteam [PATTERN ...] [--verify all] [--out FILE]`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from redteam.case import CASES  # noqa: E402
from redteam.known import DISTURBED, KNOWN, UNSTEADY  # noqa: E402
from redteam.pool import run_all  # noqa: E402
from redteam.worker import Outcome  # noqa: E402

KINDS = ("exact", "refused", "raw", "wrong", "late", "broken")


def line(one: Outcome) -> str:
    proven = {True: "Proven", False: "not proven", None: ""}[one.proven]
    verified = {True: "verify passes", False: "verify fails", None: ""}[one.verified]
    told = " · ".join(part for part in (one.where, proven, verified) if part)
    text = " ".join(one.text.split())[:220]
    return f"{one.kind:8} {one.case:52} {one.error:9.2g}  {told}  {text}".rstrip()


def table(outcomes: list[Outcome]) -> str:
    classes = sorted({one.case.partition("/")[0] for one in outcomes})
    rows = ["| class | cases | " + " | ".join(KINDS) + " | idle |", "|---" * (len(KINDS) + 3) + "|"]
    for name in [*classes, "all"]:
        own = [one for one in outcomes if name in ("all", one.case.partition("/")[0])]
        counts = Counter(one.kind for one in own)
        idle = sum(one.kind == "exact" and one.idle for one in own)
        rows.append(f"| {name} | {len(own)} | " + " | ".join(str(counts[kind]) for kind in KINDS) + f" | {idle} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", help='ids such as "flags/*@tp2"')
    parser.add_argument("--verify", choices=("wrong", "all", "no"), default="wrong", help="whom verify is asked about")
    parser.add_argument(
        "--setting",
        help='one for all, whatever is written at the cases: "cp2", "tp2+sp", "tp2+dp2+ac", "tp2+bf16", "tp2+meta"',
    )
    parser.add_argument("--out", help="a file of JSON lines")
    asked = parser.parse_args()
    names = [name for case in CASES.values() for name in case.ids()]
    names = [name for name in names if not asked.patterns or any(fnmatch(name, p) for p in asked.patterns)]
    if asked.setting:
        names = list(dict.fromkeys(f"{name.partition('@')[0]}@{asked.setting}" for name in names))
    outcomes = []
    for one in run_all(names, asked.verify):
        outcomes.append(one)
        if one.kind != "exact" or one.case in KNOWN or one.verified is False:
            print(line(one), flush=True)
        if asked.out:
            with open(asked.out, "a") as file:
                file.write(json.dumps(dataclasses.asdict(one)) + "\n")
    print(table(outcomes))
    bad = {one.case for one in outcomes if not one.allowed() and one.case not in UNSTEADY}
    for name in sorted(bad - KNOWN.keys()):
        print(f"NEW: {name}")
    for name in sorted(KNOWN.keys() & {one.case for one in outcomes} - bad):
        print(f"STALE, remove from known.py: {name}")
    disturbed = Counter(what for one in outcomes for what in one.surroundings)
    print("left changed:", dict(disturbed) or "nothing")
    for what in sorted(set(disturbed) ^ DISTURBED.keys()) if not asked.patterns else ():
        print(f"{'NEW' if what in disturbed else 'STALE, remove from known.py'}: {what} is left changed")
    return int(bad != KNOWN.keys() & {one.case for one in outcomes})


if __name__ == "__main__":
    sys.exit(main())

"""Every fuzzer of this folder, one after the other, and one table of what came of their cases: `make fuzz`.

    python tests/fuzz --count N --seed S

A file here is a fuzzer if it can be run by itself (`if __name__ == "__main__":`); its last line of output is its
counts, `name=… cases=… clear=… exact=… raw=… slow=… wrong=… hangs=…`, or other words for what may happen (`half=…`).
Without --count each runs as many cases as it likes. The exit code is 1 if anything happened that must not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
COLUMNS = ("cases", "clear", "exact", "raw", "slow", "wrong", "hangs")
BAD = ("raw", "slow", "wrong", "hangs", "half")


def fuzzers() -> list[Path]:
    """The files that are fuzzers."""
    files = (path for path in sorted(HERE.glob("*.py")) if not path.name.startswith("_"))
    return [path for path in files if 'if __name__ == "__main__":' in path.read_text("utf-8")]


def counts_of(line: str) -> dict[str, str]:
    """The counts that a fuzzer printed.

    >>> counts_of("name=plan files cases=2 raw=0")
    {'name': 'plan files', 'cases': '2', 'raw': '0'}
    """
    name, _, counts = line.partition(" cases=")
    found = dict(count.split("=") for count in f"cases={counts}".split())
    return {"name": name.removeprefix("name="), **found}


def run(path: Path, arguments: list[str]) -> dict[str, str]:
    """One fuzzer, in a process of its own; what it shows on stderr is shown."""
    done = subprocess.run([sys.executable, str(path), *arguments], stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if "cases=" in line]
    return counts_of(lines[-1]) if lines else {"name": f"{path.stem} (did not end: {done.returncode})", "raw": "1"}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    arguments = ["--seed", str(given.seed)] + (["--count", str(given.count)] if given.count else [])
    rows = []
    for path in fuzzers():
        rows.append(run(path, arguments))
        print(rows[-1], file=sys.stderr)
    columns = [*COLUMNS, *dict.fromkeys(key for row in rows for key in row if key not in ("name", *COLUMNS))]
    print(f"| {'fuzzer':<24} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for row in rows:
        print(f"| {row['name']:<24} | {' | '.join(row.get(column, '') for column in columns)} |")
    return int(any(int(row.get(kind, "0")) for row in rows for kind in BAD))


if __name__ == "__main__":
    sys.exit(main())

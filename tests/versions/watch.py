"""Run the tests under other versions than the locked ones, and write docs/versions.md.

    .venv-newest/bin/python tests/versions/watch.py newest --locked .venv/bin/python --budget 1500

The Python that runs this is the environment under test. It first runs the parts that a new version is most likely to
break, then the rest of the fast suite within the budget. Failures run again in the locked environment: if a test fails
there too, the versions did not break it. The exit code is always 0; it gates nothing.

    python tests/versions/watch.py bounds

prints the constraints of the oldest environment: for each dependency in pyproject.toml the newest patch of the lowest
release that it allows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "versions.md"
TEN = ("llama", "gpt2", "falcon", "phi3", "olmo2", "gemma3_text", "mixtral", "deepseek_v3", "mamba2", "t5")
FAST = ["-m", "not slow and not long"]
FIRST: dict[str, list[str]] = {
    "canaries": ["tests/patches/test_canaries.py"],
    "verify": ["tests/check/test_verify.py", *FAST],
    "state dicts": ["tests/execute/parameters/test_state_dict.py", *FAST],
    "compile": ["tests/execute/test_compile.py", *FAST],
    "generate": ["tests/execute/vocabulary/test_generate.py", *FAST],
    "ten architectures": ["tests/project/test_breadth.py", "-k", " or ".join(f"[{name}" for name in TEN)],
}
REST = "rest of the fast suite"
_LINE = re.compile(
    r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (tests/.*?) *$"
    r"|^(ERROR) (tests/[^: ]+)(?: - .*)?$"  # a file whose import fails has no tests
)
_VERSIONS = (
    "import json, importlib.metadata as m; "
    "print(json.dumps({d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}))"
)


def lowest(dependencies: Sequence[str]) -> list[str]:
    """Return the constraints that hold each dependency at its lower bound.

    >>> lowest(["torch>=2.11,<3", "pyyaml>=6.0"])
    ['torch==2.11.*', 'pyyaml==6.0.*']
    """
    bounds = (re.match(r"([\w.-]+)>=([\d.]+)", dependency) for dependency in dependencies)
    return [f"{bound[1]}=={bound[2]}.*" for bound in bounds if bound]


def outcomes(output: str) -> dict[str, str]:
    """Return how each test ended, as pytest-xdist prints it with -v.

    >>> outcomes("[gw0] [ 50%] PASSED tests/a.py::test_b[two words]\\n[gw1] [100%] FAILED tests/a.py::test_c ")
    {'tests/a.py::test_b[two words]': 'PASSED', 'tests/a.py::test_c': 'FAILED'}
    >>> outcomes("ERROR tests/d.py - AttributeError: no such name")
    {'tests/d.py': 'ERROR'}
    """
    return {match[2] or match[4]: match[1] or match[3] for match in map(_LINE.match, output.splitlines()) if match}


def run(python: str, arguments: Sequence[str], seconds: float) -> tuple[dict[str, str], bool]:
    """Run pytest for at most `seconds`; return how each test ended, and whether pytest came to its end."""
    command = [python, "-m", "pytest", "-v", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", *arguments]
    command += ["-W", "ignore::autoplan.UntestedVersionWarning"]  # being newer than what was tested is no failure here
    log = ROOT / "build" / "watch.log"
    log.parent.mkdir(exist_ok=True)
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=settings)
        try:
            code: int | None = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            code = None
    text = log.read_text(errors="replace")
    ended = outcomes(text)
    if code not in (0, 1, None) and not ended:
        print(text[-3000:])
        raise SystemExit(f"pytest ended with {code} before it ran a test")
    return ended, code in (0, 1)


def versions(python: str) -> dict[str, str]:
    """Return the version of each package in an environment."""
    found: dict[str, str] = json.loads(
        subprocess.run([python, "-c", _VERSIONS], capture_output=True, check=True).stdout
    )
    return found


def watch(budget: float) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Run all parts within the budget; return how their tests ended, and the parts that did not come to an end."""
    start, parts, cut = time.monotonic(), {}, []
    rest = ["tests", *FAST, *(f"--ignore={arguments[0]}" for arguments in FIRST.values())]
    for name, arguments in {**FIRST, REST: rest}.items():
        left = budget - (time.monotonic() - start)
        parts[name], complete = run(sys.executable, arguments, left) if left > 0 else ({}, False)
        if not complete:
            cut.append(name)
        print(f"{name}: {_figures(parts[name])}{'' if complete else ', cut off'}", flush=True)
    return parts, cut


def section(
    name: str, parts: Mapping[str, Mapping[str, str]], cut: Sequence[str], here: Mapping[str, str],
    there: Mapping[str, str], again: Mapping[str, str],
) -> str:  # fmt: skip
    """Write what the page says of one environment. `there` and `again`: of the locked one, empty if there is none."""
    wanted = [re.split(r"[>=]", one)[0] for one in _dependencies()]
    lines = [f"`make test-{name}`, {date.today()}: " + ", ".join(f"{one} {here[one]}" for one in wanted) + ".", ""]
    lines += ["| part | passed | failed | skipped | completed |", "|---|---|---|---|---|"]
    for part, ended in parts.items():
        count = _counted(ended)
        figures = f"{count['passed']} | {count['failed']} | {count['skipped']}"
        lines.append(f"| {part} | {figures} | {'no' if part in cut else 'yes'} |")
    failed = _failures(parts)
    if failed:
        lines += ["", "Failures:", ""]
        lines += [f"- `{test}`: {_verdict(test, there, again)}" for test in failed]
    moved = sorted(one for one in here.keys() & there.keys() if _plain(here[one]) != _plain(there[one]))
    if there:
        text = ", ".join(f"{one} {_plain(there[one])} → {_plain(here[one])}" for one in moved)
        lines += ["", f"Versions that differ from the lock: {text or 'none'}."]
    return "\n".join(lines)


def written(page: str, name: str, text: str) -> str:
    """Return the page with the part of this environment written anew."""
    begin, end = f"<!-- {name}: written by `make test-{name}` -->", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"


def _dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["dependencies"])


def _failures(parts: Mapping[str, Mapping[str, str]]) -> list[str]:
    return [test for ended in parts.values() for test, how in ended.items() if how in ("FAILED", "ERROR")]


def _counted(ended: Mapping[str, str]) -> Counter[str]:
    words = {"PASSED": "passed", "XFAIL": "passed", "SKIPPED": "skipped"}
    return Counter(words.get(how, "failed") for how in ended.values())


def _figures(ended: Mapping[str, str]) -> str:
    count = _counted(ended)
    return f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped"


def _verdict(test: str, there: Mapping[str, str], again: Mapping[str, str]) -> str:
    if not there:
        return "not compared"
    ended = {how for other, how in again.items() if other == test or other.startswith(f"{test}::")}
    if not ended:
        return "did not run under the lock"
    return "passes under the lock" if ended.isdisjoint(("FAILED", "ERROR")) else "fails under the lock too"


def _plain(version: str) -> str:
    return version.partition("+")[0]


def main() -> None:
    """Watch one environment, or print the constraints of the oldest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("newest", "oldest", "bounds"))
    parser.add_argument("--locked", default="", help="the Python of the locked environment")
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds in all")
    given = parser.parse_args()
    if given.name == "bounds":
        print("\n".join(lowest(_dependencies())))
        return
    parts, cut = watch(given.budget)
    failed = _failures(parts)
    there = versions(given.locked) if given.locked else {}
    again = run(given.locked, failed, given.budget)[0] if failed and given.locked else {}
    text = section(given.name, parts, cut, versions(sys.executable), there, again)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), given.name, text), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

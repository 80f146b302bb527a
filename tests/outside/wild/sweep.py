"""Plan every model of the zoo without inputs, verify it, and print one table: `make test-wild`.

A model that cannot be built here (its package is missing, or does not fit the installed torch) is a line of its own.
Models run one after the other in a process that is replaced when one of them ends it or needs too many seconds of CPU;
lines are kept in a file, so that a sweep can go on where it stopped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

FIELDS = ("vision", "generation", "sound", "language", "science")
_MARK = "RESULT "
_EACH = 15  # models that one process tries
_WAITS = 6  # times the limit that may pass on a busy machine


@dataclass(frozen=True)
class Line:
    """What came of one model. `outcome`: exact, wrong, no inputs, no plan, not installed, too slow."""

    model: str
    outcome: str
    share: float = 0.0
    plan_seconds: float = 0.0
    seconds: float = 0.0
    said: str = ""


def models() -> dict[str, Callable[[], object]]:
    """All of the zoo, by code base and name."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    found: dict[str, Callable[[], object]] = {}
    for field in FIELDS:
        found |= importlib.import_module(f"outside.wild.{field}").MODELS
    return found


def tried(name: str) -> Line:
    """Build, plan and verify one model."""
    import torch

    import autoplan

    stand_in_for_torchvision()
    torch.manual_seed(0)
    try:
        model = models()[name]().eval()
    except Exception as error:  # whatever the package does where it does not fit
        return Line(name, "not installed", said=_line(error))
    began = time.process_time()
    try:
        plan = autoplan.plan(model, tp_size=2)
    except autoplan.AutoplanError as error:
        outcome = "no inputs" if "nput" in error.message else "no plan"
        return Line(name, outcome, plan_seconds=time.process_time() - began, said=_line(error))
    except Exception as error:  # a raw error is what the zoo is there to find
        return Line(name, "raw error", plan_seconds=time.process_time() - began, said=f"{type(error)}: {_line(error)}")
    planned = time.process_time() - began
    share = _share(plan, model)
    began = time.process_time()
    try:
        report = autoplan.verify(model, plan, tp_size=2, checks=("parameters", "forward", "second_shape"))
    except Exception as error:  # the same
        outcome = "not verified" if isinstance(error, autoplan.AutoplanError) else "raw error"
        said = f"{type(error).__name__}: {_line(error)}"
        return Line(name, outcome, share, planned, time.process_time() - began, said)
    wrong = next((str(f) for f in report.findings if f.level == "error"), "")
    return Line(name, "exact" if report.ok else "wrong", share, planned, time.process_time() - began, wrong[:200])


def _share(plan: object, model: object) -> float:
    """The part of the weights of two dims and more that is split."""
    from autoplan.common.patterns import matches

    sizes = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1}  # type: ignore[attr-defined]
    whole = sum(n for name, n in sizes.items() if any(matches(left.fqn, name) for left in plan.replicated))  # type: ignore[attr-defined]
    return 1 - whole / max(sum(sizes.values()), 1)


def _line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error))[:300]


def stand_in_for_torchvision() -> None:
    """Where torchvision's compiled operators do not load (built for CUDA), its models do without them."""
    import torch

    try:
        found = importlib.util.find_spec("torchvision")
        if found is None or found.origin is None:
            return
        import torchvision  # noqa: F401
    except RuntimeError:
        text = (Path(str(found.origin)).parent / "_meta_registrations.py").read_text(encoding="utf-8")
        library = torch.library.Library("torchvision", "DEF")
        for name in set(re.findall(r'register_(?:fake|meta)\("(?:torchvision::)?(\w+)"', text)):
            library.define(f"{name}(Tensor x) -> Tensor")
        stand_in_for_torchvision.library = library  # type: ignore[attr-defined]
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]


def sweep(names: list[str], limit: float, kept: Path) -> list[Line]:
    """Try what is not in the file yet."""
    lines = {}
    if kept.exists():
        lines = {one["model"]: Line(**one) for one in map(json.loads, kept.read_text().splitlines())}
    with Worker(limit) as worker:
        for name in names:
            if name in lines:
                continue
            lines[name] = worker.tried(name)
            with kept.open("a") as file:
                file.write(json.dumps(asdict(lines[name])) + "\n")
            print(_row(lines[name]), flush=True)
    return [lines[name] for name in names]


class Worker:
    """A process that tries models by name, started anew where it ended, and after every few."""

    def __init__(self, limit: float) -> None:
        self.limit, self.process, self.done = limit, None, 0
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  lives as long as this does

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self.errors.close()

    def tried(self, name: str) -> Line:
        process = self._running()
        clock = threading.Timer(_WAITS * self.limit, process.kill)  # it hangs: that takes no CPU
        clock.start()
        process.stdin.write(name + "\n")
        process.stdin.flush()
        try:
            for said in process.stdout:
                if said.startswith(_MARK):
                    return Line(**json.loads(said.removeprefix(_MARK)))
        finally:
            clock.cancel()
        if process.wait() in (-signal.SIGXCPU, -signal.SIGKILL):
            return Line(name, "too slow", seconds=self.limit, said=f"more than {self.limit:.0f} s")
        self.errors.seek(0)
        last = (self.errors.read().strip().splitlines() or ["nothing said"])[-1]
        return Line(name, "raw error", said=last[:300])

    def _running(self) -> subprocess.Popen[str]:
        if self.process is None or self.process.poll() is not None or self.done >= _EACH:
            self._end()
            self.errors.truncate(0)
            command = [sys.executable, __file__, "--work", "--limit", str(self.limit)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
            self.process, self.done = subprocess.Popen(command, text=True, **pipes), 0
        self.done += 1
        return self.process

    def _end(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.kill()
            self.process.wait()


def work(limit: float) -> None:
    """Try the models that are named on stdin; the system ends this process where one needs too much CPU."""
    for name in map(str.strip, sys.stdin):
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + limit) + 1, hard))
        print("\n" + _MARK + json.dumps(asdict(tried(name))), flush=True)


def _row(line: Line) -> str:
    said = line.said.replace("|", "/")[:160]
    return (
        f"| {line.model} | {line.outcome} | {line.share:.3f} | {line.plan_seconds:.1f} | {line.seconds:.1f} | {said} |"
    )


def summary(lines: list[Line]) -> str:
    """The figures of the whole."""
    run = [line for line in lines if line.outcome != "not installed"]
    planned = [line for line in run if line.outcome in ("exact", "wrong", "not verified")]
    exact = [line for line in planned if line.outcome == "exact"]
    seconds = sorted(line.plan_seconds for line in run)
    bases = len({line.model.split("/")[0] for line in run})
    return (
        f"{len(run)} models of {bases} code bases ({len(lines) - len(run)} not installed): {len(planned)} planned "
        f"without inputs, {len(exact)} exact, median share {statistics.median([x.share for x in exact] or [0]):.3f}, "
        f"planning {statistics.median(seconds or [0]):.1f} s at the median, {max(seconds, default=0):.1f} s at worst"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help="try one model, in this process")
    parser.add_argument("--work", action="store_true", help="try the models that are named on stdin")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of CPU for each")
    parser.add_argument("--kept", type=Path, default=Path("build/wild.jsonl"), help="where lines are kept")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.one:
        print(_MARK + json.dumps(asdict(tried(given.one))))
        return
    if given.work:
        work(given.limit)
        return
    given.kept.parent.mkdir(parents=True, exist_ok=True)
    names = [name for name in models() if given.only in name]
    print("| model | outcome | share | planning | verifying | what was said |\n|---|---|---|---|---|---|")
    print("\n" + summary(sweep(names, given.limit, given.kept)))


if __name__ == "__main__":
    main()

"""Run functions and scripts in processes of their own, from the server that has imported torch and transformers."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autoplan.check.ranks.common import process_context

Ended = subprocess.CompletedProcess[str]


def run_apart(folder: Path, *calls: tuple[Any, ...]) -> Ended:
    """Call `(function, *arguments)` each in a process, all at once: the worst exit code, and all that they print."""
    processes = [process_context().Process(target=_called, args=(folder, *each)) for each in enumerate(calls)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        process.kill()
        process.join()
    said = "".join((folder / f"output{number}.txt").read_text() for number in range(len(calls)))
    return Ended(calls, max(abs(process.exitcode) for process in processes), said, said)


def _called(folder: Path, number: int, call: tuple[Callable[..., Any], Any]) -> None:
    os.chdir(folder)
    written = os.open(f"output{number}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    function, *arguments = call
    function(*arguments)


def script(what: Path | str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
    """Run a file, or a module by its name, as `python FILE` and `python -m NAME` do."""
    os.environ.update(environment or {})
    sys.argv = [str(what), *arguments]
    if isinstance(what, str):
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(what.parent))
        runpy.run_path(str(what), run_name="__main__")

"""Verify every architecture of a mapping: the whole library as a test.

Hundreds of models are built and run, some of which take long, use much memory, or crash their interpreter. So each gets
a process of its own and a time limit, and one that dies is one line. Processes come from a fork server that has loaded
torch and transformers once, and results are listed in transformers' order whichever ends first.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from autoplan.check.ranks.common import end_process, process_context
from autoplan.check.ranks.run import Engine
from autoplan.check.scoreboard.score import CHECK_SETS, How, score
from autoplan.check.verify.clone import parse_mesh
from autoplan.common.errors import AutoplanError
from autoplan.common.options import MODES, check_context_size, check_expert_size
from autoplan.common.patterns import nearest
from autoplan.common.requirements import installed_versions
from autoplan.values import Score, Scoreboard
from autoplan.version import __version__

Progress = Callable[[int, int, str, Score | None], None]  # done, total, the one that starts or ended, its score

_GRACE = 3.0  # seconds between asking a process to end and killing it


def scoreboard(
    mapping: str,
    tp_size: int = 2,
    *,
    ep_size: int = 1,
    cp_size: int = 1,
    only: Sequence[str] = (),
    engine: Engine = "threads",
    checks: str = "fast",
    jobs: int = 1,
    timeout: float = 180.0,
    sequence_parallel: bool = False,
    lengths: Sequence[int] = (),
    checkpointing: str = "",
    mesh: str = "",
    progress: Progress | None = None,
) -> Scoreboard:
    """Score every architecture of `mapping` (or `only` these model types), `jobs` at a time.

    `checks` is "fast" (parameters, outputs and every gradient in eval mode) or "all". `sequence_parallel` applies
    wherever it is possible. `lengths` are the sequence lengths to run, if a model's inputs leave a choice.
    `ep_size=tp_size` places experts on different ranks instead of sharding each, if a model has any. `cp_size` splits
    the sequence, in place of weights (tp_size=1) or as well. `checkpointing` ("block", "submodule", "selective")
    checkpoints every block; on a `mesh` ("dp=2,tp=2") the models train, too.
    """
    start = time.perf_counter()
    if checks not in CHECK_SETS:
        raise AutoplanError(f"checks={checks!r}", hint=f"choose one of {', '.join(CHECK_SETS)}")
    if max(tp_size, cp_size) < 2 or jobs < 1:
        raise AutoplanError(f"tp_size={tp_size}, jobs={jobs}", hint="use at least 2 ranks and 1 job")
    if not 0 < timeout < float("inf"):
        raise AutoplanError(f"timeout={timeout!r}", hint="give a number of seconds above 0")
    if any(length < 2 for length in lengths):
        raise AutoplanError(f"lengths={tuple(lengths)}", hint="use sequences of at least 2 positions")
    check_expert_size(tp_size, ep_size)
    check_context_size(cp_size, tp_size, ep_size)
    if checkpointing and checkpointing not in MODES:
        raise AutoplanError(f"checkpointing={checkpointing!r}", hint=f"choose one of {', '.join(MODES)}")
    sizes = parse_mesh(mesh) if mesh else None
    if sizes is not None and tuple(map(sizes.size, ("tp", "ep", "cp"))) != (tp_size, 1, cp_size):
        raise AutoplanError(f"mesh {mesh!r} does not have tp={tp_size}", hint=f"write dp=2,tp={tp_size}, or change tp")
    wanted = _chosen(mapping, only)
    how = How(
        tp_size, engine, CHECK_SETS[checks], sequence_parallel, tuple(lengths), ep_size, checkpointing, mesh, cp_size
    )
    scores = dict(_scores(wanted, how, jobs, timeout, progress))
    return Scoreboard(
        mapping=mapping,
        scores=tuple(scores[number] for number in sorted(scores)),
        versions={"autoplan": __version__, **installed_versions()},
        seconds=round(time.perf_counter() - start, 1),
        **vars(how),
    )


def _chosen(mapping: str, only: Sequence[str]) -> list[tuple[str, str]]:
    from autoplan.hf.type_rules import architectures

    pairs = architectures(mapping)
    types = [model_type for model_type, _ in pairs]
    for name in (name for name in only if name not in types):
        close = ", ".join(nearest(name, types))
        hint = f"types like it: {close}" if close else ""
        raise AutoplanError(f"mapping {mapping!r} has no model type {name!r}", hint=hint)
    return [(model_type, name) for model_type, name in pairs if not only or model_type in only]


# Processes


@dataclass
class _Running:
    """An architecture that is being scored."""

    number: int
    process: Any
    pipe: Connection
    since: float


def _scores(
    wanted: list[tuple[str, str]], how: How, jobs: int, timeout: float, progress: Progress | None
) -> Iterator[tuple[int, Score]]:
    """Yield each architecture's number and score, as they end."""
    context = process_context()
    waiting = list(enumerate(wanted))[::-1]
    running: list[_Running] = []
    done = 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, pair = waiting.pop()
                if progress:
                    progress(done, len(wanted), pair[0], None)
                receiving, sending = context.Pipe(duplex=False)
                # no daemon: gloo starts children
                process = context.Process(target=_worker_main, args=(sending, pair, how))
                process.start()
                sending.close()
                running.append(_Running(number, process, receiving, time.monotonic()))
            # Wait until some have answered, died, or used up their time.
            deadline = min(job.since for job in running) + timeout
            ready = wait([job.pipe for job in running], max(0.0, deadline - time.monotonic()))
            now = time.monotonic()
            for job in [entry for entry in running if entry.pipe in ready or now - entry.since >= timeout]:
                running.remove(job)
                result = _result(job, *wanted[job.number], timeout)
                done += 1
                if progress:
                    progress(done, len(wanted), result.model_type, result)
                yield job.number, result
    finally:
        for job in running:
            end_process(job.process, _GRACE)


def _worker_main(pipe: Connection, pair: tuple[str, str], how: How) -> None:
    """Run one architecture's process from start to end."""
    import logging
    import warnings

    import torch

    from autoplan.hf.driving import say_less

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exit ends its own ranks first
    torch.set_num_threads(1)
    say_less()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")  # libraries warn about hundreds of models
    with redirect_stdout(sys.stderr):  # stdout is for our data, but models print
        result = score(*pair, how)
    pipe.send(result)
    pipe.close()


def _result(job: _Running, model_type: str, class_name: str, timeout: float) -> Score:
    failed = Score(model_type, class_name, "failed", seconds=round(time.monotonic() - job.since, 2))
    try:
        if job.pipe.poll():
            result: Score = job.pipe.recv()
            job.process.join(_GRACE)
            return result
        return replace(failed, reason=f"no result within {timeout:g} s")
    except EOFError:
        job.process.join(_GRACE)
        return replace(failed, reason=f"its process exited with code {job.process.exitcode}")
    finally:
        end_process(job.process, _GRACE)
        job.pipe.close()

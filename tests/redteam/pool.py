"""Keep a few processes that talk over gloo, and run cases on all of them at once, each within a time."""

from __future__ import annotations

import dataclasses
import gc
import os
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from autoplan.check.ranks.common import process_context

from .worker import Outcome, judge, setting_of

__all__ = ["Pool", "pools", "run_all"]

_SEVERITY = ("broken", "late", "raw", "wrong", "refused", "exact")
CASE_SECONDS = 120.0


class Pool:
    """Some ranks in processes of their own, started when they are first needed."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(
        self, name: str, fault: str = "", verify: str = "wrong", once: bool = False, seconds: float = CASE_SECONDS
    ) -> Outcome:
        """The outcome over all ranks: the worst of them. Ranks that do not answer in time are started anew."""
        if not self._processes:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self._pipes:
                pipe.send((name, f"{folder}/store", fault, verify, once))
            answers: dict[int, Outcome] = {}
            end = time.monotonic() + seconds
            while len(answers) < self.ranks and (left := end - time.monotonic()) > 0:
                waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
                for pipe in wait(waiting, left):
                    rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                    try:
                        answers[rank] = pipe.recv()  # type: ignore[union-attr]
                    except EOFError:
                        answers[rank] = Outcome(name, "raw", text="the process ended")
        if len(answers) < self.ranks or not all(process.is_alive() for process in self._processes):
            self.stop()
        return _over_ranks(name, answers, self.ranks)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = process_context()
        for rank in range(self.ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)


@contextmanager
def pools() -> Iterator[dict[int, Pool]]:
    """A pool for each number of ranks; they are stopped in the end."""
    made = {ranks: Pool(ranks) for ranks in (2, 4)}
    try:
        yield made
    finally:
        for pool in made.values():
            pool.stop()


def run_all(names: Iterable[str], verify: str = "wrong") -> Iterator[Outcome]:
    with pools() as ranks:
        for name in sorted(names, key=lambda name: setting_of(name)[1].ranks):
            yield ranks[setting_of(name)[1].ranks].run(name, verify=verify)


def _over_ranks(name: str, answers: dict[int, Outcome], ranks: int) -> Outcome:
    if not answers:
        return Outcome(name, "late", text="no rank answered in time")
    worst = min(answers.values(), key=lambda one: (_SEVERITY.index(one.kind), -one.error))
    kinds = {one.kind for one in answers.values()}
    if len(answers) < ranks:
        return dataclasses.replace(worst, kind="late", text=f"{len(answers)} of {ranks} ranks answered: {worst.text}")
    if "refused" in kinds and len(kinds) > 1:  # one rank stopped, the others went on or waited
        by_rank = "; ".join(f"rank {rank}: {one.kind} {one.text[:400]}" for rank, one in sorted(answers.items()))
        return dataclasses.replace(worst, kind="raw", text=f"ranks differ: {by_rank}")
    first = answers[0]
    aside = tuple(sorted({what for one in answers.values() for what in one.surroundings}))
    return dataclasses.replace(worst, verified=first.verified, surroundings=aside, seconds=first.seconds)


def _serve(rank: int, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # parallelize collects garbage: it need not look at what was imported
    while True:
        try:
            name, store, *how = pipe.recv()
        except EOFError:
            return
        pipe.send(judge(name, rank, store, *how))

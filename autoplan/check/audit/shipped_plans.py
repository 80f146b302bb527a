"""Every plan that the installed transformers ships, audited: which are exact, costlier, incomplete, dead, or wrong.

Each architecture is built as a tiny clone, so that all of its code runs; its plan is carried out by transformers on
simulated ranks. One process does them in turn; one that brings it down, or takes too long, is a line of the table.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.values.findings import Report, Shipped

MAPPINGS = ("causal_lm", "image_text", "seq2seq", "masked_lm", "speech")
Progress = Callable[[int, int, "Wild"], None]


@dataclass(frozen=True)
class Wild:
    """One shipped plan, and what became of it.

    `whole` is the share of splittable bytes that the plan leaves whole; `costlier`, `dead` count entries.
    """

    mapping: str
    model_type: str
    class_name: str
    verdict: Shipped
    costlier: int = 0
    dead: int = 0
    whole: float = 0.0
    errors: tuple[str, ...] = ()
    proof: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def audit_all(
    mappings: Iterable[str] = MAPPINGS,
    tp_size: int = 2,
    *,
    only: Sequence[str] = (),
    timeout: float = 120.0,
    progress: Progress | None = None,
) -> tuple[Wild, ...]:
    """Audit every architecture of these mappings (or `only` these model types), in transformers' order."""
    from autoplan.hf.type_rules import architectures

    wanted = [(m, t, c) for m in mappings for t, c in architectures(m) if not only or t in only]
    if not wanted:
        raise AutoplanError(f"no architecture of {', '.join(mappings)} is called {', '.join(only)}")
    rows: list[Wild] = []
    pool = _pool()
    try:
        for mapping, model_type, class_name in wanted:
            try:
                row = pool.submit(audit_one, mapping, model_type, class_name, tp_size).result(timeout)
            except (TooLate, BrokenProcessPool) as error:
                _end(pool)
                pool = _pool()
                reason = f"{type(error).__name__}: {error}"
                row = Wild(mapping, model_type, class_name, Shipped.NOT_BUILT, proof=reason)
            rows.append(row)
            if progress:
                progress(len(rows), len(wanted), row)
    finally:
        _end(pool)
    return tuple(rows)


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))


def _end(pool: ProcessPoolExecutor) -> None:
    """End the pool's own process, also when it is still busy."""
    processes = list((getattr(pool, "_processes", None) or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()


def audit_one(mapping: str, model_type: str, class_name: str, tp_size: int = 2) -> Wild:
    """One architecture. Raises nothing that an architecture can cause."""
    import torch

    torch.set_num_threads(1)
    start = time.perf_counter()
    try:
        verdict = _audited(mapping, model_type, class_name, tp_size)
    except Exception as error:  # one architecture must not stop the others, and its line says what happened
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        verdict = Wild(mapping, model_type, class_name, Shipped.NOT_BUILT, proof=reason)
    return replace(verdict, seconds=round(time.perf_counter() - start, 2))


def _audited(mapping: str, model_type: str, class_name: str, tp_size: int) -> Wild:
    from autoplan.check.audit.auditor import audit_source
    from autoplan.check.verify.clone import clone_of
    from autoplan.hf.source import resolve

    clone = clone_of(resolve(f"{model_type}:{class_name}"))
    if not conventions().shipped_plan(clone.model):
        return Wild(mapping, model_type, class_name, Shipped.NO_PLAN)
    source = resolve(clone.model, inputs=clone.feeds)
    return _row(
        Wild(mapping, model_type, class_name, Shipped.NOT_BUILT), audit_source(source, "hf", tp_size, correct=False)
    )


def _row(blank: Wild, report: Report) -> Wild:
    outcome = report.details["outcome"]
    errors = [finding for finding in report.findings if finding.level == "error"]
    crashed = next((f.proof for f in errors if f.check == "numbers" and f.kind == "cannot-run"), "")
    verdict = (
        Shipped.NOT_COMPARABLE if outcome == "untried"
        else Shipped.EXACT if outcome == "exact" and not errors
        else Shipped.CANNOT_RUN if crashed
        else Shipped.WRONG
    )  # fmt: skip
    proof = crashed or next((finding.proof for finding in errors if finding.proof), "")
    return replace(
        blank,
        verdict=verdict,
        costlier=sum(word == "costlier" for word in report.details["verdicts"].values()),
        dead=sum(finding.check == "dead-keys" for finding in report.findings),
        whole=round(float(report.details["whole"]), 3),
        errors=tuple(dict.fromkeys(finding.check for finding in errors)),
        proof=proof,
    )

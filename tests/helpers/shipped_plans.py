"""Every plan that the installed transformers ships, audited: which are exact, costlier, incomplete, dead, or wrong.

    python tests/helpers/shipped_plans.py [--mapping causal_lm] [--only llama] [--tp 2] [--json]
    python tests/helpers/shipped_plans.py --quantised fp8

Each architecture is built as a tiny clone, so that all of its code runs; its plan is carried out by transformers on
simulated ranks. One process does them in turn; one that brings it down, or takes too long, is a line of the table.

With --quantised: each architecture is built on meta with its default config, as if it were quantised by a method.
Nothing runs: which rows a plan gives a rank, and which scales, is arithmetic. At which sizes do blocks part?
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoplan.check.audit.auditor import audit_source
from autoplan.check.audit.checks.quantised import Parting, partings
from autoplan.check.audit.lines import ForeignPlan, read_foreign
from autoplan.check.verify.clone import clone_of
from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.patterns import fold_names
from autoplan.hf.quantised.methods import USUAL_CONFIGS
from autoplan.hf.source import resolve
from autoplan.hf.type_rules import architectures
from autoplan.values.findings import Report

MAPPINGS = ("causal_lm", "image_text", "seq2seq", "masked_lm", "speech")
Progress = Callable[[int, int, "Wild"], None]


class Shipped(StrEnum):
    """What became of a plan that transformers ships."""

    EXACT = "exact"
    WRONG = "wrong"  # it runs, and numbers differ
    CANNOT_RUN = "cannot run"  # the sharded model raises
    NOT_COMPARABLE = "not comparable"
    NO_PLAN = "no plan"
    NOT_BUILT = "not built"  # the model itself does not run here

    @property
    def is_bad(self) -> bool:
        return self in (Shipped.WRONG, Shipped.CANNOT_RUN)


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
    torch.set_num_threads(1)
    start = time.perf_counter()
    try:
        verdict = _audited(mapping, model_type, class_name, tp_size)
    except Exception as error:  # one architecture must not stop the others, and its line says what happened
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        verdict = Wild(mapping, model_type, class_name, Shipped.NOT_BUILT, proof=reason)
    return replace(verdict, seconds=round(time.perf_counter() - start, 2))


def _audited(mapping: str, model_type: str, class_name: str, tp_size: int) -> Wild:

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


SIZES = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Broken:
    """One shipped plan: the sizes at which the tensors of some weight part, and the first of them with its proof.

    `skipped`: why nothing could be said.
    """

    model_type: str
    class_name: str
    sizes: tuple[int, ...] = ()
    where: str = ""
    proof: str = ""
    skipped: str = ""

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.model_type}: {self.skipped}"
        if not self.sizes:
            return f"{self.model_type}: no block is parted at tp {', '.join(map(str, SIZES))}"
        return f"{self.model_type}: parts blocks at tp {', '.join(map(str, self.sizes))}; {self.where}: {self.proof}"

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "sizes": list(self.sizes)}


def audit_quantised(
    method: str,
    mappings: Iterable[str],
    *,
    only: Sequence[str] = (),
    progress: Callable[[int, int, Broken], None] | None = None,
) -> tuple[Broken, ...]:
    """All architectures that ship a plan, in transformers' order."""
    if method not in USUAL_CONFIGS:
        raise AutoplanError(
            f"no default config for method {method!r}", hint=f"choose one of {', '.join(USUAL_CONFIGS)}"
        )
    wanted = dict.fromkeys((t, c) for m in mappings for t, c in architectures(m) if not only or t in only)
    rows: list[Broken] = []
    for model_type, class_name in wanted:
        row = _quantised_one(method, model_type, class_name)
        if row is not None:
            rows.append(row)
            if progress:
                progress(len(rows), len(wanted), row)
    return tuple(rows)


def _quantised_one(method: str, model_type: str, class_name: str) -> Broken | None:
    """None for one that ships no plan."""
    try:
        source = resolve(f"{model_type}:{class_name}")
        assert source.config is not None
        source.config.quantization_config = dict(USUAL_CONFIGS[method])
        model = source.module()
        if not conventions().shipped_plan(model):
            return None
        foreign, packed = read_foreign("hf", model, source.name), source.packed(model)
    except AutoplanError as error:
        return Broken(model_type, class_name, skipped=error.message)
    assert isinstance(foreign, ForeignPlan)
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {tp: parted for tp in SIZES if (parted := partings(foreign, packed, modules, tp))}
    if not found:
        return Broken(model_type, class_name)
    first: Parting = next(iter(found.values()))[0]
    same = [one.weight for one in next(iter(found.values())) if one.proof == first.proof]
    where = fold_names(same, [name for name, _ in model.named_parameters()])[0]
    return Broken(model_type, class_name, tuple(found), where, f"{first.message}; {first.proof}")


_COLOURS = {Shipped.EXACT: "green", Shipped.WRONG: "bold red", Shipped.CANNOT_RUN: "red"}
_TELLING = {"costlier": 0, "whole": 0.1, "dead": 0}  # what more than this counts: entries, share of bytes, keys
_WIDTH = 110


def wild_line(row: Mapping[str, Any]) -> str:
    """One architecture, for a log."""
    facts = [f"{row['mapping']} {row['model_type']}: {row['verdict']}"]
    if row["costlier"]:
        facts.append(f"{row['costlier']} entries costlier")
    if row["whole"]:
        facts.append(f"{row['whole']:.0%} of splittable bytes whole")
    if row["dead"]:
        facts.append(f"{row['dead']} dead keys")
    if row["errors"]:
        facts.append(f"errors of {', '.join(row['errors'])}")
    return "; ".join(facts) + f" ({row['seconds']:.1f} s)"


def wild_view(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Sums by mapping first, then every plan that is wrong or cannot run, with its proof, then all lines.

    Of the plans that run: `costlier` have an entry that holds or moves more than it must, `incomplete` leave more than
    a tenth of the bytes whole that can be split, `dead keys` have keys that match nothing.
    """
    parts: list[RenderableType] = [_sums(rows)]
    bad = [row for row in rows if Shipped(row["verdict"]).is_bad]
    if bad:
        parts += [Padding(Text("Wrong, or cannot run", "bold"), (1, 0, 0, 0)), _bad(bad)]
    parts += [Padding(Text("All", "bold"), (1, 0, 0, 0)), *(Text(wild_line(row)) for row in rows)]
    return Group(*parts)


def _sums(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("mapping", *Shipped, "costlier", "incomplete", "dead keys")
    for mapping in dict.fromkeys(row["mapping"] for row in rows):
        mine = [row for row in rows if row["mapping"] == mapping]
        counts = Counter(row["verdict"] for row in mine)
        ran = [row for row in mine if row["verdict"] in (Shipped.EXACT, Shipped.WRONG)]
        sums = [sum(row[field] > least for row in ran) for field, least in _TELLING.items()]
        table.add_row(mapping, *(str(counts[word]) for word in Shipped), *map(str, sums))
    return table


def _bad(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("model type", "verdict", "proof")
    for row in rows:
        proof = row["proof"] if len(row["proof"]) <= _WIDTH else f"{row['proof'][:_WIDTH]}…"
        table.add_row(f"{row['model_type']}", Text(row["verdict"], _COLOURS[row["verdict"]]), proof)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def main(words: Sequence[str] | None = None) -> int:
    """Return 1 where a plan is wrong, cannot run, or parts blocks."""
    parser = argparse.ArgumentParser(description="Audit every plan that transformers ships.")
    parser.add_argument("--mapping", action="append", choices=MAPPINGS)
    parser.add_argument("--only", action="append", metavar="TYPE", default=[])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument(
        "--quantised", metavar="METHOD", help="at which tp do the blocks of this method part (fp8, awq)?"
    )
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(words)
    mappings = asked.mapping or MAPPINGS
    rows: list[Any]
    if asked.quantised:
        rows = list(audit_quantised(asked.quantised, mappings, only=asked.only, progress=note))
        bad = [row for row in rows if row.sizes]
        last = f"{len(bad)} of {len(rows)} shipped plans part blocks of {asked.quantised}"
        view: RenderableType = "\n".join([*map(str, rows), last])
    else:
        rows = list(audit_all(mappings, asked.tp, only=asked.only, progress=note))
        bad = [row for row in rows if row.verdict.is_bad]
        view = wild_view([row.to_dict() for row in rows])
    if asked.json:
        print(json.dumps([row.to_dict() for row in rows], indent=2))
    else:
        Console().print(view)
    return int(bool(bad))


def note(done: int, total: int, row: Any) -> None:
    line = wild_line(row.to_dict()) if isinstance(row, Wild) else str(row)
    print(f"{done}/{total} {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

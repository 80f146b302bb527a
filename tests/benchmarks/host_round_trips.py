"""Which architectures does a host run exactly from what we export? Measured, never asserted.

    python tests/benchmarks/host_round_trips.py transformers [model type …]

Without model types: every causal language model of transformers. Hosts: transformers, torch, automodel. For each model
one line: exact, wrong (with the error), or why the host raised; what was refused at export is named with its bytes.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import transformers
from host_runs import Job, Outcome, run_jobs

import autoplan
from autoplan.emit.exports.hf import hf_entries
from autoplan.hf.source import resolve
from autoplan.hf.type_rules import architectures

TARGETS = {"transformers": "hf", "torch": "torch", "automodel": "automodel"}
BATCH = 12  # models per start of two processes


def job_of(host: str, model_type: str) -> tuple[Job | None, str]:
    """What to run, and what was refused of it."""
    try:
        clone = resolve(model_type).tiny(dtype=torch.float64, experts="batched_mm")
        plan = autoplan.plan(clone, 2, source="inferred", prove="none")
    except autoplan.AutoplanError as error:
        return None, error.message.splitlines()[0]
    text = plan.export(TARGETS[host], clone, drop=True)
    refused = hf_entries(plan)[1] if host == "transformers" else []
    lost, whole = sum(item.bytes for item in refused), sum(entry.bytes for entry in plan.entries)
    note = f"refused {len(refused)} entries, {100 * lost / whole:.0f} % of what could be split" if refused else ""
    return Job(model_type, host, json.loads(text) if host == "transformers" else text), note


def _kind(outcome: Outcome | None) -> str:
    if outcome is None:
        return "no plan"
    return "raised" if outcome.problem else "exact" if outcome.exact else "wrong"


def main(host: str, model_types: list[str]) -> None:
    counts = {"exact": 0, "wrong": 0, "raised": 0, "no plan": 0}
    for start in range(0, len(model_types), BATCH):
        jobs, notes = [], {}
        for model_type in model_types[start : start + BATCH]:
            job, notes[model_type] = job_of(host, model_type)
            jobs += [job] if job is not None else []
        found = {outcome.model: outcome for outcome in run_jobs(jobs)}
        for job in jobs:  # a host that raised may have upset those after it in the same process
            if job.model not in found or found[job.model].problem:
                found |= {outcome.model: outcome for outcome in run_jobs([job])}
        for model_type, note in notes.items():
            outcome = found.get(model_type)
            kind = _kind(outcome)
            counts[kind] += 1
            more = "" if outcome is None else outcome.problem or f"{outcome.error:.1e}, {outcome.split} split"
            print(f"{model_type:32} {kind:8} {more}  {note}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    chosen = sys.argv[2:] or [model_type for model_type, _ in architectures("causal_lm")]
    main(sys.argv[1] if len(sys.argv) > 1 else "transformers", chosen)

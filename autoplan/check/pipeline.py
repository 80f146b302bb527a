"""The pipeline of `autoplan.plan`, by named steps: a trial, a draft, a proof.

    source ── settle_capabilities ── draft_plan ── prove_graph ── prove_ranks ── Plan
              │                      │             │              └ prove="ranks": all that verify does
              │                      │             └ permutation law and replay of the recorded graph
              │                      └ planning.py: capture, solve, write down
              └ the trial: a tiny clone, sharded, on simulated ranks (Proof.trial names it)

The trial comes first because it says what the draft may use. The steps of the proof are in `prove.py`. The pipeline
stands here and not in `planning.py`, since simulated ranks and `verify` draft plans themselves: no import runs up.
"""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch import nn

from autoplan.check.prove import prove_graph, prove_ranks, settle_capabilities
from autoplan.check.ranks.common import Budget
from autoplan.common.code.ways import added, seen_code, ways_of
from autoplan.common.options import Wish
from autoplan.common.stages import stage
from autoplan.decide.written_plans.choices import ChosenCuts
from autoplan.hf.names import version_findings
from autoplan.hf.source import Source
from autoplan.patches.simulated_ranks import alone
from autoplan.planning import draft_plan, wanted_capabilities, with_paths
from autoplan.values import Finding, Plan


def proven_plan(source: Source, wish: Wish, choices: ChosenCuts | None = None, module: nn.Module | None = None) -> Plan:
    """A plan with its proof. `wish.prove` "ranks" adds all that verify does; "none" leaves a draft."""
    with alone() as asked:
        made = _steps(source, wish, choices, source.module() if module is None else module)
    if versions := version_findings():
        made = replace(made, findings=(*made.findings, *versions))
    if not asked or not dist.is_initialized():
        return made
    text = f"the model calls torch.distributed itself ({', '.join(sorted(asked))}): planned as if it were alone"
    return replace(made, findings=(*made.findings, Finding("distributed", "note", "", text)))


def _steps(source: Source, wish: Wish, choices: ChosenCuts | None, module: nn.Module) -> Plan:
    if wish.prove == "none" or wish.ranks == 1:
        return draft_plan(source, wish, choices=choices, module=module).plan

    stage("trying a tiny clone on simulated ranks")
    wanted, budget = wanted_capabilities(wish), Budget(wish.trial_seconds)
    settled = settle_capabilities(source, wanted, wish.tp_size, wish.ep_size, wish.cp_size, choices, budget)

    draft = draft_plan(source, wish, choices=choices, capabilities=settled.capabilities, module=module)
    made = replace(draft.plan, findings=draft.plan.findings + settled.findings)
    made = with_paths(made, seen_code(added(ways_of(made.paths), settled.ways)))

    stage("proving the plan on the graph of a tiny clone")
    proof = prove_graph(source, made, draft.trace, draft.choices, settled.trial, settled.clone)
    made = replace(made, proof=proof.proof, findings=made.findings + proof.findings, entries=proof.stamp(made.entries))

    return prove_ranks(source, made, settled.clone) if wish.prove == "ranks" else made

"""All the values that travel along the path: what a trace is, what analysis found, what a plan says.

Everything here is frozen plain data without torch, so that it can be printed, compared, saved and tested by itself.
Words: a *trace* is what one run of the model did; an *axis* is a class of tensor dimensions; a *split* cuts an axis
over ranks; a *site* is a place in the running model where something is done (a sum, a copy, an edited integer).
"""

from dataclasses import replace

from autoplan.values.facts import ClassFact, ParameterFact
from autoplan.values.findings import Finding, Report, Score, Scoreboard, Traffic, Verdict
from autoplan.values.instructions import Edit, ExpertSite, HeadSite, HookSite, Means, ParameterRule, Runtime, ScopedCall
from autoplan.values.plan import Change, Entry, Obstacle, Plan, Proof, Replicated, Stack, Trial
from autoplan.values.trace import (
    Call,
    Fold,
    ModuleVisit,
    Op,
    Ref,
    Symbolic,
    TensorInfo,
    Trace,
    refs,
    refs_with_paths,
)

__all__ = [
    "Call",
    "Change",
    "ClassFact",
    "Edit",
    "Entry",
    "ExpertSite",
    "Finding",
    "Fold",
    "HeadSite",
    "HookSite",
    "Means",
    "ModuleVisit",
    "Obstacle",
    "Op",
    "ParameterFact",
    "ParameterRule",
    "Plan",
    "Proof",
    "Ref",
    "Replicated",
    "Report",
    "Runtime",
    "ScopedCall",
    "Score",
    "Scoreboard",
    "Stack",
    "Symbolic",
    "TensorInfo",
    "Trace",
    "Traffic",
    "Trial",
    "Verdict",
    "refs",
    "refs_with_paths",
    "replace",
]

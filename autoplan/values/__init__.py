"""All the values that travel along the path: the trace, the facts that analysis finds, and the plan.

Everything here is frozen plain data without torch, so that it can be printed, compared, saved and tested on its own.
Words: a *trace* records one run of the model; an *axis* is a class of tensor dimensions; a *split* shards an axis over
ranks; a *site* is a place in the running model where something is done (a sum, a copy, an edited integer).

In: plain data. Out: the same, checked when it is made. May import: nothing of ours. No torch.
"""

# ruff: noqa: F401, F403
from dataclasses import replace

from autoplan.values.estimate import Cost
from autoplan.values.findings import CutsOf, Drawn, Fed, Finding, FlowPart, Report, Score, Scoreboard, Traffic, Verdict
from autoplan.values.instructions.base import INSTRUCTIONS, Amount, Collective, Instruction, Move, Spread, instruction
from autoplan.values.instructions.boundaries import *
from autoplan.values.instructions.calls import *
from autoplan.values.instructions.modules import *
from autoplan.values.plan import (
    UNKNOWN,
    Change,
    Entry,
    ForwardCode,
    MadeFor,
    Obstacle,
    Plan,
    Proof,
    Replicated,
    SeenCode,
    Sizes,
    Stack,
    Trial,
    Version,
)
from autoplan.values.trace import (
    Call,
    ClassFact,
    Fold,
    ModuleVisit,
    Op,
    ParameterFact,
    Ref,
    Symbolic,
    TensorInfo,
    Trace,
    refs,
    refs_with_paths,
    symbolics,
)

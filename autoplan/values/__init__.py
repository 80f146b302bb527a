"""All the values that travel along the path: the trace, the facts that analysis finds, and the plan.

Everything here is frozen plain data without torch, so that it can be printed, compared, saved and tested on its own.
Words: a *trace* records one run of the model; an *axis* is a class of tensor dimensions; a *split* shards an axis over
ranks; a *site* is a place in the running model where something is done (a sum, a copy, an edited integer).

In: plain data. Out: the same, checked when it is made. May import: nothing of ours. No torch.
"""

# ruff: noqa: F401
from dataclasses import replace

from autoplan.values.estimate import Cost
from autoplan.values.findings import CutsOf, Drawn, Fed, Finding, FlowPart, Report, Score, Scoreboard, Traffic, Verdict
from autoplan.values.instructions.base import INSTRUCTIONS, Amount, Collective, Instruction, Move, Spread, instruction
from autoplan.values.instructions.boundaries import (
    AllGather,
    AllGatherPicked,
    AllGatherSequence,
    AllGatherSequenceSumGradient,
    AllReduce,
    AllReduceGradient,
    Boundary,
    Exchange,
    ExchangeToPieces,
    ExchangeToPositions,
    Halo,
    JoinPartial,
    LogitsOfPositions,
    MeanOverRanks,
    NoteShard,
    OwnPositions,
    ReduceScatterSequence,
    ScaleGradient,
    ScatterSequence,
    SequenceBoundary,
    SequenceName,
    Side,
    WholeLength,
    WithholdPartial,
)
from autoplan.values.instructions.calls import (
    AttendAcross,
    AttentionCall,
    CallOverPositions,
    CallRewrite,
    CallSite,
    CellCall,
    Cut,
    DrawOnShards,
    EmbeddingCall,
    EqualPieces,
    GatherCall,
    HeldRows,
    LengthArgument,
    LengthCall,
    LiteralArgument,
    MeanCall,
    NormCall,
    RecurrentCall,
    ReduceScatterCall,
    RewriteCall,
    RowCall,
    SumCall,
    VarianceCall,
)
from autoplan.values.instructions.modules import (
    PICKING,
    AroundModule,
    Capabilities,
    Constant,
    HookKind,
    IntegerEdit,
    LocalExperts,
    OutputShape,
    ParallelBlock,
    ParameterRule,
    Runtime,
    SplitLogits,
    VocabularyTable,
)
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

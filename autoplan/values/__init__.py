"""All the values that travel along the path: what a trace is, what analysis found, what a plan says.

Everything here is frozen plain data without torch, so that it can be printed, compared, saved and tested by itself.
Words: a *trace* is what one run of the model did; an *axis* is a class of tensor dimensions; a *split* cuts an axis
over ranks; a *site* is a place in the running model where something is done (a sum, a copy, an edited integer).

In: plain data. Out: the same, checked when it is made. May import: nothing of ours. No torch.
"""

# ruff: noqa: F401
from dataclasses import replace

from autoplan.values.estimate import Cost
from autoplan.values.findings import CutsOf, Drawn, Fed, Finding, FlowPart, Report, Score, Scoreboard, Traffic, Verdict
from autoplan.values.instructions import (
    INSTRUCTIONS,
    AllGather,
    AllGatherPicked,
    AllGatherSequence,
    AllGatherSequenceSumGradient,
    AllReduce,
    AllReduceGradient,
    Amount,
    AroundModule,
    AttentionCall,
    Boundary,
    CallRewrite,
    CallSite,
    Capabilities,
    CellCall,
    Collective,
    Constant,
    Cut,
    DrawOnShards,
    EmbeddingCall,
    EqualPieces,
    GatherCall,
    HeldRows,
    Instruction,
    IntegerEdit,
    JoinPartial,
    LengthCall,
    LiteralArgument,
    LocalExperts,
    LogitsOfPositions,
    MeanCall,
    MeanOverRanks,
    Move,
    NormCall,
    NoteShard,
    OutputShape,
    OwnPositions,
    ParallelBlock,
    ParameterRule,
    RecurrentCall,
    ReduceScatterSequence,
    RewriteCall,
    RowCall,
    Runtime,
    ScaleGradient,
    ScatterSequence,
    SequenceBoundary,
    SequenceName,
    Side,
    SplitLogits,
    Spread,
    SumCall,
    VarianceCall,
    VocabularyTable,
    WithholdPartial,
    instruction,
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
)

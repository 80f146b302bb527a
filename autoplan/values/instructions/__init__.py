"""Instructions for a live model at run time: a closed union of small frozen classes, one for each thing done.

`INSTRUCTIONS` are all of them by name, as plan files write them. docs/howto/add-an-instruction.md says how to add one.

In: plain fields. Out: frozen values that say what they take, give, cost and move. May import: what values may.
"""

# ruff: noqa: F401
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
    AttentionCall,
    CallRewrite,
    CallSite,
    CellCall,
    Cut,
    DrawOnShards,
    EmbeddingCall,
    EqualPieces,
    GatherCall,
    HeldRows,
    LengthCall,
    LiteralArgument,
    MeanCall,
    NormCall,
    RecurrentCall,
    RewriteCall,
    RowCall,
    SumCall,
    VarianceCall,
)
from autoplan.values.instructions.modules import (
    AroundModule,
    Capabilities,
    Constant,
    IntegerEdit,
    LocalExperts,
    OutputShape,
    ParallelBlock,
    ParameterRule,
    Runtime,
    SplitLogits,
    VocabularyTable,
)

"""What is known of torch's operations, each said once: one file for each family, one record for each op.

In: a recorded op. Out: how its dims follow, which literals are sizes, what it sums over, how it runs on a shard
(`records/record.py` says what a record holds). Importing this fills the tables. May import: values, common, axes. No
torch.
"""

from autoplan.ops import (
    attention,
    convolutions,
    creation,
    elementwise,
    experts,
    indexing,
    linalg,
    norms,
    pieces,
    products,
    questions,
    random,
    recurrent,
    reductions,
    sorting,
    spatial,
    views,
)
from autoplan.ops.records.record import CALLS, OPS, call_record, op_record

__all__ = [
    "CALLS",
    "OPS",
    "attention",
    "call_record",
    "convolutions",
    "creation",
    "elementwise",
    "experts",
    "indexing",
    "linalg",
    "norms",
    "pieces",
    "products",
    "questions",
    "random",
    "op_record",
    "recurrent",
    "reductions",
    "sorting",
    "spatial",
    "views",
]

"""One file for each family of ops, one record for each op. Importing this package fills the tables of `ops/record.py`.

docs/howto/add-an-op.md says how an op is added.
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
    reductions,
    sorting,
    spatial,
    views,
)
from autoplan.ops.record import CALLS, OPS, call_record, op_record

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
    "reductions",
    "sorting",
    "spatial",
    "views",
]

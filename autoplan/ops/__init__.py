"""Knowledge about torch's operations: one file for each family, one record for each op.

In: a recorded op. Out: how its dims follow, which literals are sizes, what it sums over, how it runs on a shard
(`records/record.py` says what a record holds). Importing this fills the tables. May import: values, common, axes. No
torch.
"""

# ruff: noqa: F401
from autoplan.ops import (
    attention,
    convolutions,
    creation,
    elementwise,
    indexing,
    norms,
    pieces,
    products,
    reductions,
    views,
)
from autoplan.ops.records.record import CALLS, OPS, call_record, op_record

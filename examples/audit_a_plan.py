"""Audit a hand-written plan without GPUs.

The plan shards Phi-3's packed projections as plain ones: the shapes fit, and the results are wrong.
"""

from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import autoplan

BY_HAND = {
    "model.layers.*.self_attn.qkv_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}

try:
    autoplan.plan("phi3", tp_size=2, source=BY_HAND)
except autoplan.AutoplanError as error:
    print(f"refused as a source: {error}\n")

report = autoplan.audit("phi3", BY_HAND, tp_size=2)
for finding in report.findings:
    if finding.level == "error":
        print(f"{finding.check}: {finding.where}: {finding.message}")
print("the audit found it" if not report.ok else "nothing found")

"""heads-gather: the vocabulary head gathers its logits on every rank, or stays whole.

Split logits are 1/tp of what is often a step's largest tensor, and the loss can be computed on them. Gathered, the
head's forward makes two whole copies, and a float32 loss keeps about five more through backward (an estimate).
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited
from autoplan.emit.words import bytes_text
from autoplan.values import Finding, SplitLogits

NAME = "heads-gather"
_FP32_COPIES = 5  # [tokens, vocabulary] tensors that a float32 cross-entropy keeps, as measured on a public report


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    if subject.tp_size == 1 or not subject.plan.lines:
        return
    for head in subject.solution.runtime.of(SplitLogits):
        weight = next((w for w in subject.weights if f"{head.pattern}.weight" in w.names), None)
        line = subject.plan.line_for(f"{head.pattern}.weight")
        if weight is None or (subject.plan.plan is not None and weight.said.dim is not None):
            continue
        if line is not None and "gather" in line.style:
            hint = "logits that stay sharded need a loss that accepts them, which no style brings along"
            forward, step = gather_bytes(subject, head.columns)
            text = f"logits [{subject.settings.tokens}, {head.columns}] are gathered on every rank: "
            text += f"{bytes_text(forward)} more in the head's forward, "
            text += f"about {bytes_text(step)} more by the end of a step with a float32 loss"
            yield Finding(NAME, "warn", line.pattern, text, hint, step)
        elif weight.said.dim is None:
            text = f"the head is replicated: {bytes_text(weight.bytes)} on every rank, and logits of full width"
            more = weight.bytes * (subject.tp_size - 1) // subject.tp_size
            yield Finding(NAME, "warn", head.pattern, text, "`autoplan plan` shards it", more)


def gather_bytes(subject: Audited, rows: int) -> tuple[int, int]:
    """Return the extra bytes on a rank if logits are gathered: in the head's forward, and by the end of backward."""
    whole = 2 * subject.settings.tokens * rows  # in half precision
    return 2 * whole, round((1 + 2 * _FP32_COPIES) * whole * (subject.tp_size - 1) / subject.tp_size)

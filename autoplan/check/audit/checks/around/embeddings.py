"""embeddings: a token table that stays whole, or a table of positions that is cut.

A token table cut by rows is looked up on each rank and summed; whole, it costs its bytes on every rank. A position or
type table has no such axis: a cut there breaks the lookup.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.analyse.picture.flow import node_of
from autoplan.check.audit.rows import dialect_of
from autoplan.check.audit.subject import Audited
from autoplan.emit.words import bytes_text
from autoplan.values import Finding

NAME = "embeddings"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    if subject.tp_size == 1 or not subject.plan.lines:
        return
    nodes = [node for box in subject.flow if (node := node_of(subject.flow, box)).kind == "embedding"]
    tables = {dim.parameter for node in nodes for field, dim in node.dims if field == "rows" and dim.parameter}
    for weight in subject.weights:
        if not tables & set(weight.names):
            continue
        if weight.fact.dim is not None and weight.said.dim is None:
            extra = weight.bytes * (subject.tp_size - 1) // subject.tp_size
            text = f"the table is replicated: {bytes_text(weight.bytes)} on every rank"
            # The row that shards it, in the words of the plan that was given
            dialect = dialect_of(subject.plan)
            row = dialect.value("embedding_rowwise") if dialect is not None else None
            hint = f"add {dialect.row(weight.module, row)}" if dialect and row else "`autoplan plan` shards it"
            yield Finding(NAME, "note", weight.module, text, hint, extra)
        elif weight.fact.dim is None and weight.said.dim == 0 and weight.said.line is not None:
            text = f"{weight.name} is sharded by rows: {weight.fact.reason}"
            yield subject.suspect(NAME, weight.said.line.pattern, text, "remove its row", names=weight.names)

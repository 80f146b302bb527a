"""The style of a parameter, from what was proven: which dim is cut, how, and what reads it.

Rules name what is split and say which styles they expect; the style itself is read off the facts, so that a rule can
never make a split that was not proven.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoplan.analyse.picture.flow import Node
from autoplan.common.layout import Layout
from autoplan.values import ParameterFact

__all__ = ["style_of"]

_BY_FIELD = {
    ("linear", "out"): "colwise",
    ("linear", "in"): "rowwise",
    ("stacked", "out"): "colwise",
    ("stacked", "in"): "rowwise",
    ("conv", "out"): "colwise",
    ("conv", "in"): "rowwise",
    ("embedding", "rows"): "embedding_rowwise",
    ("embedding", "width"): "embedding_colwise",
}


def style_of(fact: ParameterFact, readers: Iterable[Node], tp: int, *, gathered: bool, reduced: bool) -> str:
    """`readers` are the boxes that read the parameter; `gathered` and `reduced` tell what its module does besides."""
    if fact.dim is None:
        return "replicated_with_grad_allreduce" if fact.gradient != "local" else "replicate"
    plain = {_style_in(node, fact) for node in readers}
    if "norm" in plain and reduced:
        return "distributed_norm"
    for style in ("embedding_rowwise", "embedding_colwise", "colwise", "rowwise"):
        if style in plain:
            return _packed(style, fact, tp, gathered=gathered)
    return "local"


def _style_in(node: Node, fact: ParameterFact) -> str:
    for field, dim in node.dims:
        if dim.parameter in fact.names and dim.dim == fact.dim:
            return "norm" if node.kind == "norm" else _BY_FIELD.get((node.kind, field), "local")
    out = node.dim("out")
    is_bias = any(name in fact.names for name in node.parameters[1:])
    if is_bias and node.kind == "linear" and len(fact.shape) > 1:  # scales: they lie as their weight does
        return next((_BY_FIELD[node.kind, field] for field, dim in node.dims if dim.dim == fact.dim), "local")
    return "colwise" if is_bias and out is not None and out.layout is not None else "local"


def _packed(style: str, fact: ParameterFact, tp: int, *, gathered: bool) -> str:
    if style == "colwise" and gathered:
        return "colwise_gather_output"
    assert fact.layout is not None
    return style if Layout.parse(fact.layout).one_run(tp) or style.startswith("embedding") else f"packed_{style}"

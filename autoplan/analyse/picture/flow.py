"""What a picture of the dataflow is made of: boxes (`Node`) with dimensions (`Dim`), in a networkx graph (`Flow`).

Boxes carry their `Node` under "node", arrows the reader's "ports" at which the value arrives. Kinds of boxes, and the
dims they have:

    input, output          what enters and leaves the model
    linear                 contraction with a weight: in, out
    stacked                the same with a stack of weights (experts, one matrix per head): in, out, stack
    embedding              lookup in a table: rows, width
    conv, depthwise        convolution: in, out (depthwise: out)
    norm                   over
    scale, shift           a value times, or plus, a parameter: over
    parameter              a parameter used as data: over
    attend                 softmax attention; ports q, k, v, bias
    scan                   state-space or linear attention
    mul, add, cat, split, mix, sum, softmax, topk, pick, scatter, write, matmul, cumsum   what they say

An arrow's port "activated" says that the value went through a nonlinear function on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["Dim", "Flow", "Node", "node_of"]

Flow: TypeAlias = "nx.DiGraph[int]"


@dataclass(frozen=True)
class Dim:
    """A dimension of a box's weight: where it lies (`parameter`, `dim`), and facts that are added later."""

    size: int
    parameter: str = ""
    dim: int | None = None
    layout: str | None = None
    classes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Node:
    """One box: what it does, which module's Python did it, the parameters it reads, the dims of its weight."""

    kind: str
    module: str = ""
    parameters: tuple[str, ...] = ()
    dims: tuple[tuple[str, Dim], ...] = ()
    gathered: bool = False  # a fact added later: its output is gathered from all ranks

    def dim(self, field: str) -> Dim | None:
        return dict(self.dims).get(field)


def node_of(flow: Flow, box: int) -> Node:
    found: Node = flow.nodes[box]["node"]
    return found

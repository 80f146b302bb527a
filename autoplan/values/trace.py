"""A recorded run, and facts about its axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from autoplan.values.reasons import Reason, sentence

# A trace, the record of one run of a model, and its parts.


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor mentioned in recorded arguments: an index into `Trace.tensors`."""

    id: int


def refs(value: Any) -> Iterator[int]:
    """Yield the tensor ids mentioned in recorded arguments or outputs, in order."""
    ids: list[int] = []
    _collect((value,), ids)
    return iter(ids)


def _collect(value: Any, ids: list[int]) -> None:
    """Append the tensor ids in a value. No nested generators, and no call for a number: this runs very often."""
    for item in value.values() if isinstance(value, dict) else value:
        if type(item) is Ref:
            ids.append(item.id)
        elif isinstance(item, (tuple, list, dict)):
            _collect(item, ids)


def refs_with_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield (path, tensor id) for every tensor mentioned in recorded arguments."""
    if isinstance(value, Ref):
        yield path, value.id
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from refs_with_paths(item, (*path, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from refs_with_paths(item, (*path, key))


@dataclass(frozen=True, slots=True)
class Symbolic:
    """An integer in recorded arguments together with its origin.

    `origin` is an expression tree of tuples: ("attr", module, attribute, index|None), ("config", module, field),
    ("size", tensor id, dim), ("numel", tensor id), ("const", n), or (operator, left, right) with operator one of add
    sub mul floordiv mod neg.
    """

    value: int
    origin: tuple[Any, ...]

    def parts(self, *kinds: str) -> Iterator[tuple[Any, ...]]:
        """Yield the parts of these kinds in the origin, in order."""
        waiting = [self.origin]
        while waiting:
            part = waiting.pop()
            if part[0] in kinds:
                yield part
            waiting += [inner for inner in reversed(part[1:]) if isinstance(inner, tuple)]


def symbolics(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Symbolic]]:
    """Yield (path, integer) for every integer of known origin in recorded arguments."""
    if isinstance(value, Symbolic):
        yield path, value
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from symbolics(item, (*path, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from symbolics(item, (*path, key))
    elif isinstance(value, slice):
        for key in ("start", "stop", "step"):
            yield from symbolics(getattr(value, key), (*path, key))


_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a trace. `values` holds the elements of small integer or bool constants, flattened."""

    shape: tuple[int, ...]
    dtype: str
    kind: Literal["parameter", "buffer", "input", "constant", "activation"]
    names: tuple[str, ...] = ()
    values: tuple[int, ...] | None = None

    @property
    def differentiable(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex")) and not self.dtype.startswith("float8")

    @property
    def item_size(self) -> int:
        """Return the bytes of one element."""
        return _ITEM_BYTES.get(self.dtype, 1 if self.dtype.startswith("float8") else 4)

    @property
    def quantised(self) -> bool:
        """Return whether it is a matrix in few bits, whose numbers are meaningful only with separate scales."""
        stored = self.kind in ("parameter", "buffer") and len(self.shape) >= 2
        return stored and (self.dtype.startswith("float8") or self.dtype in ("int8", "uint8", "int32"))


class _Recorded:
    """What was recorded of an op or a call; the ids of its tensors are collected once, since analysis asks often."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """Return the ids of the tensors in its arguments, in order."""
        return tuple(refs((self.args, self.kwargs)))

    @cached_property
    def results(self) -> tuple[int, ...]:
        """Return the ids of the tensors in its outputs, in order."""
        return tuple(refs(self.outputs))


@dataclass(frozen=True)
class Op(_Recorded):
    """One aten operation. `name` has no namespace or overload ("mm"); tensors in args are `Ref`s. `outputs` mirrors
    what the op returned (Refs, possibly in tuples); `module` is the innermost running module's name."""

    name: str
    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]
    module: str


@dataclass(frozen=True)
class Call(_Recorded):
    """One outermost torch-function call made by a module's own Python code.

    `module`, `visit` and `position` identify it: the position-th call in the visit-th run of that module. `place` is
    its place in the code (common/code/code_place.py). `ops` is the half-open range of `Trace.ops` it caused. Integers
    in args are plain or `Symbolic`.
    """

    name: str
    module: str
    visit: int
    position: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    ops: tuple[int, int]
    grad_enabled: bool = True
    place: str = ""

    @property
    def source(self) -> tuple[str, str, str]:
        """The module, the function and the place in the code: what its repetitions share."""
        return self.module, self.name, self.place


@dataclass(frozen=True, slots=True)
class ModuleVisit:
    """One run of one module: tensors by path in its arguments and results, and the calls made meanwhile.

    A path is a tuple of names and indices: ("hidden_states",), ("position_embeddings", 0); positional arguments are
    named by the forward's signature. `calls` is the half-open range of `Trace.calls`.
    """

    module: str
    visit: int
    inputs: tuple[tuple[tuple[Any, ...], int], ...]
    outputs: tuple[tuple[tuple[Any, ...], int], ...]
    calls: tuple[int, int]
    parent: int | None = None  # index into Trace.visits


@dataclass(frozen=True, slots=True)
class Fold:
    """Repeated blocks of one container that were traced through representatives: member key -> representative key.

    `alike`: traced blocks of one kind, key -> the representative of the kind. A fact about one of them must hold for
    the other, or the representative cannot stand for more.
    """

    container: str
    members: tuple[tuple[str, str], ...]
    alike: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Trace:
    """One run of a model, in plain data. `module_classes` maps every module name to its class name (for printing).

    `comparisons` are the equalities that Python tested on traced integers: (module, left, right, result), each side an
    int or Symbolic. `escapes` are traced attributes whose value turned into a float or a Python index: editing those
    would change numbers, ("attr"/"config" origin, how).
    """

    tensors: tuple[TensorInfo, ...]
    ops: tuple[Op, ...]
    calls: tuple[Call, ...]
    visits: tuple[ModuleVisit, ...]
    module_classes: dict[str, str]
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)  # module -> integer attributes by name
    comparisons: tuple[tuple[str, Any, Any, bool], ...] = ()
    escapes: tuple[tuple[tuple[Any, ...], str], ...] = ()
    folds: tuple[Fold, ...] = ()
    feeds: tuple[str, ...] = ("forward",)
    real: bool = False  # traced on real (tiny) tensors rather than fake ones
    notes: tuple[str, ...] = ()
    asking: frozenset[int] = frozenset()  # inputs that required a gradient
    draws_unseen: bool = False  # training draws random numbers in calls that are not recorded

    @cached_property
    def read(self) -> frozenset[str]:
        """Return the names of the parameters and buffers that some op read."""
        tensors = {tensor for op in self.ops for tensor in op.reads}
        return frozenset(name for tensor in tensors for name in self.tensors[tensor].names)

    @cached_property
    def by_name(self) -> dict[str, int]:
        return {name: i for i, tensor in enumerate(self.tensors) for name in tensor.names}


# The findings of the analysis: facts about parameters and about classes of axes.


@dataclass(frozen=True)
class ParameterFact:
    """The facts about one parameter or buffer (with more than one name when tied).

    `dim` and `layout` say how it is sharded (None: replicated). `gradient` is "local" (a rank computes all of its own),
    "sum" (every rank holds a part of the full gradient) or "shared" (rows that several ranks hold need summing).
    `divide`: a bias that is added before a sum over ranks, so each rank adds 1/tp of it. `why`: if replicated.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    bytes: int
    buffer: bool = False
    dim: int | None = None
    layout: str | None = None
    gradient: Literal["local", "sum", "shared"] = "local"
    divide: bool = False
    axis: int | None = None  # ClassFact.id of the largest class that cuts it
    axes: tuple[int, ...] = ()  # those of all classes that cut it
    why: tuple[Reason, ...] = ()
    how: Reason | None = None  # the reason if it is sharded in an unusual way

    @property
    def reason(self) -> str:
        """Return `why` as text."""
        return sentence(self.why)


@dataclass(frozen=True)
class ClassFact:
    """One axis class: its size, its events, the parameters it is in, and whether it is split. `reason`: why not, if it
    is not."""

    id: int
    size: int
    events: frozenset[str]
    parameters: tuple[tuple[str, int], ...]  # (first name, dim)
    split: bool
    reason: Reason | None = None

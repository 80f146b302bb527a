"""Find modules that libraries which wrap a module's forward cannot shard, though autoplan can.

transformers and torch shard a linear layer by wrapping its forward: the weight becomes a DTensor, and the output is a
view of one. That breaks if the code around the module does more than call it:

    edited    the output is changed in place (`x += …`), which autograd forbids for such a view
    read      another module's code reads the weight directly (`F.linear(x, self.proj.weight)`), and gets a DTensor
    shape     the weight is no [out, in] matrix of a module that declares its widths (a convolution, a custom class)
    count     a module above reads an integer of its own that must keep its value: some libraries divide whatever is
              called `num_heads` above a layer that they shard

All are read off the trace. They hinder exports only; nothing here decides what is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from autoplan.ops import op_record
from autoplan.ops.records.answers import Shows
from autoplan.ops.records.record import writes_in_place
from autoplan.values import Obstacle, Ref, Symbolic, Trace, refs

_WIDTHS = ({"in_features", "out_features"}, {"num_embeddings", "embedding_dim"})


def obstacles(trace: Trace, modules: Iterable[str]) -> tuple[Obstacle, ...]:
    """Return the obstacles of these modules, each kind once for each module."""
    names = dict.fromkeys(modules)
    found = [*_edited(trace, names), *_read_elsewhere(trace, names), *_odd_shapes(trace, names), *_counts(trace, names)]
    return tuple(dict.fromkeys(found))


def _edited(trace: Trace, modules: dict[str, None]) -> Iterator[Obstacle]:
    """Yield modules whose output is written to, directly or through a view, by code outside the module."""
    bases: dict[int, int] = {}
    for op in trace.ops:
        # A result that shares memory with the first input
        if op_record(op.name).shows in (Shows.RESHAPED, Shows.VIEWED) and op.args and isinstance(op.args[0], Ref):
            source = bases.get(op.args[0].id, op.args[0].id)
            bases.update((output, source) for output in refs(op.outputs) if output != source)
    makers: dict[int, dict[str, None]] = {}
    for visit in trace.visits:
        for _, tensor in visit.outputs if visit.module in modules else ():
            makers.setdefault(bases.get(tensor, tensor), {})[visit.module] = None
    for op in trace.ops:
        if writes_in_place(op.name) and op.args and isinstance(op.args[0], Ref):
            for module in makers.get(bases.get(op.args[0].id, op.args[0].id), ()):
                if not _is_in(op.module, module):
                    yield Obstacle(module, "edited", by=op.module)


def _read_elsewhere(trace: Trace, modules: dict[str, None]) -> Iterator[Obstacle]:
    owners = {
        index: dict.fromkeys(name.rpartition(".")[0] for name in tensor.names)  # in order: plans are the same each time
        for index, tensor in enumerate(trace.tensors)
        if tensor.kind == "parameter"
    }
    for op in trace.ops:
        for tensor in refs((op.args, op.kwargs)):
            for module in owners.get(tensor, ()):
                if module in modules and not any(_is_in(op.module, owner) for owner in owners[tensor]):
                    yield Obstacle(module, "read", by=op.module)


def _odd_shapes(trace: Trace, modules: dict[str, None]) -> Iterator[Obstacle]:
    for tensor in trace.tensors:
        for name in tensor.names if tensor.kind == "parameter" else ():
            module, _, own = name.rpartition(".")
            if module not in modules or own != "weight" or len(tensor.shape) < 2:
                continue
            if len(tensor.shape) != 2:
                yield Obstacle(module, "shape", dims=len(tensor.shape))
            elif not any(widths <= trace.attributes.get(module, {}).keys() for widths in _WIDTHS):
                yield Obstacle(module, "shape")


def _counts(trace: Trace, modules: dict[str, None]) -> Iterator[Obstacle]:
    """Yield the integers that modules above these read from themselves. (Whether a plan divides them is not asked.)"""
    above = {module[:place] for module in modules for place, letter in enumerate(module) if letter == "."}
    read: list[Any] = [(call.args, call.kwargs) for call in trace.calls]
    read += [origin for origin, _ in trace.escapes] + [(left, right) for _, left, right, _ in trace.comparisons]
    for module, attribute in dict.fromkeys(pair for value in read for pair in _attributes_in(value)):
        if module in above and not attribute.startswith("config."):
            yield Obstacle(module, "count", attribute=attribute)


def _attributes_in(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (module, attribute) of the integers mentioned in recorded arguments."""
    if isinstance(value, Symbolic):
        value = value.origin
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        if len(value) == 4 and value[0] == "attr":
            yield value[1], value[2]
        else:
            for item in value:
                yield from _attributes_in(item)


def _is_in(module: str, outer: str) -> bool:
    return module == outer or module.startswith(f"{outer}.") or not outer

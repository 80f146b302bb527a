"""Record the trace of a model, on fake tensors where possible.

First on a folded copy with fake tensors at real widths: no memory, no weights, a cost that grows with distinct blocks
only. If the model's Python counts blocks, on all of them. If it needs real numbers (branches on values, kernels without
fake versions), on a copy with real but hollow parameters. The trace says which it was.
"""

from __future__ import annotations

import gc
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import fx, nn

from autoplan.capture.called import PART, TRAINING
from autoplan.capture.dry_run import SMALL, Twin, fake_mode, quiet
from autoplan.capture.fold import fold, kinds_of
from autoplan.capture.known_values import KnownValues
from autoplan.capture.recorder import Recording, record
from autoplan.common.conventions import conventions
from autoplan.common.errors import CaptureError, OutsideError
from autoplan.common.nested import flatten_tensors
from autoplan.common.patterns import holders
from autoplan.common.random_values import untouched_randomness
from autoplan.common.torch_internals import FakeTensorMode, own_modules
from autoplan.ops import op_record
from autoplan.ops.records.answers import Drawn
from autoplan.values import Fold, Op, Ref, Symbolic, Trace

_MOST_REAL = 4_000_000_000  # most parameters of a model that is run on hollow real tensors
_LISTED = 3  # fewest tensors in a returned list that may be the outputs of blocks
_MODEL_COPIES = (True, False)  # first folded, then with all blocks


@dataclass(frozen=True)
class Captured:
    """A trace, and the recording that made it (real tensors by id, for replaying).

    `unfold` records every block, for models whose blocks of one kind turn out to be cut in several ways.
    """

    trace: Trace
    recording: Recording
    unfold: Callable[[], Captured] | None = None


def capture_any(model: nn.Module, feeds: dict[str, dict[str, Any]], notes: tuple[str, ...] = ()) -> Captured:
    """Record on fake tensors, else on real numbers. Feeds that cannot run are left out with a note if others can."""
    enabled = gc.isenabled()
    gc.disable()  # a trace is many small objects, all of them kept, and scanning them is slow
    try:
        captured = _capture_any(model, feeds, notes)
        return replace(captured, trace=with_idle_members(captured.trace, model))
    finally:
        if enabled:
            gc.enable()


def _capture_any(model: nn.Module, feeds: dict[str, dict[str, Any]], notes: tuple[str, ...]) -> Captured:
    try:
        return _with_notes(capture_fake(model, feeds), notes)
    except CaptureError as error:
        fake_error = error
    try:
        captured = capture_hollow(model, feeds)
    except CaptureError as error:
        with suppress(CaptureError):
            note = f"traced with parameters that require gradients, since it fails without: {fake_error.message}"
            return _with_notes(capture_fake(model, feeds, requiring=True), (*notes, note))
        with suppress(CaptureError):
            supposed = capture_fake(model, feeds, supposing=True)
            note = f"traced with assumed branch outcomes, since its Python code asks for them: {fake_error.message}"
            return _with_notes(supposed, (*notes, note))
        if len(feeds) < 2:
            raise error from fake_error
        runnable, more = _runnable(model, feeds)
        if not runnable:
            raise error from fake_error
        return _capture_any(model, runnable, (*notes, *more))
    note = f"traced on real numbers, since its Python code needs them: {fake_error.message}"
    return _with_notes(captured, (*notes, note))


def _runnable(model: nn.Module, feeds: dict[str, dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    runnable: dict[str, dict[str, Any]] = {}
    notes = []
    for name, inputs in feeds.items():
        try:
            capture_any(model, {name: inputs})
            runnable[name] = inputs
        except CaptureError as error:
            notes.append(f"feed {name!r} was skipped: {error.message}")
    return runnable, notes


def _with_notes(captured: Captured, notes: tuple[str, ...]) -> Captured:
    return replace(captured, trace=replace(captured.trace, notes=captured.trace.notes + tuple(notes)))


def capture_hollow(model: nn.Module, feeds: dict[str, dict[str, Any]], *, folded: bool = True) -> Captured:
    """Record a copy whose parameters are real numbers without real storage: one random row, repeated."""
    problem: CaptureError | None = None
    for folding in _MODEL_COPIES if folded else (False,):
        copy = fold(model, _hollow, fold=folding)
        size = sum(p.numel() for p in copy.module.parameters())
        if size > _MOST_REAL:
            break
        if size <= SMALL:  # each number gets its own storage: some kernels refuse expanded rows
            with torch.no_grad():
                for parameter in copy.module.parameters():
                    parameter.data = parameter.data.contiguous()
        _settle_experts(copy.module)
        copy.module.eval()
        try:
            with untouched_randomness():
                trace, recording = record(copy.module, feeds, folds=copy.folds)
            return Captured(replace(trace, real=True), recording)
        except CaptureError as error:
            problem = error
            if not copy.folds:
                break
    raise problem or CaptureError(
        "the model's Python code depends on tensor values, and it is too large to run for real",
        hint="plan a smaller model of the same class and use its plan's feeds",
    )


def _hollow(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if not tensor.is_floating_point():
        real = torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().cpu().clone()
    elif not isinstance(tensor, nn.Parameter) and not tensor.is_meta:
        real = tensor.detach().cpu().clone()
    else:
        row = torch.randn(tensor.shape[-1:], generator=torch.Generator().manual_seed(len(name)))
        real = (row * 0.05).to(tensor.dtype).expand(tensor.shape)
    return nn.Parameter(real, requires_grad=False) if isinstance(tensor, nn.Parameter) else real


def capture_fake(
    model: nn.Module,
    feeds: dict[str, dict[str, Any]],
    *,
    folded: bool = True,
    supposing: bool = False,
    requiring: bool = False,
) -> Captured:
    """Record a copy of `model` without storage. Raise CaptureError when its Python needs more than shapes.

    `supposing` makes up the outcome of branches on values. `requiring`: parameters require gradients.
    """
    problem: CaptureError | None = None
    unfolded = counted = False
    for folding, knowing in product(_MODEL_COPIES if folded else (False,), (True,) if supposing else (False, True)):
        if folding and counted:
            continue
        mode = fake_mode()
        copy = fold(model, _faker(mode), fold=folding)
        if folding and not copy.folds:
            unfolded = True
        elif unfolded and not folding:
            break  # nothing to fold: all blocks have been tried already
        _settle_experts(copy.module)
        copy.module.eval()
        for parameter in copy.module.parameters() if requiring else ():
            parameter.requires_grad_(parameter.is_floating_point())
        try:
            with untouched_randomness(), quiet():
                fake = KnownValues(mode, supposing=supposing) if knowing else mode
                trace, recording = record(copy.module, feeds, fake_mode=fake, folds=copy.folds)
            counted = bool(copy.folds) and _gives_more_unfolded(model, feeds, trace)
            if not counted:
                return Captured(trace, recording)
        except CaptureError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _gives_more_unfolded(model: nn.Module, feeds: dict[str, dict[str, Any]], trace: Trace) -> bool:
    """Return whether the unfolded model returns another list of block outputs than the folded copy did.

    True as well if the unfolded model fails: then the recorded run of the folded copy is not what the model does.
    """
    calls = [feed for feed in feeds.values() if PART not in feed]
    visits = [visit for visit in trace.visits if visit.module == ""]
    for feed, visit in zip(calls, visits, strict=False):
        listed = Counter(path[:-1] for path, _ in visit.outputs if path and isinstance(path[-1], int))
        if TRAINING in feed or max(listed.values(), default=0) < _LISTED:
            continue
        unfolded = Twin(model, folded=False)
        unfolded.module.eval()
        try:
            results = flatten_tensors(unfolded.run(unfolded.module, feed))
        except OutsideError:
            raise
        except Exception:  # foreign code may raise anything; recording all blocks will report it
            return True
        recorded = [(path, trace.tensors[tensor].shape) for path, tensor in visit.outputs]
        if [(path, tuple(tensor.shape)) for path, tensor in results] != recorded:
            return True
    return False


def _faker(mode: FakeTensorMode) -> Any:
    """Return a function that makes a fake CPU tensor of the same shape, which requires no gradient (see recorder)."""

    def fake(tensor: torch.Tensor, name: str) -> torch.Tensor:
        with mode:
            empty = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")
        return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty

    return fake


def _settle_experts(module: nn.Module) -> None:
    """Choose the batched form of experts, with equal results: the grouped one lacks fake versions for some dtypes."""
    seen: set[int] = set()
    for part in module.modules():
        for value in list(vars(part).values()):
            if id(value) not in seen and hasattr(value, "to_dict"):
                seen.add(id(value))
                for setting, choice in conventions().kernel_settings:
                    if hasattr(value, setting):
                        setattr(value, setting, choice)


def capture_real(model: nn.Module, feeds: dict[str, dict[str, Any]], *, keep_values: bool = False) -> Captured:
    """Record a real model, which must not be used afterwards: its stored integers are replaced."""
    for parameter in model.parameters():
        if parameter.is_leaf:  # a scripted submodule may hold a non-leaf tensor
            parameter.requires_grad_(False)
    with untouched_randomness():
        trace, recording = record(model, feeds, keep_values=keep_values)
    return Captured(replace(trace, real=True), recording)


# Experts that no token chose follow one that ran.
#
# A model that keeps its experts in a list runs only those that some token chose. With the few tokens of a trace most
# never run, and their weights would stay replicated. But the code that runs one expert runs them all, so what the trace
# says of one that ran holds for the others, as with the folded blocks of a deep stack (see fold.py). Folded blocks are
# left out before the run, idle experts are taken out of the trace after it.
#
# Only members of one ModuleList or ModuleDict count, only if they are of one kind, and only if they hold matrices: a
# list may also hold the steps of a block, some of which (a second norm) run on a branch that was not taken.


def with_idle_members(trace: Trace, model: nn.Module) -> Trace:
    """Return the trace without modules that never ran if another member of their list did: that one stands for them."""
    folds = tuple(_folds(trace, model))
    if not folds:
        return trace
    idle = {f"{fold.container}.{member}" for fold in folds for member, _ in fold.members}

    def stays(name: str) -> bool:
        return name not in idle and not any(holder in idle for holder in holders(name))

    return replace(
        trace,
        tensors=tuple(
            info if not info.names or any(map(stays, info.names)) else replace(info, kind="constant", names=())
            for info in trace.tensors
        ),
        module_classes={name: kind for name, kind in trace.module_classes.items() if stays(name)},
        attributes={name: values for name, values in trace.attributes.items() if stays(name)},
        folds=(*folds, *trace.folds),  # innermost first: folded blocks have such lists, too
    )


def _folds(trace: Trace, model: nn.Module) -> Iterator[Fold]:
    ran = {visit.module for visit in trace.visits}
    busy = {holder for name in (*ran, *_read(trace)) for holder in holders(name)} | ran
    left_out = {fold.container: dict(fold.members) for fold in trace.folds}  # before the run: no need to ask again
    for name, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.ModuleDict) or name not in trace.module_classes:
            continue
        folded = left_out.get(name, {})
        blocks = {
            key: block for key, block in own_modules(container).items() if block is not None and key not in folded
        }
        members = {key: block for key, block in blocks.items() if any(p.dim() > 1 for p in block.parameters())}
        at_work = [key for key in members if f"{name}.{key}" in ran]
        idle = [key for key in members if f"{name}.{key}" not in busy]
        if not at_work or not idle:
            continue
        kinds = dict(zip(members, kinds_of(list(members.values())), strict=True))
        first = {kinds[key]: key for key in reversed(at_work)}
        followers = tuple((key, first[kinds[key]]) for key in idle if kinds[key] in first)
        if followers:
            yield Fold(name, followers)


def _read(trace: Trace) -> Iterator[str]:
    """Yield the names of tensors that ops read, unless all that comes of it is multiplied by zero: code that reads idle
    experts that way does so for gradients of zero."""
    used: set[int] = set()
    read: set[int] = set()
    for op in reversed(trace.ops):
        needed = op.name.endswith("_") or not read.isdisjoint(op.results) or used.isdisjoint(op.results)
        if needed and not (op_record(op.name).drawn is Drawn.MUL and 0 in op.args):
            read.update(op.reads)
        used.update(op.reads)
    return (name for tensor in read for name in trace.tensors[tensor].names)


# Show a trace as a `torch.fx.Graph`: to print, to draw, to post-process with FX's own tools.
#
# Every aten op is a node in the order in which it ran; parameters and buffers are `get_attr` nodes under their names,
# inputs are placeholders. `node.meta` has what the trace knows: "module" (whose Python made the op), "shape",
# "dtype".


def graph_of(trace: Trace) -> fx.Graph:
    """Return the ops of a trace as an FX graph. It shows one run: its sizes are the numbers of that run."""
    graph = fx.Graph()
    nodes: dict[int, fx.Node] = {}
    for index, tensor in enumerate(trace.tensors):
        if tensor.kind in ("input", "constant"):
            node = graph.placeholder(f"{tensor.kind}_{index}")
        elif tensor.kind in ("parameter", "buffer") and tensor.names:
            node = graph.get_attr(tensor.names[0])
        else:
            continue
        node.meta.update(shape=tensor.shape, dtype=tensor.dtype, names=tensor.names)
        nodes[index] = node
    for op in trace.ops:
        node = graph.call_function(_target(op), _plain(op.args, nodes), _plain(op.kwargs, nodes))
        node.meta.update(module=op.module)
        # Several outputs are bound through `getitem`; an op that returns its input gives it a new node
        for position, item in enumerate(op.outputs):
            if isinstance(item, Ref):
                info = trace.tensors[item.id]
                output = node if len(op.outputs) == 1 else graph.call_function(operator.getitem, (node, position))
                output.meta.update(module=op.module, shape=info.shape, dtype=info.dtype)
                nodes[item.id] = output
    results = tuple(nodes[t] for visit in trace.visits if visit.parent is None for _, t in visit.outputs if t in nodes)
    graph.output(results)
    graph.lint()
    return graph


def _target(op: Op) -> Any:
    packet = getattr(torch.ops.aten, op.name, None)
    overload = getattr(packet, op.overload, None) if packet is not None else None
    if overload is not None:
        return overload

    def stands_for(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{op.name}.{op.overload} is not an aten op: the graph can be read, but not run")

    stands_for.__name__ = stands_for.__qualname__ = f"{op.name}_{op.overload}".replace(".", "_").replace(":", "_")
    return stands_for


def _plain(value: Any, nodes: dict[int, fx.Node]) -> Any:
    if isinstance(value, Ref):
        return nodes.get(value.id)
    if isinstance(value, Symbolic):
        return value.value
    if isinstance(value, tuple):
        return tuple(_plain(item, nodes) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item, nodes) for key, item in value.items()}
    return value

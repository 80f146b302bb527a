"""Refuse what the trace has not seen: unrecorded calls and outputs."""

from __future__ import annotations

import dis
import linecache
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.nested import (
    Path,
    change_at,
    change_if_tensor,
    change_input,
    changed_inside,
    flatten_tensors,
    is_record,
    signature_names,
)
from autoplan.common.patterns import is_under, matches
from autoplan.common.torch_internals import DisableTorchFunction, own_parameters, transforms_are_active
from autoplan.execute import collectives
from autoplan.execute.collectives import (
    RankGroup,
    all_reduce,
    copy_to_ranks,
    gradient_is_summed,
    is_of_compiled_code,
    scale_gradient,
)
from autoplan.execute.parameters.held import record_of
from autoplan.values import AllReduceGradient, Constant, Runtime

# What no recorded call did, where hooks can detect it. No instruction of a plan covers any of this.
#
# Modules that never ran: they are replicated, and so are the gradients that they produce. But they may read a value
# whose gradient is all-reduced, since every known reader gives a partial one. There a replicated gradient would count
# once per rank, so it is divided by the number of ranks.
#
# Constants that turn out not to be: a stream may be zeros until a branch fills it. Its readers then give a partial
# gradient that no instruction covers. It is summed, or the call is refused.


def watch_unrecorded(modules: dict[str, nn.Module], seen: Runtime, group: RankGroup) -> Iterator[RemovableHandle]:
    """Yield the hooks that divide the gradients of idle modules, and sum those of values that were constants."""
    if group.size == 1:
        return
    given_on = any(instruction.side == "output" for instruction in seen.of(AllReduceGradient))
    for name, module in modules.items():
        if any(is_under(pattern, name) for pattern in seen.idle):
            watch = partial(_give_parts, _Idle(name, group.size, given_on))
            yield module.register_forward_pre_hook(watch, with_kwargs=True)
        for constant in seen.constants:
            if matches(constant.pattern, name):
                yield _watch(module, name, constant, group)


class _Idle(NamedTuple):
    """A module that never ran. `given_on`: whether others return values whose gradient is summed."""

    name: str
    ranks: int
    given_on: bool


def _give_parts(idle: _Idle, module: nn.Module, args: Any, kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return None
    if torch.compiler.is_compiling():
        raise _compiled(idle)

    def part(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return changed_inside(value, part)
        if idle.given_on and is_of_compiled_code(value):
            raise _compiled(idle)
        return scale_gradient(value, 1.0 / idle.ranks) if gradient_is_summed(value) else value

    with DisableTorchFunction():
        return tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()}


def _compiled(idle: _Idle) -> PlanMismatchError:
    return PlanMismatchError(
        f"{idle.name} did not run in any recorded call; in compiled code it is unknown whether its gradients are "
        "summed over ranks",
        hint=f"plan with inputs= that reach {idle.name}, or run this call without torch.compile",
    )


def _watch(module: nn.Module, name: str, constant: Constant, group: RankGroup) -> RemovableHandle:
    side, path, names = constant.side, constant.path, signature_names(module)

    def change(x: torch.Tensor) -> torch.Tensor:
        if constant.sums or not (x.requires_grad and torch.is_grad_enabled()):
            return copy_to_ranks(x, group)
        place = "".join(f"[{step!r}]" for step in path)
        raise PlanMismatchError(
            f"the {side} of {name}{' at ' * bool(place)}{place} has a partial gradient, but was a constant in every "
            "recorded call",
            hint="plan with inputs= in which it is not (several calls: inputs={'usual': {…}, 'other': {…}})",
        )

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:  # masks that are no tensors stay as they are
        with DisableTorchFunction():
            return change_input(args, kwargs, names, path, change, name, at=change_if_tensor)

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        with DisableTorchFunction():
            return change_if_tensor(output, path, change, name)

    if side == "output":
        return module.register_forward_hook(after)
    return module.register_forward_pre_hook(before, with_kwargs=True)


# Outputs of the model that the plan's trace never saw must be replicated, or they are refused.
#
# A caller can ask a model for more than it returned when it was planned (attention weights, hidden states), or for
# something else (embeddings instead of logits). Most of these are replicated. Some are not: attention weights of a
# rank's own heads, hidden states of its positions. The tensor itself does not show it, so ranks compare their values,
# once for each output. A known output is recognised by the sizes of the dims that weights determine.
#
# Where the gradient of such an output is all-reduced further up, the gradient from its caller is divided by the number
# of ranks.

_TOLERANCE = 1e-2  # of the largest value: more than rounding, less than different heads
_OF_LAYERS = 3  # depth of a cache in tuples: the keys of a layer


class UnseenOutputs:
    """A check of the model's outputs. `seen`: the outputs that the plan knows, and the recorded sizes of dims that
    weights determine; `names`: the arguments of forward, since caches come out and go in."""

    def __init__(self, seen: Runtime, names: Iterable[str], group: RankGroup) -> None:
        self.seen, self.shapes = frozenset(seen.outputs), {shape.path: shape for shape in seen.shapes}
        self.by_name = any(path and isinstance(path[0], str) for path in self.seen)
        self.names, self.group = frozenset((name,) for name in names), group
        self.whole: set[tuple[Any, ...]] = set()  # compared before and found replicated
        self.partial = False  # whether gradients may be partial and unsummed: then none is allowed
        self.shorter = False  # whether a sequence ends before a known output: what it holds may be others than recorded

    def check(self, output: Any) -> Any:
        """Raise for an output that differs between ranks. Compiled code is not interrupted for it."""
        if not self.seen or torch.compiler.is_compiling():
            return output
        alike = (isinstance(output, dict) or is_record(output)) == self.by_name
        for path, tensor in list(flatten_tensors(output)):
            if path[:1] in self.names or (not alike and len(path) >= _OF_LAYERS):
                continue
            strange = self._strange(path, tensor) if alike and path in self.seen else ()
            is_known = strange is None
            if is_known and not self.shorter or isinstance(tensor, DTensor) and not strange or tensor.dim() == 0:
                continue
            if self.partial and tensor.requires_grad and not is_known:
                name = ".".join(map(str, path))
                raise PlanMismatchError(
                    f"output {name!r} requires grad, but was not returned in any recorded call, so its gradient "
                    "may be partial",
                    hint="plan with inputs= for which the model returns it, or call it under torch.no_grad()",
                )
            compared = (alike, path, strange)
            if compared not in self.whole:
                if isinstance(tensor, DTensor) or not self._agrees(tensor.detach()):
                    raise _refusal(path, tensor, strange or ())
                self.whole.add(compared)
            if gradient_is_summed(tensor) and not is_known:
                part = partial(scale_gradient, vector=1.0 / self.group.size)
                output = change_at(output, path, part, "the model")
        return output

    def _strange(self, path: Path, tensor: torch.Tensor) -> tuple[tuple[int, int, int], ...] | None:
        """Return the features of a known output whose size changed: (dim, now, recorded). None: the output is as
        recorded."""
        shape = self.shapes.get(path)
        if shape is None or tensor.dim() != shape.dims:
            return None
        sizes = [(dim, tensor.shape[dim], size) for dim, size in shape.features]
        return tuple((dim, now, size) for dim, now, size in sizes if now != size) or None

    def _agrees(self, mine: torch.Tensor) -> bool:
        """Return whether a tensor is replicated. All ranks get the same answer, otherwise they would deadlock."""
        size = torch.tensor([float(mine.numel()), -float(mine.numel())], device=mine.device)
        largest, smallest = all_reduce(size, self.group, "max").tolist()
        if largest != -smallest:
            return False
        values = mine.double() if mine.dtype != torch.bool else mine.to(torch.float64)
        mean = all_reduce(values, self.group) / self.group.size
        finite = torch.isfinite(mean)
        apart = torch.where(finite, (values - mean).abs(), 0.0).max() if mine.numel() else values.new_zeros(())
        bound = torch.where(finite, mean.abs(), 0.0).max() if mine.numel() else apart
        worst = all_reduce(torch.stack([apart, bound]), self.group, "max").tolist()
        return bool(worst[0] <= _TOLERANCE * worst[1])


def _refusal(path: Path, tensor: torch.Tensor, strange: tuple[tuple[int, int, int], ...]) -> PlanMismatchError:
    name = ".".join(map(str, path)) or "output"
    for dim, now, size in strange:
        return PlanMismatchError(
            f"the sharded model returns {name!r} of shape {list(tensor.shape)}: its dim {dim} has {now} "
            f"features, but had {size} when planned",
            hint="if this call takes another path, plan with inputs= that cover it; else the plan does not fit this "
            "model: plan again, and check with autoplan.verify(model, plan)",
        )
    return PlanMismatchError(
        f"output {name!r} of shape {list(tensor.shape)} differs between ranks: each holds a part of it, and it "
        "was not returned in any recorded call",
        hint="plan with inputs= that request it like this call, or do not request it",
    )


# One error for function transforms of a sharded model (`torch.func.grad`, `vmap`, forward derivatives, export).
#
# They need rules for every op, and communication has none. Without this check each raises another error, from the
# middle of the model.


def refuse_transforms(module: nn.Module) -> None:
    """Raise where a module with sharded parameters runs inside a function transform."""
    if torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and not torch.compiler.is_exporting()):
        return  # compilers use transforms internally; that of torch 2.11 reports an export
    if transforms_are_active():
        how, instead = "a torch.func transform (grad, vjp, jvp, vmap)", "torch.autograd.grad, with create_graph"
    elif forward_ad._current_level >= 0:
        how, instead = "a forward derivative", "torch.autograd.grad"
    elif torch.compiler.is_exporting():
        how, instead = "torch.export", "torch.compile, or exporting the unsharded model"
    else:
        return
    raise AutoplanError(
        f"{type(module).__name__} is sharded and cannot be called inside {how}, which does not see communication "
        "between ranks",
        hint=f"use {instead} instead",
    )


# An unplanned path that is reached while the model runs on shards is named: the module, the call, what to do.
#
# Code may take another path with other sizes or arguments than in the recorded calls. On a rank's shards this often
# ends in a shape error, raised by torch in the middle of the model. The traceback tells whose code made the call;
# nothing is noted while models run.

Line: TypeAlias = tuple[FrameType, int]
SHAPE_ERRORS = (RuntimeError, IndexError, ValueError, AssertionError)
_PLAIN = frozenset(SHAPE_ERRORS)  # raised by torch and Python; subclasses are about memory, networks
_SHAPES_BY_NAME = "einops"  # a library with its own errors for shapes
_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_COLLECTIVES = os.path.abspath(collectives.__file__)
_CALLS = nn.modules.module.__file__  # where a module calls its forward
_RAISE = dis.opmap["RAISE_VARARGS"]
_HINT = (
    "if the unsharded model can run this call, it takes a path that was not traced: plan again with it besides the "
    "usual call, inputs={'usual': {argument: value}, 'other': {argument: value}}"
)


def unseen_path(model: nn.Module, error: BaseException) -> AutoplanError | None:
    """Return the error that replaces a shape error raised below `model`; None if the error is about something else."""
    steps = list(_steps(error.__traceback__))
    # Find whether a collective of ours failed inside torch.
    files = [step.tb_frame.f_code.co_filename for step in steps]
    inside = files[len(files) - files[::-1].index(_COLLECTIVES) :] if _COLLECTIVES in files else []
    if bool(inside) and all(file.startswith(_TORCH) for file in inside):
        return AutoplanError(
            f"communication failed inside {type(model).__name__}: {str(error).strip()}",
            hint="another rank stopped or ran something else; look for its error first. The timeout is set by "
            "init_process_group(timeout=...)",
        )
    if not steps or not _is_of_shapes(error, steps[-1]):
        return None
    running = [candidate for step in steps if isinstance(candidate := step.tb_frame.f_locals.get("self"), nn.Module)]
    if running and own_parameters(running[-1]) and record_of(running[-1]) is None:
        message = f"{type(running[-1]).__name__} was added after the model was sharded: {str(error).strip()}"
        return PlanMismatchError(message, hint="add it before autoplan.parallelize, and plan again")
    own = [at for at, step in enumerate(steps) if _runs_on_shards(step)]
    if not own or any(step.tb_frame.f_code.co_filename.startswith(_DISTRIBUTED) for step in steps[own[-1] :]):
        return None
    above = list(traceback.walk_stack(sys._getframe(1)))  # nearest first
    within = [(step.tb_frame, step.tb_lineno) for step in steps[own[-1] :]]
    before = [*reversed(above), *((step.tb_frame, step.tb_lineno) for step in steps[: own[-1]])]
    place = _innermost(within)
    if place is None and _has_right_dtype(steps[own[-1]].tb_frame):  # raised by a layer of torch: blame its caller
        place = _innermost(before)
    if place is None:  # its input is wrong, sharded or not
        return None
    module = steps[own[-1]].tb_frame.f_locals["self"]
    outer = (frame.f_locals.get("self") for frame, _ in reversed(above))
    roots = (candidate for candidate in outer if isinstance(candidate, nn.Module) and module in candidate.modules())
    root = next(roots, model)
    name = next((name for name, part in root.named_modules() if part is module), "")
    message = (str(error).strip() or "no message").splitlines()[0]
    return PlanMismatchError(
        f"{name or 'the model'} ({type(module).__name__}) fails on a rank's shards in this call: "
        f"{_place(place)}: {type(error).__name__}: {message}",
        hint=_HINT,
    )


def _steps(trace: TracebackType | None) -> list[TracebackType]:
    steps = []
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    return steps


def _is_of_shapes(error: BaseException, last: TracebackType) -> bool:
    """Return whether a call failed, as opposed to the model's own code raising an error of its own."""
    if type(error).__module__.partition(".")[0] == _SHAPES_BY_NAME:
        return True
    code = last.tb_frame.f_code
    refused = code.co_code[last.tb_lasti] == _RAISE and not code.co_filename.startswith(_TORCH)
    return type(error) in _PLAIN and not refused


def _runs_on_shards(step: TracebackType) -> bool:
    """Return whether a frame runs code of a module with sharded parameters, or with those of which ranks read pieces or
    use on their own positions; its own or those of its submodules."""
    frame = step.tb_frame
    module = frame.f_locals.get("self")
    if not isinstance(module, nn.Module) or frame.f_code.co_filename.startswith((_OURS, _CALLS)):
        return False
    records = (record for part in module.modules() if (record := record_of(part)) is not None)
    parameters = (held for record in records for held in record.parameters.values())
    return any(held.dim is not None or held.read is not None for held in parameters)


def _has_right_dtype(frame: FrameType) -> bool:
    """Return whether a layer's inputs have its weights' dtype (integers for a table); then it must be sizes that do not
    fit."""
    layer = frame.f_locals["self"]
    dtypes = [value.dtype for value in frame.f_locals.values() if isinstance(value, torch.Tensor)]
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return not any(dtype.is_floating_point for dtype in dtypes)
    own = {parameter.dtype for parameter in own_parameters(layer).values() if parameter is not None}
    return own.issuperset(dtypes)


def _innermost(lines: list[Line]) -> Line | None:
    """Return the last line that is neither torch's nor ours: the model's own code, or a function that it calls."""
    theirs = [line for line in lines if not line[0].f_code.co_filename.startswith((_OURS, _TORCH))]
    return theirs[-1] if theirs else None


def _place(line: Line) -> str:
    """Return the file, the line number and the line."""
    code, number = line[0].f_code, line[1]
    text = linecache.getline(code.co_filename, number).strip()
    return f"{os.path.basename(code.co_filename)}:{number} in {code.co_name}" + (f", {text}" if text else "")
